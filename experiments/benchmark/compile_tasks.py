"""Define the tasks whose programs `--suite compile` counts: what a first call of users compiles.

A task runs once for a seed: another seed draws other numbers of the same shapes. Tasks of one
network use made-up images or the library's own initialisation, and as few examples as fill every
loop: what is measured is the compiler.
"""

import itertools
import math
import re
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.benchmark.compile_networks import Blocks, FlaxCNN, ResNet18
from experiments.benchmark.programs import ROOT, run_module

_BATCH = 8
_DIGITS = ("--dataset", "digits", "--model", "mlp")
_DEMO = (
    *("--algorithms", "fedavg", "fisher_merge", "regmean", "fedlpa", "fedfisher_diag"),
    *("fedfisher_kfac", "fedfisher_sequential", "--calibrate", "analytic_head", "ccvr"),
    *("--exchanges", "5"),
)
LENET = (
    *("--model", "lenet", "--exchanges", "5", "--epochs", "1", "--max-examples", "256"),
    *("--algorithms", "fedavg", "fisher_merge", "regmean", "fedfisher_kfac"),
)
"""Options of the run of MNIST, with less work by the same programs."""
_MNIST = ("--dataset", "mnist", *LENET)


class Task(NamedTuple):
    """What one process runs."""

    what: str  # description
    run: Callable[[int], Any]  # runs it for a seed


class Subject(NamedTuple):
    """A network with the shape of its images, and the number of clients that are merged."""

    network: flax.linen.Module
    shape: tuple[int, ...]
    clients: int


TRANSFORMER = Subject(
    fj.networks.VisionTransformer(num_classes=10, width=384, num_layers=12, num_heads=6, patch=8),
    (64, 64, 3),
    2,
)
"""12 layers of width 384 with 6 heads, 64 patches of 8 x 8 x 3: 21,396,874 parameters."""
SUBJECTS = {
    "tiny": Subject(fj.networks.MLP((4,)), (3, 3, 1), 2),
    "lenet": Subject(fj.networks.LeNet(), (28, 28, 1), 5),
    "flax_cnn": Subject(FlaxCNN(), (28, 28, 1), 3),
    "resnet18": Subject(ResNet18(16), (32, 32, 3), 2),
    "transformer": TRANSFORMER,
}
"""The networks of the tasks that merge."""
_BLOCKS = (12, 24)
_SCAN = {"scanned": True, "unrolled": False}
SUBJECTS |= {
    f"{how}{blocks}": Subject(Blocks(blocks, scan), (4, 4, 3), 2)
    for how, scan in _SCAN.items()
    for blocks in _BLOCKS
}
_LABELS = {
    "tiny": "an MLP of 4 hidden units",
    "lenet": "LeNet",
    "flax_cnn": "flax's MNIST CNN",
    "resnet18": "ResNet-18 of a quarter of its width",
    "transformer": "a transformer of 12 layers, 21.4 million parameters",
}
_METHODS = dict(diagonal="fedfisher_diag", kfac="fedfisher_kfac", layers="fedfisher_sequential")


def normalize(images: Any) -> Any:
    """Scale bytes to [-1, 1]."""
    return images.astype(jnp.float32) / 127.5 - 1


@cache
def clients_of(subject: Subject) -> tuple[fj.Model, Any, fj.clients.Federation]:
    """Return the model, its initial params, and clients with two minibatches each."""
    each = 2 * _BATCH
    random, number = np.random.default_rng(1), subject.clients * each
    images = random.integers(0, 256, (number, *subject.shape), np.uint8)
    labels = random.integers(0, 10, number, np.int32)
    params, likelihood = _params(subject), fj.likelihoods.categorical
    model = fj.networks.model(subject.network, params, likelihood, normalize=normalize)
    rows = np.arange(len(labels)).reshape(subject.clients, each)
    return model, params, fj.clients.federation((images, labels), list(rows))


