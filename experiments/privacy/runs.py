"""Accuracies of private merges of one round of training, over what they cost."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, steps, tasks
from experiments.harness.config import Data, Group, Merging, OneShot, Training
from experiments.harness.progress import bar
from fisherjax import merging, privacy
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.typing import Key, Params

METHODS = ("fedavg", "fedfisher_diag", "head", "fedavg+head")
"""Federated averaging, FedFisher, a ridge head at the initial network, and one at the average."""
_GROUPS = {
    "fedavg": ("total",),
    "fedfisher_diag": ("fisher", "product", "mean"),
    "head": ("total/inputs", "total/products"),
}
_WITHHELD = dict.fromkeys(f"total/{n}" for n in ("targets", "squares", "negative", "count"))
_CHUNK = 100  # clients whose models are in memory at once


@dataclasses.dataclass(frozen=True)
class Config:
    """How many clients, how they are merged, and with how much noise."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    clients: tuple[int, ...] = (5, 100, 1000)
    """Over how many the training data are split, in place of --num-clients."""
    pilots: int = 10
    """Public clients besides, never merged: clips are their median norms."""
    epochs: int = 5
    """Passes of every client over its own data."""
    seeds: tuple[int, ...] = (0, 1)
    """Of the split, the initial model and training."""
    algorithms: Annotated[tuple[str, ...], commands.names(METHODS)] = METHODS
    """Methods; head is a ridge head at the initial network, fedavg+head at the average."""
    noise_multipliers: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
    """Of all that a method releases together; 0 clips only."""
    draws: int = 2
    """Of the noise."""
    delta: float = 1e-5
    """Of every epsilon."""
    noise_damping: float = 2.0
    """Of noisy curvature, in units of the spectral norm of its noise."""
    ridge: float = 0.01
    """Of the heads, in units of the mean eigenvalue."""
    out: commands.Folder = Path("runs/private")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[int, int]
"""Clients and seed."""


class Point(NamedTuple):
    """One accuracy on the test data, a fraction, and what it cost; a line of results.csv."""

    clients: int
    seed: int
    algorithm: str
    noise_multiplier: float
    draw: int
    epsilon: float
    delta: float
    ledger: str
    accuracy: float

    @property
    def unit(self) -> Unit:
        """What is measured as a whole."""
        return self.clients, self.seed


def units(asked: Config) -> list[Unit]:
    """List what is computed, and written, as a whole."""
    return [(number, seed) for number in asked.clients for seed in asked.seeds]


class _World(NamedTuple):
    """Who trains from which model, and the public clients beside them."""

    asked: Config
    task: tasks.OneRound
    params: Params
    clients: Federation
    pilots: Federation
    key: Key


def measured(asked: Config, console: Console, missing: Sequence[Unit]) -> Iterator[list[Point]]:
    """Train so many clients once, and merge them with every noise."""
    whole = OneShot(asked.data, asked.training, Merging(("fedavg",)), asked.epochs, central=False)
    train, test = fj.datasets.load(asked.data.dataset, asked.data.data_dir)
    task = tasks.shared(whole, train, test)
    _check_hides_all(task)
    data = task.central.inputs, task.central.targets
    with bar(console) as shown:
        watched = shown.add_task("", total=len(missing), speed="")
        for number, seed in missing:
            shown.update(watched, description=f"{number} clients, seed {seed}")
            rows = tasks.partition(asked.data, train, number + asked.pilots, seed)
            own = (fj.clients.federation(data, some) for some in (rows[:number], rows[number:]))
            params, key = steps.start(task, seed)
            world = _World(asked, task, params, *own, key)
            yield [*_points(world, number, seed)]
            shown.advance(watched)


