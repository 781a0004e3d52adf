"""Compare client-server barriers of two algorithms, round by round with the same cohorts.

Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
    federated learning at scale, TMLR 2024, figure 6, whose barrier is in accuracy.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.federated import plan
from experiments.harness import figures, tables
from experiments.harness.config import Federated
from experiments.harness.records import Row

FIRST = "fedavg"
"""The algorithm with which the others are compared."""
METRICS = {
    "barrier_accuracy": ("barrier in accuracy, points", 100),
    "barrier_loss": ("barrier in loss, nats", 1),
}
Pairs = list[tuple[float, float]]
"""Barriers of the first algorithm and of another one, of equal seeds and rounds."""


def pairs(config: Federated, rows: Sequence[Row], metric: str) -> dict[tuple[str, int], Pairs]:
    """Return the pairs of barriers by algorithm and local epochs."""
    found: dict[tuple[str, int], dict[tuple[int, int], float]] = {}
    for row in rows:
        if (row.split, row.metric) == ("cohort", metric):
            own = found.setdefault((row.algorithm, row.local_epochs or 1), {})
            own[row.seed, row.round] = row.value
    return {
        (name, epochs): [(first[where], value) for where, value in own.items() if where in first]
        for (name, epochs), own in found.items()
        if name != FIRST and (first := found.get((FIRST, epochs), {}))
        if epochs in config.local_epochs
    }


def words(config: Federated, rows: Sequence[Row]) -> str:
    """Say in how many rounds the barrier is below the first algorithm's; "" without a pair."""
    lines = []
    for (name, epochs), own in pairs(config, rows, "barrier_accuracy").items():
        loss = pairs(config, rows, "barrier_loss")[name, epochs]
        counts = [sum(other < first for first, other in each) for each in (own, loss)]
        lines.append((figures.label(name), str(epochs), *map(str, counts), str(len(own))))
    if not lines:
        return ""
    headings = "algorithm", "local epochs", "lower in accuracy", "lower in loss", "rounds measured"
    title = f"Rounds in which the barrier is below that of {figures.label(FIRST)}"
    return tables.markdown(tables.Table(title, headings, lines), level=2)


def scatter(config: Federated, rows: Sequence[Row], path: Path) -> None:
    """Draw the pairs, a point for each seed and round; below the diagonal is a lower barrier."""
    epochs = config.local_epochs
    size = 2 + 3 * len(epochs), 6.4
    figure, axes = figures.canvas(*size, columns=len(epochs), rows=2, grid="both", squeeze=False)
    for line, (metric, (what, scale)) in zip(axes, METRICS.items(), strict=True):
        for panel, number in zip(line, epochs, strict=True):
            ends = [0.0]
            for (name, own), both in pairs(config, rows, metric).items():
                if own == number and both:
                    x, y = ([scale * value for value in each] for each in zip(*both, strict=True))
                    panel.plot(x, y, lw=0, ms=4, alpha=0.6, **figures.style(name))
                    ends += [*x, *y]
            span = [min(ends), max(ends)]
            panel.plot(span, span, color=figures.GREY, lw=1)
            panel.set_title(plan.each_round(number), fontsize="medium", loc="left")
            panel.set_xlabel(f"{figures.label(FIRST)}: {what}")
        line[0].set_ylabel(what)
    figures.save_with_legend(figure, path)
