"""What an experiment in rounds consists of: its units, when they are measured, and their order."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from experiments.federated import grid
from experiments.federated.grid import Cell
from experiments.harness import records, tables
from experiments.harness.config import Federated

FRACTIONS = (0.0, 0.25, 0.5)
"""Shares of a held-out client's data on which the model is fine-tuned."""


class Unit(NamedTuple):
    """One run, which is computed and written as a whole."""

    algorithm: str
    local_epochs: int
    server_learning_rate: float
    seed: int
    learning_rate: float | None = None  # of clients, if a grid chooses it

    @property
    def name(self) -> str:
        """The name of its files."""
        rate = _digits(self.server_learning_rate)
        own = "" if self.learning_rate is None else f"-local{_digits(self.learning_rate)}"
        return f"{self.algorithm}-{self.local_epochs}epochs-server{rate}{own}-seed{self.seed}"

    @property
    def cell(self) -> Cell:
        """Its learning rates."""
        return Cell(self.server_learning_rate, self.learning_rate)


def _digits(rate: float) -> str:
    """Return all digits of a rate, so that no two units share a name."""
    return repr(float(rate)).removesuffix(".0")


class Step(NamedTuple):
    """What is computed next: a unit, to a number of rounds."""

    unit: Unit
    rounds: int


def each_round(local_epochs: int) -> str:
    """Say how many local epochs a round has.

    Example:
        >>> each_round(1), each_round(4)
        ('1 local epoch a round', '4 local epochs a round')
    """
    return f"{local_epochs} local epoch{'s' * (local_epochs > 1)} a round"


def number(config: Federated, local_epochs: int) -> int:
    """Return the number of rounds of an experiment with a number of local epochs a round."""
    return config.rounds if config.total_epochs is None else config.total_epochs // local_epochs


