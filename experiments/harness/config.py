"""What an experiment can be told: groups of options that commands share, and defaults."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

import fisherjax as fj
from experiments.harness import commands
from experiments.harness.commands import check_name, contents
from experiments.harness.records import WHERE_AND_HOW

MODELS = {
    "mlp": fj.networks.MLP,
    "residual_mlp": fj.networks.ResidualMLP,
    "lenet": fj.networks.LeNet,
    "cnn": fj.networks.CNN,
    "simple_cnn": fj.networks.SimpleCNN,
    "simple_cnn_mnist": fj.networks.SimpleCNNMNIST,
    "normed_cnn": fj.networks.NormedCNN,
    "vision_transformer": fj.networks.VisionTransformer,
    "transformer": fj.networks.Transformer,
}
OF_IMAGES = [name for name in MODELS if name != "transformer"]
PARTITIONS = ("dirichlet_of_client", "iid", "niid_bench", "classes_per_client")
IMAGES = fj.datasets.NAMES
PLAYS = "tiny_shakespeare"
SERVER_OPTIMIZERS = ("none", "sgd", "momentum", "adam", "yogi", "adagrad")
Group = tyro.conf.OmitArgPrefixes
_LATER = (
    *("beta", "min_size", "classes_per_client", "weight_decay", "augment_border", "normalize"),
    *("label_smoothing", "distillation", "choose", "aside"),
    *("then_rounds", "then_epochs", "central", "calibrate", "exchanges"),
)
"""Options that the first runs did not have; their defaults are what those runs did."""


# tyro shows the strings under the fields as --help and keeps their line breaks: one line each.
@dataclasses.dataclass(frozen=True)
class Data:
    """What is learned, and who holds which part of it."""

    dataset: Annotated[str, commands.names(IMAGES)] = "digits"
    """What to learn; also chooses the other defaults: see `--dataset mnist --help`."""
    model: Annotated[str, commands.names(OF_IMAGES)] = "mlp"
    """The network; lenet and cnn take images of at least 16 x 16 pixels."""
    num_clients: int = 5
    """Over how many clients the training data are split."""
    partition: Annotated[str, commands.names(PARTITIONS)] = "dirichlet_of_client"
    """How: Dirichlet shares of each client or of each class (niid_bench), classes, or iid."""
    alpha: float = 0.1
    """Of dirichlet_of_client: 0.05 gives a client one or two classes, 100 nearly equal shares."""
    beta: float = 0.1
    """Of niid_bench: at 0.01 a class goes to one client or two, at 100 to all equally."""
    min_size: int = 10
    """Of niid_bench: it is drawn again until every client has so many examples."""
    classes_per_client: int = 2
    """Of classes_per_client: how many classes each client owns ("#C")."""
    augment: bool = False
    """Crop and mirror training images at random; never for the Fisher information."""
    augment_border: Literal["constant", "reflect"] = "constant"
    """What crops see beyond the edge: zeros, or the image mirrored there."""
    normalize: bool = True
    """Subtract the mean of the pixels and divide by their deviation, after scaling to [0, 1]."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""


@dataclasses.dataclass(frozen=True)
class AnyData(Data):
    """What is learned, and who holds which part of it."""

    dataset: Annotated[str, commands.names((*IMAGES, PLAYS))] = "digits"
    """What to learn; also chooses the other defaults: see `--dataset mnist --help`."""
    model: Annotated[str, commands.names(MODELS)] = "mlp"
    """The network; lenet and cnn take images of at least 16 x 16 pixels, transformer plays."""
    num_clients: int = 30
    """Over how many clients the training data are split; plays have a client for each role."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How clients train: by stochastic gradient descent."""

    learning_rate: float = 0.05
    """Of every step."""
    momentum: float = 0.9
    """0 is plain stochastic gradient descent."""
    weight_decay: float = 0.0
    """Times the weights, added to every gradient."""
    label_smoothing: float = 0.0
    """Share of a label that all classes get alike; 0.1 helps clients of few classes to merge."""
    batch_size: int = 32
    """Examples of a step."""
    clients_per_chunk: int | None = None
    """Clients computed side by side; otherwise one on a CPU and all elsewhere."""


