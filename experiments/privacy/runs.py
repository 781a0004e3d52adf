"""Measure accuracies of private merges after one round of training, and their epsilon."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import fisherjax as fj
from experiments.harness import choices, commands, steps, studies, tasks
from experiments.harness.config import Data, Group, Merging, OneShot, Training
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
NOISE = {True: "the seeds, and is no secret", False: "keys of the operating system"}
"""What the noise is drawn from, by the option --seeded-noise."""
_CHUNK = 100  # number of clients whose models are in memory at once


@dataclasses.dataclass(frozen=True)
class Config(commands.Imports):
    """Clients, methods that merge them, and the noise."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    clients: tuple[int, ...] = (5, 100, 1000)
    """Numbers of clients over which the training data are split; replaces --num-clients."""
    pilots: int = 10
    """Number of additional public clients, never merged; clips are their median norms."""
    epochs: int = 5
    """Passes of every client over its own data."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the split, the initial model and training."""
    algorithms: Annotated[tuple[str, ...], commands.names(METHODS)] = METHODS
    """Methods; head is a ridge head on the initial network, fedavg+head one on the average."""
    noise_multipliers: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
    """Noise multipliers of everything that a method releases together; 0 only clips."""
    draws: int = 2
    """Number of draws of the noise."""
    seeded_noise: bool = False
    """Draw the noise from the seeds, to repeat a run; otherwise from keys of the system."""
    delta: float = 1e-5
    """Delta of every epsilon."""
    noise_damping: float = 2.0
    """Damping of noisy curvature, in units of the spectral norm of its noise."""
    ridge: float = 0.01
    """Ridge of the heads, in units of the mean eigenvalue."""
    out: commands.Folder = Path("runs/private")
    """Folder for the results; an unfinished run there continues."""

    @classmethod
    def usual(cls, dataset: str | None = None) -> Self:
        """Return the default configuration."""
        data = Data(dataset or "mnist", "mlp", partition="dirichlet_of_client", alpha=0.5)
        return cls(data, Training(learning_rate=0.05, batch_size=32))


Unit = tuple[int, int]
"""Number of clients and seed."""


class Measurement(NamedTuple):
    """One accuracy on the test data, a fraction, and its epsilon; see `studies`."""

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
        """The unit that the measurement belongs to."""
        return self.clients, self.seed


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    draws = sum(asked.draws if sigma else 1 for sigma in asked.noise_multipliers)
    each = draws * len(asked.algorithms)
    return {(number, seed): each for number in asked.clients for seed in asked.seeds}


class _Setup(NamedTuple):
    """The clients of a unit, their initial model, and the public clients."""

    asked: Config
    task: tasks.OneRound
    params: Params
    clients: Federation
    pilots: Federation
    key: Key


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Train the clients of each unit once, and merge them with every noise."""
    whole = OneShot(asked.data, asked.training, Merging(("fedavg",)), asked.epochs, central=False)
    train, test = choices.load(asked.data.dataset, asked.data.data_dir)
    task = tasks.shared(whole, train, test)
    _check_hides_all(task)
    data = task.central.inputs, task.central.targets
    console.print(f"The noise is drawn from {NOISE[asked.seeded_noise]}.")
    for number, seed in studies.each(console, missing, "{0[0]} clients, seed {0[1]}".format):
        rows = tasks.partition(asked.data, train, number + asked.pilots, seed)
        groups = (fj.clients.federation(data, some) for some in (rows[:number], rows[number:]))
        params, key = steps.start(task, seed)
        yield [*_merges(_Setup(asked, task, params, *groups, key), number, seed)]


def _check_hides_all(task: tasks.OneRound) -> None:
    """Refuse networks with leaves that clients would send without noise."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    kept = fj.tree.names(fj.leaves.split(task.model, shapes, task.central.inputs).statistics)
    if kept:
        raise ValueError(
            f"--model is {task.config.data.model}, whose running statistics {list(kept)} clients "
            "would send without noise; expected a network without any, such as lenet"
        )


