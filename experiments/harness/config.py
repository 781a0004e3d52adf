"""Define the options that commands share, in groups, and their defaults."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

import fisherjax as fj
from experiments.harness import choices, commands
from experiments.harness.choices import DATASETS, MODELS

PARTITIONS = ("dirichlet_of_client", "iid", "niid_bench", "classes_per_client", "pachinko")
IMAGES = DATASETS
PLAYS, WRITERS, SLANTED = "tiny_shakespeare", "writers", "slanted_mnist"
PACKAGES = "packages"
TEXTS = (PLAYS, "stack_overflow", "c4", "cc_news", PACKAGES)
OWNERS = {"emnist": "writer", WRITERS: "writer", PLAYS: "role", "stack_overflow": "user"}
OWNERS |= {"c4": "domain", "cc_news": "domain", PACKAGES: "package"}
"""Data sets whose clients are those of the data, and what a client is."""
ON_DISK = ("emnist", "stack_overflow", "c4", "cc_news", PACKAGES)
"""Those whose clients may stay on disk."""
_TRANSFORMERS = ("transformer", "dropout_transformer")
SERVER_OPTIMIZERS = ("none", "sgd", "momentum", "adam", "yogi", "adagrad")
SCHEDULES = ("constant", "cosine", "linear", "exponential")
TRACKERS = ("none", "csv", "tensorboard", "wandb")
Group = tyro.conf.OmitArgPrefixes
Calibration = Literal["analytic_head", "ccvr", "running_statistics"]


def of_images() -> list[str]:
    """Return the names of the networks that take images."""
    return [name for name in MODELS if name not in _TRANSFORMERS]


def networks(dataset: str) -> list[str]:
    """Return the names of the networks that take the inputs of a data set."""
    if dataset not in TEXTS:
        return of_images()
    return [*_TRANSFORMERS] if dataset == PLAYS else ["dropout_transformer"]


# tyro shows the strings under the fields as --help and keeps their line breaks: one line each.
@dataclasses.dataclass(frozen=True)
class Data:
    """The data set, the network, and the partition over clients."""

    dataset: Annotated[str, commands.names(IMAGES)] = "digits"
    """Data set; it also sets other defaults, see `--dataset mnist --help`."""
    model: Annotated[str, commands.names(of_images())] = "mlp"
    """Network; lenet and cnn take images of at least 16 x 16 pixels."""
    num_clients: int = 5
    """Number of clients over which the training data are split."""
    partition: Annotated[str, commands.names(PARTITIONS)] = "dirichlet_of_client"
    """Split: Dirichlet shares by client or by class (niid_bench), classes, iid, or pachinko."""
    alpha: float = 0.1
    """Parameter of dirichlet_of_client and pachinko: 0.05 is one or two classes."""
    beta: float = 0.1
    """Parameter of niid_bench: at 0.01 one or two clients have a class, at 100 all equally."""
    min_size: int = 10
    """Smallest number of examples of a client in niid_bench, which is drawn until all have it."""
    classes_per_client: int = 2
    """Number of classes of each client in classes_per_client ("#C")."""
    augment: bool = False
    """Crop and mirror training images at random, but not for the Fisher information."""
    augment_border: Literal["constant", "reflect"] = "constant"
    """Padding of crops beyond the edge: zeros, or the mirrored image."""
    normalize: bool = True
    """Subtract the mean of the pixels and divide by their deviation, after scaling to [0, 1]."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""


@dataclasses.dataclass(frozen=True)
class AnyData(Data):
    """The data set, the network, and the partition over clients."""

    dataset: Annotated[str, commands.names((*IMAGES, SLANTED, *OWNERS))] = "digits"
    """Data set; it also sets other defaults, see `--dataset mnist --help`."""
    model: Annotated[str, commands.names(MODELS)] = "mlp"
    """Network; lenet and cnn take images of at least 16 x 16 pixels, transformers take text."""
    num_clients: int = 30
    """Number of clients that train; plays have one for each role, writers one for each person."""
    client_examples: int = 0
    """Largest number of examples that a writer, user or domain has; a fixed draw, 0 is all."""
    stream: bool = False
    """Read each cohort from --data-dir when its round begins; --client-examples are drawn anew."""


@dataclasses.dataclass(frozen=True)
class Training:
    """Local training by stochastic gradient descent (SGD)."""

    learning_rate: float = 0.05
    """Step size of SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay, a multiple of the weights that is added to every gradient."""
    label_smoothing: float = 0.0
    """Share of a label spread over all classes; 0.1 helps to merge clients of few classes."""
    batch_size: int = 32
    """Examples of a minibatch."""
    clients_per_chunk: int | None = None
    """Number of clients computed side by side; None is one on a CPU and all elsewhere."""


