"""Show accuracies at several rounds: equal compute, equal rounds, and models that are fine-tuned.

Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
    federated learning at scale, TMLR 2024, tables 3 to 5.
"""

from collections.abc import Sequence

from experiments.federated import plan
from experiments.harness import figures, tables
from experiments.harness.config import Federated
from experiments.harness.records import Row

_FEW = 10  # as many rounds have a column each


def tables_of(config: Federated, rows: Sequence[Row]) -> list[tables.Table]:
    """Return the table of all rounds if they are few, and of equal compute if it was measured."""
    measured = sorted({row.round for row in rows if _is(row, "test", None)})
    found = [_each_round(config, rows, measured)] if 1 < len(measured) <= _FEW else []
    return found if config.personal_points == 1 else [*found, _equal_compute(config, rows)]


def _each_round(config: Federated, rows: Sequence[Row], rounds: Sequence[int]) -> tables.Table:
    lines = [
        (figures.label(name), str(epochs), *(_percent(own, "test", None, n) for n in rounds))
        for epochs, name, own in plan.each(config, rows)
    ]
    headings = "algorithm", "local epochs", *map(str, rounds)
    return tables.Table("Test accuracy after each round, %", headings, lines)


def _equal_compute(config: Federated, rows: Sequence[Row]) -> tables.Table:
    lines = []
    for epochs, name, own in plan.each(config, rows):
        last = plan.number(config, epochs)
        rounds = plan.equal_compute(config, epochs), last, max(1, last // 2)
        cells = [_percent(own, "test", None, n) for n in rounds]
        cells += [_percent(own, "held_out", 0.5, n) for n in rounds]
        shown = [f"{cell} ({n})" for cell, n in zip(cells[:3], rounds, strict=True)]
        lines.append((figures.label(name), str(epochs), *shown, *cells[3:]))
    headings = "algorithm", "local epochs", "equal compute", "all rounds", "half of them"
    tuned = "50 % tuned: equal compute", "all rounds", "half of them"
    title = "Test accuracy at equal compute, after all rounds and after half, % (round)"
    return tables.Table(title, (*headings, *tuned), lines)


def draw(config: Federated, rows: Sequence[Row]) -> list[str]:
    """Draw personalised accuracy over rounds and over epochs of fine-tuning; return the files."""
    if config.personal_points == 1:
        return []
    files = ["personal.png"]
    points = {
        fraction: [(r, r.round, r.value) for r in rows if _is(r, "held_out", fraction)]
        for fraction in plan.FRACTIONS
    }
    _draw(config, points, "rounds", files[0])
    if config.personal_epochs > 1:
        files.append("tuning.png")
        points = {fraction: _over_epochs(config, rows, fraction) for fraction in plan.FRACTIONS[1:]}
        _draw(config, points, "epochs of fine-tuning", files[1])
    return files


Points = list[tuple[Row, int, float]]
"""Rows with the places and the heights of their points."""


def _over_epochs(config: Federated, rows: Sequence[Row], fraction: float) -> Points:
    """Return the accuracies after the last round by epochs of fine-tuning, from none."""
    found = []
    for row in rows:
        if row.round != plan.number(config, row.local_epochs or 1):
            continue
        epochs = row.split.removeprefix("tuned_")
        if _is(row, "held_out", 0.0):
            found.append((row, 0, row.value))
        elif _is(row, "held_out", fraction):
            found.append((row, config.personal_epochs, row.value))
        elif epochs.isdecimal() and _is(row, row.split, fraction):
            found.append((row, int(epochs), row.value))
    return sorted(found, key=lambda point: point[1])


def _draw(config: Federated, points: dict[float, Points], over: str, file: str) -> None:
    epochs, rows = config.local_epochs, len(points)
    size = 2 + 3 * len(epochs), 0.8 + 2.3 * rows
    shared = {"sharex": "col", "squeeze": False}
    drawn, axes = figures.canvas(*size, columns=len(epochs), rows=rows, grid="both", **shared)
    for line, (fraction, all_points) in zip(axes, points.items(), strict=True):
        for panel, number in zip(line, epochs, strict=True):
            for name in config.merging.algorithms:
                own = [
                    p for p in all_points if (p[0].algorithm, p[0].local_epochs) == (name, number)
                ]
                looks = figures.style(name) | {"linestyle": figures.line_style(name)}
                series = tables.gathered((x, 100 * y) for _, x, y in own)
                figures.curve(panel, series, **looks)
            panel.set_title(plan.each_round(number), fontsize="medium", loc="left")
        line[0].set_ylabel(f"{100 * fraction:g} % tuned, accuracy %")
    for panel in axes[-1]:
        panel.set_xlabel(over)
    figures.save_with_legend(drawn, config.out / file)


def _percent(rows: Sequence[Row], split: str, fraction: float | None, round_: int) -> str:
    own = [100 * r.value for r in rows if r.round == round_ and _is(r, split, fraction)]
    return tables.spread(own)


def _is(row: Row, split: str, fraction: float | None) -> bool:
    return (row.split, row.metric, row.fraction) == (split, "accuracy", fraction)
