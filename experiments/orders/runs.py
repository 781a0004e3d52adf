"""Run orders of local training, merges and exchanges, and measure each of their steps."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import optax
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, config, steps, studies, tasks
from fisherjax.algorithms import METHODS
from fisherjax.clients import Federation
from fisherjax.typing import Key, Params

TRAIN = "train"
"""The name of local training among the steps of an order."""
_K_FAC = "fedfisher_kfac"


@dataclasses.dataclass(frozen=True)
class Config(commands.Imports):
    """Clients, and the orders in which they train, are merged and exchange sums."""

    data: config.Group[config.Data] = dataclasses.field(default=config.Data())
    training: config.Group[config.Training] = dataclasses.field(default=config.Training())
    orders: tuple[str, ...] = (
        f"20 {_K_FAC} analytic_head 4*natural_gradient",
        f"10 {_K_FAC} analytic_head 2*natural_gradient x2",
        f"5 {_K_FAC} analytic_head natural_gradient x4",
        f"5 {_K_FAC} analytic_head x4",
        f"5 {_K_FAC} x8",
        "5 preconditioned_mixing x8",
        f"1 {_K_FAC} analytic_head natural_gradient x8",
        "1 fedavg analytic_head 4*natural_gradient",
        "1 fedavg x40",
    )
    """Epochs of training, then a merge, then exchanges; 4*STEP repeats one, x2 at the end all."""
    partition_seeds: tuple[int, ...] = (0,)
    """Seeds of the splits."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial model and of training, each on each split."""
    out: commands.Folder = Path("runs/orders")
    """Folder for the results; an unfinished run there continues."""

    @classmethod
    def usual(cls, dataset: str | None = None) -> Self:
        """Return the default configuration of a data set, with the clients of one_shot."""
        usual = config.one_shot(dataset)
        return cls(usual.data, usual.training, partition_seeds=usual.partition_seeds[:1])


Unit = tuple[str, int, int]
"""Order, partition seed and seed."""


class Measurement(NamedTuple):
    """One step of an order. See `studies`.

    Attributes:
        order: The whole order.
        partition_seed: Seed of the split.
        seed: Seed of the initial model and of training.
        number: Number of the step, from 1.
        step: Its name: train, a merge or an exchange.
        epochs: Local epochs of the step; 0 if it does not train.
        seconds: Seconds of all clients together, and of the server.
        bytes: Bytes that a client sends in the step.
        accuracy: Accuracy on the test data behind the step, a fraction; behind training it is that
            of the model before it, as nothing is merged yet.
    """

    order: str
    partition_seed: int
    seed: int
    number: int
    step: str
    epochs: int
    seconds: float
    bytes: int
    accuracy: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.order, self.partition_seed, self.seed


_NUMBERED = re.compile(r"([1-9]\d*)\*(\S+)")


def plan(order: str) -> list[tuple[str, int]]:
    """Return the steps of an order, each with its number of local epochs.

    Raises:
        ValueError: If a word is no number of epochs, merge or exchange, or a merge does not follow
            training, or training is not followed by a merge.

    Example:
        >>> plan("2 fedavg 2*analytic_head x3")[:5]
        [('train', 2), ('fedavg', 0), ('analytic_head', 0), ('analytic_head', 0), ('train', 2)]
    """
    whole = _NUMBERED.sub(lambda found: f"{found[2]} " * int(found[1]), order)
    *words, last = whole.split() or [""]
    times = re.fullmatch(r"x([1-9]\d*)", last)
    words = words * int(times[1]) if times else [*words, last]
    found = [(TRAIN, int(word)) if re.fullmatch(r"[1-9]\d*", word) else (word, 0) for word in words]
    merges = [name for name, row in fj.algorithms.merges().items() if row.gives == "model"]
    exchanges = [name for name, row in METHODS.items() if "exchange" in row.laws]
    for before, step in itertools.pairwise([None, *(step for step, _ in found), None]):
        kind = None if step is None else step.partition("@")[0]
        if kind not in (None, TRAIN, *merges, *exchanges):
            raise ValueError(
                f"--orders has '{step}' in '{order}', expected a number of local epochs, a merge "
                f"({', '.join(merges)}) or an exchange ({', '.join(exchanges)})"
            )
        if (kind in merges) != (before == TRAIN) or (before is None and kind != TRAIN):
            raise ValueError(
                f"--orders has '{order}', expected to begin with training, and a merge behind each "
                "training and nowhere else, such as '5 fedavg analytic_head'"
            )
    return found