@dataclasses.dataclass(frozen=True)
class Merging:
    """How client models become one; each method's own options are in the groups below."""

    algorithms: Annotated[tuple[str, ...], commands.names(fj.algorithms.merges())] = (
        *("fedavg", "fisher_merge", "regmean", "fedfisher_diag", "fedfisher_kfac"),
    )
    """Methods, NAME+dense and fedov+student too; fedfisher_full takes a few thousand parameters."""
    fisher_kind: Literal["true", "sampled", "empirical", "curvature_propagation"] = "true"
    """Of which labels: all (true; random sums for plays), random sums, drawn ones, the data's."""
    max_examples: int = 2000
    """Of a client, drawn at random, for its Fisher information or Gram matrices; 0 is all."""
    solver: Literal["cg", "gd", "adam"] = "cg"
    """Of fedfisher_*; gd and the paper's adam without damping, adam with 500 validation images."""
    distillation: Literal["fedfisher", "fedlpa"] = "fedfisher"
    """Of dense: constants, start and weights of the teacher, as in the experiments of a paper."""
    choose: Literal["last", "validation", "test"] = "last"
    """Of dense and otfusion: nothing (last), or the best on 500 training, or on the test images."""
    aside: Literal["train", "test"] = "train"
    """Where fedov+student learns the vote: held-out training rows, or half of the test images."""
    options: tyro.conf.Suppress[commands.Options] = ()
    """What methods were told, ("fedprox.mu", 0.1) for example."""


@dataclasses.dataclass(frozen=True)
class OneShot:
    """One round of merging; the defaults are those of the digits demo."""

    data: Group[Data] = Data()
    training: Group[Training] = Training()
    merging: Group[Merging] = Merging()
    epochs: int = 30
    """Passes of every client over its own data."""
    partition_seeds: tuple[int, ...] = (0, 1, 2, 3)
    """One split for each; they have nothing to do with the seeds of training."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the initial model and of training; each is trained once on each split."""
    then_rounds: int = 0
    """Rounds of federated averaging after each merged model."""
    then_epochs: int = 0
    """Of each of those rounds; 0 is as many as before the merge."""
    calibrate: tuple[Literal["analytic_head", "ccvr"], ...] = ()
    """After each merge, an exchange without training: a row ALGORITHM+analytic_head, or +ccvr."""
    exchanges: int = 0
    """So many after each merge, the head and natural gradients: rows ALGORITHM+natural_gradient."""
    central: bool = True
    """Also train a model on all the data, the ceiling."""
    seeds_together: int | None = None
    """So many seeds side by side, all of a split in one program, which takes no seconds apart."""
    on_nonfinite: Literal["raise", "drop"] = "raise"
    """Stop when a client diverges, or leave it out of every merge."""
    out: commands.FolderOrNone = None
    """Folder for the results, otherwise runs/NAME; an unfinished run there continues."""


@dataclasses.dataclass(frozen=True)
class Federated:
    """Rounds of training and merging; the defaults are those of digits."""

    data: Group[AnyData] = AnyData()
    training: Group[Training] = Training(momentum=0.0, batch_size=10)
    merging: Group[Merging] = Merging(algorithms=("fedavg", "fedfish"))
    rounds: int = 20
    """Of communication, for each algorithm."""
    total_epochs: int | None = None
    """In place of --rounds: so many local epochs in all, whatever --local-epochs is."""
    local_epochs: tuple[int, ...] = (1, 4)
    """Passes of a client over its data in a round; each is an experiment of its own."""
    cohort: int = 10
    """Clients that take part in a round."""
    validation_clients: int = 5
    """That choose among server learning rates."""
    held_out_clients: int = 5
    """That the model is personalised on."""
    held_out_plays: int = 0
    """Of tiny_shakespeare: hold out all roles of so many plays instead (transfer)."""
    partition_seed: int = 3
    """Of the split and of who is held out."""
    server_optimizer: Annotated[str, commands.names(SERVER_OPTIMIZERS)] = "none"
    """On the pseudo-gradient; none takes the merged model as it is."""
    server_learning_rate: tuple[float, ...] = (1.0,)
    """Of several, validation clients choose one for each algorithm, with the first seed."""
    seeds: tuple[int, ...] = (0,)
    """Of the initial model, of cohorts and minibatches."""
    personal_epochs: int = 1
    """Of fine-tuning on held-out clients."""
    eval_every: int = 1
    """Local epochs between two measurements, over all rounds; after the last round always."""
    barrier: bool = True
    """Also measure the client-server barrier; each takes two passes over the cohort's data."""
    checkpoint_seconds: float = 30.0
    """Between two checkpoints; 0 saves after every round."""
    keep_models: bool = True
    """Leave the final models in models/."""
    out: commands.Folder = Path("runs/federated")
    """Folder for the results; an unfinished run there continues."""