def _check_hides_all(task: tasks.OneRound) -> None:
    """Refuse networks of which clients would send something as it is."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    kept = fj.tree.names(fj.leaves.split(task.model, shapes, task.central.inputs).statistics)
    if kept:
        raise ValueError(
            f"--model is {task.config.data.model}, whose running statistics {list(kept)} clients "
            "would send without noise; expected a network without any, such as lenet"
        )


def _points(world: _World, number: int, seed: int) -> Iterator[Point]:
    asked, task, params = world.asked, world.task, world.params
    head = fj.algorithms.analytic_head(task.model, ridge=asked.ridge)
    average = fj.algorithms.fedavg()
    diagonal = fj.algorithms.make("fedfisher_diag", task.model)
    own = {"fedavg": average, "fedfisher_diag": diagonal}
    sums = _summed(world, own, params, asked.epochs) | _summed(world, {"head": head}, params)
    for sigma in asked.noise_multipliers:
        for draw in range(asked.draws if sigma else 1):
            key = jax.random.fold_in(jax.random.fold_in(world.key, draw), round(1000 * sigma))
            for name in asked.algorithms:
                first, _, then = name.partition("+")
                # Of two methods each has half of what is spent.
                share = sigma * (2**0.5 if then else 1)
                merged, ledger = _noisy(world, *sums[first], params, share, key)
                ledgers = [ledger]
                if then:
                    again = _summed(world, {"head": head}, merged)["head"]
                    key = jax.random.fold_in(key, 1)
                    merged, ledger = _noisy(world, *again, merged, share, key)
                    ledgers.append(ledger)
                cost = privacy.epsilon(*ledgers, delta=asked.delta)
                spent = "; ".join(map(_written, ledgers))
                accuracy = round(float(task.accuracy(merged, task.test)), 4)
                spent = round(cost, 3), asked.delta, spent
                yield Point(number, seed, name, sigma, draw, *spent, accuracy)


def _noisy(
    world: _World,
    algorithm: Algorithm,
    clip: dict[str, float | None],
    sums: privacy.Clipped,
    params: Params,
    sigma: float,
    key: Key,
) -> tuple[Params, privacy.Ledger]:
    """Add noise to the groups of a method so that they cost what one of this multiplier would."""
    noisy = sigma * sum(bound is not None for bound in clip.values()) ** 0.5
    method = privacy.private(
        algorithm, clip=clip, noise_multiplier=noisy, damping=world.asked.noise_damping
    )
    everybody = jnp.arange(world.clients.num_clients)
    merged, _, ledger = merging.merge_sums(method, params, sums, everybody, key=key)
    return merged, ledger


def _summed(
    world: _World, methods: dict[str, Algorithm], params: Params, epochs: int = 0
) -> dict[str, tuple]:
    """Let clients train and answer, a chunk at a time; give method, clips and clipped sums."""
    clips: dict[str, dict[str, float | None]] = {}
    for name, sent in _told(world, methods, world.pilots, params, epochs).items():
        groups = (*_GROUPS[name], *(_WITHHELD if name == "head" else ()))
        found = privacy.norms(methods[name], sent, params, groups=groups)
        clips[name] = {g: float(np.median(found[g])) for g in _GROUPS[name]}
        clips[name] |= _WITHHELD if name == "head" else {}
    totals: dict[str, privacy.Clipped] = {}
    number = world.clients.num_clients
    for begin in range(0, number, _CHUNK):
        some = jnp.arange(begin, min(begin + _CHUNK, number))
        chunk = fj.clients.select(world.clients, some)
        for name, sent in _told(world, methods, chunk, params, epochs).items():
            method = privacy.private(methods[name], clip=clips[name], noise_multiplier=0.0)
            own = _reduce(method, sent.values, params)
            total = totals.get(name)
            totals[name] = own if total is None else jax.tree.map(jnp.add, total, own)
    return {name: (methods[name], clips[name], totals[name]) for name in methods}


def _told(
    world: _World, methods: dict[str, Algorithm], some: Federation, params: Params, epochs: int
) -> dict[str, Update]:
    trained = fj.training.untrained(params, some.num_clients)
    if epochs:
        training = world.asked.training
        how = {"optimizer": world.task.optimizer, "batch_size": training.batch_size}
        how |= {"clients_per_chunk": training.clients_per_chunk, "epochs": epochs}
        trained = fj.training.train(world.task.model, params, some, key=world.key, **how)
    return {n: merging.summarize(m, trained, some, key=world.key) for n, m in methods.items()}


@partial(jax.jit, static_argnums=0)
def _reduce(method: Algorithm, values: dict, params: Params) -> privacy.Clipped:
    """Clip and add up what the wrapped method's clients sent."""
    if "params" in values:
        values = values | {"params": jax.tree.map(jnp.subtract, values["params"], params)}
    return method.reduce(values, jnp.ones(len(jax.tree.leaves(values)[0])))


def _written(ledger: privacy.Ledger) -> str:
    """Write a ledger in a cell: of each group its clip and the noise's deviation."""
    parts = (
        f"{group} {float(ledger.sensitivity[group]):.4g}|{float(ledger.deviation[group]):.4g}"
        for group in ledger.sensitivity
    )
    return f"{int(ledger.rounds)}: {', '.join(parts)}"
