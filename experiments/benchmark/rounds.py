"""Time federated rounds beside their clients' training alone, and beside one call a batch.

The second workload is that of CIFAR-10 in Granqvist et al., "pfl-research: simulation framework for
accelerating research in Private Federated Learning", NeurIPS 2024: a cohort of 50 users with 50
images each, batches of 10, one local epoch, and the network of its benchmarks, 1,626,442
parameters. Both sides leave out its dropout.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.benchmark import measure, train, workloads
from experiments.benchmark.config import Config
from experiments.benchmark.flops import matmul_cases, products
from experiments.benchmark.workloads import OPTIMIZER, Workload
from fisherjax.typing import Array, Params

_ALONE = "local training alone"
_IDLE_ROUNDS = 100
_DISPATCH = "one call a batch (FedJAX-style)"
_OPTIMIZER = optax.sgd(0.1)
_COHORT = 64
_PATTERNS = 10_000  # different images among those of many clients
_MANY = {
    "fedavg, in memory": ("fedavg", False),
    "fedavg, from disk": ("fedavg", True),
    "fedfisher_kfac, from disk": ("fedfisher_kfac", True),
}
"""Rounds of small cohorts of many clients: the method, and whether its clients stay on disk."""
_PATCHES = {"padding": "VALID", "conv_general_dilated": fj.nn.conv_general_dilated}
NETWORK = flax.linen.Sequential(
    [
        *(flax.linen.Conv(32, (3, 3), **_PATCHES), flax.linen.relu),
        *(flax.linen.Conv(64, (3, 3), **_PATCHES), flax.linen.relu),
        *(lambda x: fj.nn.max_pool(x, 2), lambda x: x.reshape(x.shape[0], -1)),
        *(flax.linen.Dense(128), flax.linen.relu, flax.linen.Dense(10)),
    ]
)


def _cases(
    work: Workload,
    algorithms: Mapping[str, fj.algorithms.Algorithm],
    federation: fj.clients.Federation,
    rounds: int,
    **how: Any,
) -> list[measure.Case]:
    """Return a case of rounds for each algorithm."""
    cohort, cases = federation.num_clients, []
    for name, algorithm in algorithms.items():
        experiment = fj.rounds.federated(work.model, algorithm, cohort=cohort, **how)
        state = experiment.init(work.params, federation)
        options = {"key": jax.random.key(1), "rounds": rounds}
        run = partial(fj.rounds.run, experiment, state, federation, **options)
        cases.append(measure.Case(name, lambda run=run: list(run())[-1], rounds))
    return cases


def groups(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each cohort, and one for rounds of clients without data."""
    work = workloads.workload(config, "lenet", config.num_examples, note)
    how = {"epochs": config.epochs, "batch_size": config.batch_size, "optimizer": OPTIMIZER}
    fedfish = partial(fj.algorithms.fedfish, work.model, batch_size=config.batch_size)
    algorithms = {
        "fedavg": fj.algorithms.fedavg(),
        "fedfish, last epoch": fedfish(last_epoch=True),
        "fedfish, a pass of its own": fedfish(),
    }
    for cohort in config.num_clients:
        federation = workloads.federate(work, cohort)
        title = f"a round, {cohort} clients, {config.num_examples} images, LeNet"
        key = jax.random.fold_in(jax.random.key(1), 0)
        alone = partial(workloads.train, work, config, federation, key=key)
        cases = [measure.Case(_ALONE, alone), *_cases(work, algorithms, federation, 1, **how)]
        yield measure.Group(title, "rounds", None, cases, beside=_ALONE)
        nobody = federation._replace(sizes=jnp.zeros_like(federation.sizes))
        title = f"{_IDLE_ROUNDS} rounds, {cohort} clients without data, LeNet"
        idle = _cases(work, algorithms, nobody, _IDLE_ROUNDS, **how)
        yield measure.Group(title, "rounds", None, idle)