@dataclasses.dataclass(frozen=True)
class Merging:
    """Methods that merge client models."""

    algorithms: Annotated[tuple[str, ...], commands.names(fj.algorithms.merges())] = (
        *("fedavg", "fisher_merge", "regmean", "fedfisher_diag", "fedfisher_kfac"),
    )
    """Methods, also NAME@option=value, NAME+dense and fedov+student."""
    fisher_kind: Literal["true", "sampled", "empirical", "curvature_propagation", "jacobian"] = (
        "true"
    )
    """Labels of the Fisher information: exact, sampled, the data's, or random sums of all."""
    max_examples: int = 2000
    """Largest number of a client's examples for Fisher information or Gram matrices; 0 is all."""
    solver: Literal["cg", "gd", "adam"] = "cg"
    """Solver of fedfisher_*; gd and adam have no damping, adam validates on 500 images."""
    distillation: Literal["fedfisher", "fedlpa"] = "fedfisher"
    """Constants, start and teacher weights of dense, as in the experiments of a paper."""
    choose: Literal["last", "validation", "test"] = "last"
    """Choice of dense and otfusion: none (last), or by 500 training or the test images."""
    aside: Literal["train", "test"] = "train"
    """Images that teach fedov+student: held-out training images, or half of the test images."""
    compress: Literal["none", "paper", "paper_ceiling", "water_filling"] = "none"
    """Compress uploads of weights and curvature to FedAvg's bytes: the FedFisher paper, or ours."""
    options: tyro.conf.Suppress[commands.Options] = ()
    """Options of methods that differ from the defaults, for example ("fedprox.mu", 0.1)."""


@dataclasses.dataclass(frozen=True)
class OneShot(commands.Imports):
    """One round of merging; the defaults are those of the digits demo."""

    data: Group[Data] = Data()
    training: Group[Training] = Training()
    merging: Group[Merging] = Merging()
    epochs: int = 30
    """Passes of every client over its own data."""
    partition_seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Seeds of the splits, independent of the seeds of training."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial model and of training; each trains once on each split."""
    then_rounds: int = 0
    """Number of rounds of federated averaging after each merged model."""
    then_epochs: int = 0
    """Epochs of each of those rounds; 0 is as many as before the merge."""
    calibrate: tuple[Calibration, ...] = ()
    """Exchanges without training after each merge: rows such as ALGORITHM+analytic_head."""
    exchanges: int = 0
    """Exchanges after each merge, a head and natural gradients: ALGORITHM+natural_gradient."""
    central: bool = True
    """Also train a model on all the data, which is the ceiling."""
    keep_clients: bool = False
    """Keep trained clients in the folder, so that further methods there need not train again."""
    on_nonfinite: Literal["raise", "drop"] = "raise"
    """Stop when a client diverges (raise), or leave it out of every merge (drop)."""
    out: commands.FolderOrNone = None
    """Folder for the results, by default runs/NAME; an unfinished run there continues."""