def one_shot(dataset: str | None = None) -> OneShot:
    """Return what is run if nothing else is asked: the demo on digits, or as FedFisher's paper."""
    dataset = dataset or "digits"
    check_name("dataset", dataset, IMAGES)
    if dataset == "digits":
        return OneShot()
    model = "lenet" if dataset in ("mnist", "fashion_mnist") else "cnn"
    data = Data(dataset, model, augment=dataset.startswith(("cifar", "cinic")))
    return OneShot(data, Training(learning_rate=0.01, batch_size=64), partition_seeds=(3,))


def federated(dataset: str | None = None) -> Federated:
    """Return what is run in rounds on a data set if nothing else is asked."""
    models = {"digits": "mlp", "mnist": "lenet", "cifar10": "simple_cnn", PLAYS: "transformer"}
    dataset = dataset or "digits"
    check_name("dataset", dataset, models)
    if dataset == "digits":
        return Federated()
    if dataset == PLAYS:
        # The loss of a window is a sum over its 80 characters: 0.1 for their mean.
        training = Training(learning_rate=0.00125, batch_size=8)
        who = {"cohort": 16, "validation_clients": 10, "held_out_clients": 20}
        return Federated(AnyData(dataset, models[dataset]), training, personal_epochs=4, **who)
    data, training = AnyData(dataset, models[dataset], 100), Training(momentum=0.0, batch_size=32)
    who = {"cohort": 20, "validation_clients": 10, "held_out_clients": 10}
    return Federated(data, training, rounds=40, **who)


def name(config: OneShot) -> str:
    """Name an experiment by what it is and a digest of all that can change its result."""
    first, data = contents(OneShot()), config.data
    # A run from before these options existed, when the damping was an option, keeps its name.
    changed = {"damping": "default"} | {
        option: value
        for option, value in contents(config).items()
        if option not in WHERE_AND_HOW and (option not in _LATER or value != first[option])
    }
    # They took all examples.
    if not changed["max_examples"]:
        del changed["max_examples"]
    # Folders keep the word that version 0.2 had for this partition, so that its runs continue.
    word = {"dirichlet_of_client": "fedfisher"}.get(data.partition, data.partition)
    changed["partition"] = word
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]
    split = f"{word}{_number(data)[1]}"
    return f"{data.dataset}-{data.model}-m{data.num_clients}-{split}-{digest}"


def title(data: Data) -> str:
    """Say in one line what is learned, and by whom."""
    if data.dataset == PLAYS:
        return f"{data.dataset}, {data.model}, a client for each role"
    split = "".join([data.partition, *_number(data)])
    return f"{data.dataset}, {data.model}, {data.num_clients} clients ({split})"


def _number(data: Data) -> tuple[str, str]:
    """Return what stands in a title before the number that data are split by, and the number."""
    return {
        "iid": ("", ""),
        "dirichlet_of_client": (", alpha ", f"{data.alpha:g}"),
        "niid_bench": (", beta ", f"{data.beta:g}"),
        "classes_per_client": (" = ", str(data.classes_per_client)),
    }[data.partition]