def _merges(setup: _Setup, number: int, seed: int) -> Iterator[Measurement]:
    asked, task, params = setup.asked, setup.task, setup.params
    head = fj.algorithms.analytic_head(task.model, ridge=asked.ridge)
    average = fj.algorithms.fedavg()
    diagonal = fj.algorithms.make("fedfisher_diag", task.model)
    methods = {"fedavg": average, "fedfisher_diag": diagonal}
    sums = _sums(setup, methods, params, asked.epochs) | _sums(setup, {"head": head}, params)
    for sigma in asked.noise_multipliers:
        for draw in range(asked.draws if sigma else 1):
            key = jax.random.fold_in(jax.random.fold_in(setup.key, draw), round(1000 * sigma))
            for name in asked.algorithms:
                first, _, then = name.partition("+")
                # Each of two methods gets half of the privacy budget.
                share = sigma * (2**0.5 if then else 1)
                merged, ledger = _noisy(setup, *sums[first], params, share, key)
                ledgers = [ledger]
                if then:
                    again = _sums(setup, {"head": head}, merged)["head"]
                    key = jax.random.fold_in(key, 1)
                    merged, ledger = _noisy(setup, *again, merged, share, key)
                    ledgers.append(ledger)
                cost = privacy.epsilon(*ledgers, delta=asked.delta)
                spent = round(cost, 3), asked.delta, "; ".join(map(_written, ledgers))
                accuracy = round(float(task.accuracy(merged, task.test)), 4)
                yield Measurement(number, seed, name, sigma, draw, *spent, accuracy)


def _noisy(
    setup: _Setup,
    algorithm: Algorithm,
    clip: dict[str, float | None],
    sums: privacy.Clipped,
    params: Params,
    sigma: float,
    key: Key,
) -> tuple[Params, privacy.Ledger]:
    """Merge with noise on all groups of a method, which together cost as much as one of `sigma`."""
    noisy = sigma * sum(bound is not None for bound in clip.values()) ** 0.5
    method = privacy.private(
        algorithm, clip=clip, noise_multiplier=noisy, damping=setup.asked.noise_damping
    )
    cohort = jnp.arange(setup.clients.num_clients)
    key = key if setup.asked.seeded_noise else privacy.system_key()
    merged, _, ledger = merging.merge_sums(method, params, sums, cohort, key=key)
    return merged, ledger


def _sums(
    setup: _Setup, methods: dict[str, Algorithm], params: Params, epochs: int = 0
) -> dict[str, tuple]:
    """Train and summarize clients in chunks; return method, clips and clipped sums by name."""
    clips: dict[str, dict[str, float | None]] = {}
    for name, sent in _updates(setup, methods, setup.pilots, params, epochs).items():
        groups = (*_GROUPS[name], *(_WITHHELD if name == "head" else ()))
        found = privacy.norms(methods[name], sent, params, groups=groups)
        clips[name] = {g: float(np.median(found[g])) for g in _GROUPS[name]}
        clips[name] |= _WITHHELD if name == "head" else {}
    totals: dict[str, privacy.Clipped] = {}
    number = setup.clients.num_clients
    for begin in range(0, number, _CHUNK):
        some = jnp.arange(begin, min(begin + _CHUNK, number))
        chunk = fj.clients.select(setup.clients, some)
        for name, sent in _updates(setup, methods, chunk, params, epochs).items():
            method = privacy.private(methods[name], clip=clips[name], noise_multiplier=0.0)
            new = _reduce(method, sent.values, params)
            totals[name] = jax.tree.map(jnp.add, totals[name], new) if name in totals else new
    return {name: (methods[name], clips[name], totals[name]) for name in methods}


def _updates(
    setup: _Setup, methods: dict[str, Algorithm], some: Federation, params: Params, epochs: int
) -> dict[str, Update]:
    trained = fj.training.untrained(params, some.num_clients)
    if epochs:
        how = steps.training_options(setup.task, some) | {"optimizer": setup.task.optimizer}
        trained = fj.training.train(setup.task.model, params, some, key=setup.key, **how)
    return {n: merging.summarize(m, trained, some, key=setup.key) for n, m in methods.items()}


@partial(jax.jit, static_argnums=0)
def _reduce(method: Algorithm, values: dict, params: Params) -> privacy.Clipped:
    """Clip the uploads of the wrapped method's clients, and add them up."""
    if "params" in values:
        values = values | {"params": jax.tree.map(jnp.subtract, values["params"], params)}
    return method.reduce(values, jnp.ones(len(jax.tree.leaves(values)[0])))


def _written(ledger: privacy.Ledger) -> str:
    """Return a ledger as text: the clip and the noise's standard deviation of each group."""
    parts = (
        f"{group} {float(ledger.sensitivity[group]):.4g}|{float(ledger.deviation[group]):.4g}"
        for group in ledger.sensitivity
    )
    return f"{int(ledger.rounds)}: {', '.join(parts)}"