@dataclasses.dataclass(frozen=True)
class Federated(commands.Imports):
    """Rounds of training and merging; the defaults are those of digits."""

    data: Group[AnyData] = AnyData()
    training: Group[Training] = Training(momentum=0.0, batch_size=10)
    merging: Group[Merging] = Merging(algorithms=("fedavg", "fedfish", "fedfish_last_epoch"))
    rounds: int = 20
    """Number of communication rounds of each algorithm."""
    total_epochs: int | None = None
    """Total number of local epochs, which replaces --rounds."""
    local_epochs: tuple[int, ...] = (1, 4)
    """Passes of a client over its data in a round; each number is a separate experiment."""
    cohort: int = 10
    """Number of clients that take part in a round."""
    must_improve: bool = False
    """Leave clients out of a round in which training raised the loss of their own examples."""
    validation_clients: int = 5
    """Number of clients that choose among server learning rates."""
    held_out_clients: int = 5
    """Number of clients on which the model is personalised."""
    held_out_plays: int = 0
    """Number of plays of tiny_shakespeare whose roles are all held out instead (transfer)."""
    partition_seed: int = 3
    """Seed of the split and of the held-out clients."""
    server_optimizer: Annotated[str, commands.names(SERVER_OPTIMIZERS)] = "none"
    """Optimiser of the server on the pseudo-gradient; none takes the merged model."""
    server_learning_rate: tuple[float, ...] = (1.0,)
    """Server step sizes; validation clients choose one for each algorithm with the first seed."""
    local_learning_rate: tuple[float, ...] = ()
    """Step sizes of clients for a grid with those of the server; empty is --learning-rate."""
    learning_rate_schedule: Annotated[str, commands.names(SCHEDULES)] = "constant"
    """Clients' learning rate over the rounds: to 0 as a cosine or a line, or to a hundredth."""
    patience: int | None = None
    """Measurements without a better validation accuracy after which a run stops early."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial model, of cohorts and of minibatches."""
    personal_epochs: int = 1
    """Epochs of fine-tuning on held-out clients."""
    personal_points: int = 1
    """Number of rounds, evenly spaced, at which the model is fine-tuned, for curves if above 1."""
    eval_every: int = 1
    """Local epochs between two measurements; the last round is always measured."""
    barrier: bool = True
    """Also measure the client-server barrier; each takes two passes over the cohort's data."""
    checkpoint_seconds: float = 30.0
    """Seconds between two checkpoints; 0 saves after every round."""
    keep_models: bool = True
    """Write the final models into models/."""
    tracker: Annotated[str, commands.names(TRACKERS)] = "none"
    """Also log each round to a CSV file, TensorBoard or W&B, by their own packages."""
    out: commands.Folder = Path("runs/federated")
    """Folder for the results; an unfinished run there continues."""


def one_shot(dataset: str | None = None) -> OneShot:
    """Return the defaults of a data set: the demo for digits, else as in FedFisher's paper."""
    dataset = dataset or "digits"
    commands.check_name("dataset", dataset, IMAGES)
    if dataset in ("digits", *choices.own_datasets()):
        return OneShot(Data(dataset))
    model = "lenet" if dataset in ("mnist", "fashion_mnist") else "cnn"
    data = Data(dataset, model, augment=dataset.startswith(("cifar", "cinic")))
    return OneShot(data, Training(learning_rate=0.01, batch_size=64), partition_seeds=(3,))


def federated(dataset: str | None = None) -> Federated:
    """Return the defaults of experiments in rounds for a data set."""
    models = {"digits": "mlp", "mnist": "lenet", "cifar10": "simple_cnn", PLAYS: "transformer"}
    models |= {WRITERS: "lenet", SLANTED: "lenet", PACKAGES: "dropout_transformer"}
    dataset = dataset or "digits"
    own = choices.own_datasets()
    commands.check_name("dataset", dataset, [*models, *choices.FEDFISH, *own])
    if dataset in choices.FEDFISH:
        return _fedfish(dataset)
    if dataset in ("digits", *own):
        return Federated(AnyData(dataset))
    if dataset == PLAYS:
        # The loss of a window sums over 80 characters; for their mean the rate would be 0.1.
        training = Training(learning_rate=0.00125, batch_size=8)
        who = {"cohort": 16, "validation_clients": 10, "held_out_clients": 20}
        return Federated(AnyData(dataset, models[dataset]), training, personal_epochs=4, **who)
    if dataset == PACKAGES:
        # The loss of a window sums over 128 bytes; for their mean the rate would be 0.1.
        data = AnyData(dataset, models[dataset], 100, client_examples=64)
        training = Training(learning_rate=0.0008, batch_size=8)
        return Federated(data, training, validation_clients=10, held_out_clients=20)
    if dataset == WRITERS:
        data = AnyData(dataset, models[dataset], 20)
        return Federated(data, rounds=100, cohort=8, validation_clients=3)
    data, training = AnyData(dataset, models[dataset], 100), Training(momentum=0.0, batch_size=32)
    who = {"cohort": 20, "validation_clients": 10, "held_out_clients": 10}
    return Federated(data, training, rounds=40, **who)


def _fedfish(dataset: str) -> Federated:
    model, clients, most, batch_size, cohort, rounds, rate, tuned = choices.FEDFISH[dataset]
    split = {"partition": "pachinko"} if dataset == "cifar100" else {"client_examples": most}
    # The loss of a window sums over its 128 tokens.
    local_rate = 1e-3 / 128 if dataset in TEXTS else 1e-3
    return Federated(
        AnyData(dataset, model, clients, **split),
        Training(local_rate, momentum=0.0, batch_size=batch_size),
        rounds=rounds,
        local_epochs=(4,),
        cohort=cohort,
        validation_clients=10,
        held_out_clients=10,
        server_optimizer="adam",
        server_learning_rate=(rate,),
        personal_epochs=tuned,
        eval_every=100,
    )