def milestones(config: Federated, local_epochs: int) -> set[int]:
    """Return the rounds at which the model is also fine-tuned on held-out clients.

    Those are the last and, with several points, as many evenly spaced ones, half of the rounds and
    those of the compute that the least number of local epochs has.
    """
    last, points = number(config, local_epochs), config.personal_points
    if points == 1:
        return {last}
    spaced = {max(1, last * place // points) for place in range(1, points + 1)}
    return spaced | {max(1, last // 2), equal_compute(config, local_epochs)}


def equal_compute(config: Federated, local_epochs: int) -> int:
    """Return the round with as many local epochs in all as the last one with the fewest a round."""
    fewest = min(config.local_epochs)
    return max(
        1, min(number(config, fewest) * fewest // local_epochs, number(config, local_epochs))
    )


def measured(config: Federated, local_epochs: int, round_: int) -> bool:
    """Return whether a round is tested.

    Those are the rounds that cross a multiple of `eval_every` local epochs, and `milestones`.
    """
    crossed = round_ * local_epochs % config.eval_every < local_epochs
    return crossed or round_ in milestones(config, local_epochs)


def validated(config: Federated, local_epochs: int, round_: int) -> bool:
    """Return whether a round is also measured on the validation clients."""
    if not config.validation_clients:
        return False
    compared = grid.asked(config) and round_ == grid.quarter(number(config, local_epochs))
    stops = config.patience is not None and measured(config, local_epochs, round_)
    return compared or stops or round_ in milestones(config, local_epochs)


def stopped(config: Federated, rows: Iterable[records.Row]) -> bool:
    """Return whether the rows of a unit stop it early, by accuracy on the validation clients."""
    if config.patience is None:
        return False
    pairs = ((r.round, r.value) for r in rows if (r.split, r.metric) == ("validation", "accuracy"))
    values = [tables.rank(value) for _, value in sorted(pairs)]
    return bool(values) and len(values) - 1 - values.index(max(values)) >= config.patience


def finished(config: Federated, rows: Iterable[records.Row]) -> set[Unit]:
    """Return the units that have all rows: the loss of each round, and traffic in the end."""
    found = tables.gathered((row.unit, row) for row in rows)
    wanted, done = cache(partial(_wanted, config)), set()
    for unit, own in found.items():
        epochs = Unit(*unit).local_epochs
        last = max(r.round for r in own) if stopped(config, own) else number(config, epochs)
        if wanted(epochs, last) <= {(row.split, row.metric, row.round) for row in own}:
            done.add(Unit(*unit))
    return done


def _wanted(config: Federated, local_epochs: int, last: int) -> set[tuple[str, str, int]]:
    """Return split, metric and round of the rows that a unit of so many rounds has at least."""
    rounds, tuned = range(1, last + 1), milestones(config, local_epochs)
    wanted = {("cohort", "loss", n) for n in rounds} | {("traffic", "up", last)}
    wanted |= {("test", "accuracy", n) for n in rounds if measured(config, local_epochs, n)}
    more = tuned if config.personal_points > 1 else ()
    return wanted | {("held_out", "accuracy", n) for n in more if n <= last}


def compared(config: Federated, rows: Iterable[records.Row]) -> set[Unit]:
    """Return the units of a grid that ran the quarter of the rounds after which it is read."""
    if not grid.asked(config):
        return set()
    return {
        unit
        for row in rows
        if (row.split, row.metric) == ("validation", "accuracy")
        if row.round == grid.quarter(number(config, (unit := Unit(*row.unit)).local_epochs))
    }


def following(config: Federated, rows: Sequence[records.Row]) -> Step | None:
    """Return what is computed next; None if all units are finished.

    The first seed has a unit for each server learning rate, the others the chosen one alone; see
    `grid` for the units of a grid.
    """
    where = [(a, epochs) for epochs in config.local_epochs for a in config.merging.algorithms]
    done, first = finished(config, rows), config.seeds[0]
    units: list[Unit] = []
    for own in where if grid.asked(config) else ():
        last = number(config, own[1])
        scores = grid.score(of(rows, own), first, grid.quarter(last))
        tried = grid.cells(config.local_learning_rate, config.server_learning_rate, scores)
        for cell in (cell for cell in tried if cell not in scores):
            return Step(Unit(*own, cell.server, first, cell.local), grid.quarter(last))
        kept = grid.best(tried, scores)
        units += [Unit(*own, c.server, seed, c.local) for seed in config.seeds for c in kept]
    if not grid.asked(config):
        units = [Unit(*own, r, first) for own in where for r in config.server_learning_rate]
        if done.issuperset(units):
            chosen = select(config, rows)
            others = config.seeds[1:]
            units = [Unit(*own, chosen[own].server, seed) for seed in others for own in where]
    left = (unit for unit in units if unit not in done)
    return next((Step(unit, number(config, unit.local_epochs)) for unit in left), None)


def select(config: Federated, rows: Sequence[records.Row]) -> dict[tuple[str, int], Cell]:
    """Choose learning rates by algorithm and local epochs, the first of equals.

    The criterion is accuracy on the validation clients after the last round, with the first seed;
    for the cells of a grid that ran all rounds, the mean over all seeds.
    """
    seed, chosen = None if grid.asked(config) else config.seeds[0], {}
    done = finished(config, rows)
    for own in dict.fromkeys((row.algorithm, row.local_epochs or 1) for row in rows):
        units = tables.gathered((Unit(*row.unit), row) for row in of(rows, own)).values()
        ends = [(max(row.round for row in unit), unit) for unit in units]
        whole = [row for last, unit in ends for row in unit if row.round == last]
        if grid.asked(config):
            whole = [row for row in whole if Unit(*row.unit) in done]
        scores = grid.score([row._replace(round=0) for row in whole], seed, 0)
        if not config.validation_clients:
            chosen[own] = Unit(*whole[0].unit).cell
        elif scores:
            parts = 2 if grid.asked(config) else 1  # the loss decides among equals only in a grid
            chosen[own] = max(scores, key=lambda cell: scores[cell][:parts])
    return chosen


def of(rows: Iterable[records.Row], own: tuple[str, int]) -> list[records.Row]:
    """Return the rows of an algorithm and a number of local epochs."""
    return [row for row in rows if (row.algorithm, row.local_epochs) == own]


def each(
    config: Federated, rows: Sequence[records.Row]
) -> Iterator[tuple[int, str, list[records.Row]]]:
    """Yield the numbers of local epochs and the algorithms, with the rows of each."""
    for epochs in config.local_epochs:
        for name in config.merging.algorithms:
            yield epochs, name, of(rows, (name, epochs))