def _params(subject: Subject) -> Any:
    """Draw params with NumPy, so that only the library's own programs count."""
    random = np.random.default_rng(0)
    images = jax.ShapeDtypeStruct((1, *subject.shape), jnp.float32)
    init = partial(fj.networks.init, subject.network, inputs=images)
    shapes = jax.eval_shape(init, jax.random.key(0))

    def fill(path: Any, leaf: Any) -> np.ndarray:
        if leaf.ndim > 1:
            drawn = random.normal(size=leaf.shape) / math.prod(leaf.shape[:-1]) ** 0.5
            return drawn.astype(leaf.dtype)
        is_scale = path[-1].key in ("scale", "second_moment", "within")
        return np.full(leaf.shape, is_scale, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def made_up(subject: Subject, seed: int) -> fj.training.Trained:
    """Return clients whose models are the start and noise."""
    random, (_, params, _) = np.random.default_rng(seed), clients_of(subject)

    def noisy(leaf: np.ndarray) -> np.ndarray:
        noise = random.normal(size=(subject.clients, *leaf.shape))
        return leaf * (1 + 0.1 * noise.astype(leaf.dtype))

    return fj.training.Trained(jax.tree.map(noisy, params))


def summaries(
    subject: Subject, method: str, trained: fj.training.Trained, seed: int
) -> tuple[fj.algorithms.Algorithm, Any]:
    """Return the method, and the uploads of clients."""
    model, _, federation = clients_of(subject)
    algorithm = fj.algorithms.make(method, model, batch_size=_BATCH)
    key = jax.random.key(seed)
    updates = fj.merging.summarize(algorithm, trained, federation, key=key)
    return algorithm, jax.block_until_ready(updates)


def merged(subject: Subject, method: str, trained: fj.training.Trained, seed: int) -> Any:
    """Summarise clients and merge them; return the merged params."""
    algorithm, updates = summaries(subject, method, trained, seed)
    _, params, federation = clients_of(subject)
    found = fj.merging.merge(algorithm, params, updates, federation.weights)[0]
    return jax.block_until_ready(found)


def _summaries(name: str, method: str, seed: int) -> None:
    summaries(SUBJECTS[name], method, made_up(SUBJECTS[name], seed), seed)


def _merge(name: str, method: str, seed: int) -> None:
    merged(SUBJECTS[name], method, made_up(SUBJECTS[name], seed), seed)


def _pass(name: str, fisher: Callable[..., Any], seed: int) -> None:
    network, shape, _ = SUBJECTS[name]
    images = np.random.default_rng(seed).normal(size=(2 * _BATCH, *shape)).astype(np.float32)
    params = _params(SUBJECTS[name])
    model = fj.networks.model(network, params, fj.likelihoods.categorical)
    how = {"kind": fj.fisher.true, "batch_size": _BATCH}
    jax.block_until_ready(fisher(model, params, fj.Examples(images), **how))


def _train(name: str, seed: int) -> None:
    model, params, federation = clients_of(SUBJECTS[name])
    how = {"optimizer": _sgd(), "epochs": 1, "batch_size": _BATCH}
    trained = fj.training.train(model, params, federation, key=jax.random.key(seed), **how)
    jax.block_until_ready(trained.models)


def _exchange(name: str, seed: int) -> None:
    model, params, federation = clients_of(SUBJECTS[name])
    for make in (fj.algorithms.analytic_head, fj.algorithms.natural_gradient):
        step, key = make(model, batch_size=_BATCH), jax.random.key(seed)
        params, _, _ = fj.merging.exchange(step, params, federation, key=key)
    jax.block_until_ready(params)


def _round(name: str, seed: int) -> None:
    model, params, federation = clients_of(SUBJECTS[name])
    how = {"optimizer": _sgd(), "epochs": 1, "batch_size": _BATCH}
    how["cohort"] = SUBJECTS[name].clients
    fedfish = fj.algorithms.fedfish(model, batch_size=_BATCH)
    experiment = fj.rounds.federated(model, fedfish, **how)
    start, key = experiment.init(params, federation), jax.random.key(seed)
    for state, _ in fj.rounds.run(experiment, start, federation, key=key, rounds=2):
        jax.block_until_ready(state.params)


@cache
def _sgd() -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9)


def _one_shot(options: tuple[str, ...], seed: int) -> None:
    """Run `experiments.one_shot` into a folder that goes away."""
    with tempfile.TemporaryDirectory() as out:
        run_module("experiments.one_shot", [*options, "--seeds", str(seed), "--out", out])


def _readme(_: int) -> None:
    """Run every example of the README and the page that goes on with them; keys are fixed."""
    names: dict[str, Any] = {}
    text = (ROOT / "docs/get_started/first_merge.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(code, names)


def _merges() -> dict[str, Task]:
    return {
        f"{name}_{short}": Task(
            f"{method}: summaries and merge of {SUBJECTS[name].clients} clients, {label}",
            partial(_merge, name, method),
        )
        for name, label in _LABELS.items()
        for short, method in _METHODS.items()
    }


def _blocks() -> dict[str, Task]:
    """Return passes and merges of transformers of width 64 with 12 and 24 equal blocks."""
    tasks = {}
    for how, blocks in itertools.product(_SCAN, _BLOCKS):
        name, network = f"{how}{blocks}", f"a transformer of {blocks} blocks of width 64, {how}"
        for fisher in (fj.fisher.kfac, fj.fisher.diagonal):
            what = f"fisher.{fisher.__name__} of {network}"
            tasks[f"{name}_{fisher.__name__}"] = Task(what, partial(_pass, name, fisher))
        what = f"fedfisher_kfac: summaries and merge of 2 clients, {network}"
        tasks[f"{name}_merge"] = Task(what, partial(_merge, name, _METHODS["kfac"]))
    return tasks


# In the order of a run: what most users wait for first.
TASKS = {
    "digits": Task(f"one_shot {' '.join(_DIGITS)}", partial(_one_shot, _DIGITS)),
    "mnist": Task(f"one_shot {' '.join(_MNIST)}", partial(_one_shot, _MNIST)),
    "readme": Task("the examples of the README", _readme),
    "demo": Task("the run of `make demo`", partial(_one_shot, (*_DIGITS, *_DEMO))),
    "lenet_training": Task("training of 5 LeNets", partial(_train, "lenet")),
    "lenet_exchange": Task("two exchanges of LeNet", partial(_exchange, "lenet")),
    "lenet_round": Task("two rounds of FedFish, LeNet", partial(_round, "lenet")),
    "transformer_summaries": Task(
        f"fedfisher_kfac: summaries of 2 clients, {_LABELS['transformer']}",
        partial(_summaries, "transformer", _METHODS["kfac"]),
    ),
    **_merges(),
    **_blocks(),
}
STANDARD = [name for name in TASKS if not name.startswith("tiny")]
"""The tasks of a whole run; the others are for tests."""