def one_shot(asked: Config) -> config.OneShot:
    """Return the experiment in one round that has these clients and all merges."""
    steps_of_all = [step for order in asked.orders for step, _ in plan(order)]
    pairs = itertools.pairwise(steps_of_all)
    names = tuple(sorted({step for before, step in pairs if before == TRAIN}))
    how = {"partition_seeds": asked.partition_seeds, "seeds": asked.seeds, "central": False}
    merging = config.Merging(names)
    return config.OneShot(asked.data, asked.training, merging, imports=asked.imports, **how)


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    return {
        (order, split, seed): len(plan(order))
        for order in asked.orders
        for split in asked.partition_seeds
        for seed in asked.seeds
    }


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Run the orders that are missing."""
    task = tasks.one_round(one_shot(asked))
    compiled: set[str] = set()
    for unit in studies.each(console, missing, "{0[0]}, split {0[1]}, seed {0[2]}".format):
        yield _run(task, unit, compiled)


def _run(task: tasks.OneRound, unit: Unit, compiled: set[str]) -> list[Measurement]:
    """Run an order; before the first step of each kind it runs once, to compile what it needs."""
    order, split, seed = unit
    model, key = steps.start(task, seed)
    found, rows, trained = plan(order), [], None
    for number, (step, epochs) in enumerate(found, start=1):
        given = task, task.federations[split], model, steps.fold_in(key, number)
        if step == TRAIN:
            # FedProx and others change how their clients train.
            optimizer = task.methods[found[number][0]].clients.optimizer(task.optimizer)
            first, compute = (partial(_train, *given, optimizer, n) for n in (1, epochs))
        elif trained is not None:
            first = compute = partial(_merge, *given, step, trained)
        else:
            first = compute = partial(_exchange, *given, step)
        if step not in compiled:
            first()
            compiled.add(step)
        (model, trained), seconds, size = compute()
        accuracy = round(float(task.accuracy(model, task.test)), 6)
        rows.append(Measurement(order, split, seed, number, step, epochs, seconds, size, accuracy))
    return rows


Step = tuple[tuple[Params, fj.training.Trained | None], float, int]
"""Model and trained clients behind a step, its seconds, and the bytes that a client sends."""


def _train(
    task: tasks.OneRound,
    federation: Federation,
    model: Params,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
) -> Step:
    given = task, federation, model, key, _silent, optimizer
    trained, seconds = steps.train(*given, epochs=epochs)
    return (model, trained), seconds, 0


def _silent(loss: float) -> None:
    pass


def _merge(
    task: tasks.OneRound,
    federation: Federation,
    model: Params,
    key: Key,
    step: str,
    trained: fj.training.Trained,
) -> Step:
    method = task.methods[step]
    given = method.clients, trained, federation
    sent, seconds = steps.timed(fj.merging.summarize, *given, key=key)
    server = method.server(None), model, sent, federation.weights
    (merged, *_), more = steps.timed(fj.merging.merge, *server, key=key)
    return (merged, None), round(seconds + more, 4), steps.upload_bytes(sent)


def _exchange(
    task: tasks.OneRound, federation: Federation, model: Params, key: Key, step: str
) -> Step:
    found = steps.exchange(task, federation, step, model, key)
    return (found.params, None), found.seconds, found.upload_bytes