def personal(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each cohort and chunk: rounds with BatchNorm and models of each client."""
    work = workloads.workload(config, "cnn", config.num_examples, note)
    network = fj.networks.NormedCNN()
    params = fj.networks.init(network, jax.random.key(0), work.images)
    # Images are normalised as in the workload, so that only the additions to a round differ.
    likelihood = fj.likelihoods.categorical
    model = fj.networks.model(network, params, likelihood, normalize=workloads.normalize)
    work = work._replace(model=model, params=params)
    how = {"epochs": config.epochs, "batch_size": config.batch_size, "optimizer": OPTIMIZER}
    algorithms = {
        "fedavg": fj.algorithms.fedavg(),
        "fedper": fj.algorithms.fedper("dense3"),
        "fedbn": fj.algorithms.fedbn(),
        "weighted_fedavg": fj.algorithms.weighted_fedavg(model),
        "weighted_fedavg, 20 examples": fj.algorithms.weighted_fedavg(model, max_examples=20),
    }
    for cohort in config.num_clients:
        federation = workloads.federate(work, cohort)
        for name, chunk in train.chunks(config.chunks, cohort).items():
            alone = {"key": jax.random.fold_in(jax.random.key(1), 0), "clients_per_chunk": chunk}
            training = partial(workloads.train, work, config, federation, **alone)
            first = measure.Case(_ALONE, training)
            cases = _cases(work, algorithms, federation, 1, clients_per_chunk=chunk, **how)
            title = f"a round, {cohort} clients, {len(work.labels)} images, NormedCNN, {name}"
            yield measure.Group(title, "rounds", None, [first, *cases], beside=_ALONE)


def population(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each number of clients: rounds of small cohorts, every case apart."""
    note(f"LeNet, synthetic images, cohorts of {_COHORT}; each run is one round.")
    for number in config.num_clients:
        cases = [
            measure.Apart(name, partial(measure.in_own_process, _of_many, config, name, number))
            for name in _MANY
        ]
        title = f"a round of {_COHORT} of {number} clients, {config.num_examples} images, LeNet"
        yield measure.Group(title, "rounds", None, cases)


def _of_many(config: Config, name: str, num_clients: int) -> measure.Measurement:
    """Run rounds one after another; the facts contain the memory in use after some and after all.

    A tenth of the rounds comes first, since the first ones compile and fill caches.
    """
    work = workloads.workload(Config("population", Path(), data="synthetic"), "lenet", 1)
    method, on_disk = _MANY[name]
    algorithm = fj.algorithms.make(method, work.model)
    how = {"epochs": config.epochs, "batch_size": config.batch_size, "optimizer": _OPTIMIZER}
    cohort, held = min(_COHORT, num_clients), []
    experiment = fj.rounds.federated(work.model, algorithm, cohort=cohort, **how)
    state = experiment.init(work.params, num_clients)
    given = {"key": jax.random.key(1), "rounds": config.repeats + 1}
    with tempfile.TemporaryDirectory() as folder:
        source = _written(config, num_clients, Path(folder) / "images")
        if on_disk:
            most = int(source.sizes[0])
            going = fj.rounds.run_stream(experiment, state, source, most=most, **given)
        else:
            parts = [source.read(k) for k in range(num_clients)]
            images, labels = map(np.concatenate, zip(*parts, strict=True))
            del parts
            partition = np.arange(len(labels)).reshape(num_clients, -1)
            federation = fj.clients.federation((images, labels), partition)
            del images, labels
            going = fj.rounds.run(experiment, state, federation, **given)

        def peak(_: Any) -> int:
            found = measure.peak_bytes()
            held.append(measure.current_bytes())
            return found

        def facts(_: Any) -> dict[str, float]:
            ends = {"early_bytes": held[len(held) // 10], "late_bytes": held[-1]}
            return {"rounds": len(held), **ends}

        case = measure.Case(name, lambda: next(going), facts=facts, peak=peak)
        return measure.alone(case, config.repeats, config.seconds_per_case)


def _written(config: Config, num_clients: int, path: Path) -> fj.datasets.ByClient:
    """Write the images of all clients into a file, and return clients that read theirs from it."""
    images, labels = workloads.synthetic((28, 28, 1), _PATTERNS)
    each = config.num_examples // num_clients
    rows = np.random.default_rng(0).integers(0, _PATTERNS, (num_clients, each))
    with path.open("wb") as file:
        for own in rows:
            images[own].tofile(file)

    def read(k: int, most: int | None = None, seed: Any = None) -> tuple[np.ndarray, np.ndarray]:
        del seed
        flat = np.fromfile(path, np.uint8, each * 28 * 28, offset=k * each * 28 * 28)
        return flat.reshape(each, 28, 28, 1)[:most], labels[rows[k]][:most]

    return fj.datasets.ByClient(np.full(num_clients, each), str, read)


def pfl(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each cohort: a round of local training and averaging."""
    work = workloads.workload(config, "cnn", config.num_examples, note)
    params = fj.networks.init(NETWORK, jax.random.key(0), work.images)
    work = work._replace(model=workloads.classifier(NETWORK), params=params)
    native = work._replace(model=workloads.native_convolutions(work.model))
    images, labels, size = work.images, work.labels, config.batch_size
    step = products(workloads.gradient(work.model), params, images[:size], labels[:size])
    flops = step.flops * config.epochs * len(labels) / size
    for num_clients in config.num_clients:
        partition = fj.partition.iid(labels, num_clients, seed=0)
        federation = fj.clients.federation((images, labels), partition)
        runs = {_DISPATCH: dispatch(work, config, partition)}
        for name, chunk in train.chunks(config.chunks, num_clients).items():
            runs[f"fisherjax, {name}"] = partial(fedavg_round, work, config, federation, chunk)
        runs[f"{_DISPATCH}, native convolutions"] = dispatch(native, config, partition)
        cases = [measure.Case(name, run, flops=flops) for name, run in runs.items()]
        title = f"a round, M={num_clients}, {len(labels)} images, batch {size}"
        yield measure.Group(title, "rounds", _DISPATCH, [*cases, *matmul_cases(config.matmul_size)])


def fedavg_round(
    work: Workload, config: Config, federation: fj.clients.Federation, chunk: int
) -> Params:
    """Train the cohort and average its models with fisherjax."""
    how = {"optimizer": _OPTIMIZER, "clients_per_chunk": chunk}
    trained = workloads.train(work, config, federation, **how)
    fedavg = fj.algorithms.fedavg()
    updates = fj.algorithms.Update({"params": trained.params}, fedavg.kind)
    return fj.merging.merge(fedavg, work.params, updates, federation.weights)[0]


def dispatch(
    work: Workload, config: Config, partition: Sequence[np.ndarray]
) -> Callable[[], Params]:
    """Prepare the same round with one compiled step for each batch, called from Python loops."""
    total = sum(map(len, partition))
    random = np.random.default_rng(0)
    one_gradient = workloads.gradient(work.model)

    @jax.jit
    def step(params: Params, state: Any, images: Array, labels: Array) -> tuple[Params, Any]:
        updates, state = _OPTIMIZER.update(one_gradient(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def add(mean: Params, own: Params, weight: Array) -> Params:
        return jax.tree.map(lambda x, y: x + weight * y, mean, own)

    def run() -> Params:
        mean = jax.tree.map(jnp.zeros_like, work.params)
        for rows in partition:
            own, state = work.params, _OPTIMIZER.init(work.params)
            for _ in range(config.epochs):
                shuffled = random.permutation(rows)
                for start in range(0, len(rows), config.batch_size):
                    batch = shuffled[start : start + config.batch_size]
                    own, state = step(own, state, work.images[batch], work.labels[batch])
            mean = add(mean, own, len(rows) / total)
        return mean

    return run
