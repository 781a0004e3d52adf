"""Report an experiment in rounds: a table, curves, and the barrier round by round."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from experiments.federated import runs as rounds
from experiments.harness import figures, folders, records, tables
from experiments.harness.config import PLAYS, Federated, title

_MARKED = 8  # approximate number of markers on a curve


def report(config: Federated, rows: Sequence[records.Row], program: str, console: Console) -> None:
    """Print the results of a run, and write summary.md and the figures into its folder."""
    rates = rounds.select(config, rows)
    own = [r for r in rows if r.server_learning_rate == rates[r.algorithm, r.local_epochs]]
    shown = table(config, own)
    console.print(tables.terminal(shown))
    console.print(footnote(config), style="dim")
    left = [records.CONFIG, records.RESULTS, "summary.md", "curves.png"]
    pictures = ["![accuracy](curves.png)", ""]
    figure(config, own, ("test", "accuracy"), "test accuracy, %", left[-1])
    if config.barrier:
        left.append("barrier.png")
        pictures += ["![barrier](barrier.png)", ""]
        figure(config, own, ("cohort", "barrier_loss"), "client-server barrier, nats", left[-1])
    parts = [tables.markdown(shown), footnote(config), "", *pictures]
    folders.write_summary(config, parts, program)
    console.print(f"\nIn {config.out}/: {', '.join(left)}", soft_wrap=True)


def table(config: Federated, rows: Sequence[records.Row]) -> tables.Table:
    """Return the table of final numbers with the chosen server rates; plays have a perplexity."""
    found = [
        _cells(config, [r for r in rows if (r.algorithm, r.local_epochs) == (algorithm, epochs)])
        for epochs in config.local_epochs
        for algorithm in config.merging.algorithms
    ]
    each = len(config.merging.algorithms)
    return tables.Table(
        title=title(config.data),
        headings=tuple(found[0]),
        lines=[tuple(cells.values()) for cells in found],
        sections=range(each - 1, len(found) - 1, each),
    )


def footnote(config: Federated) -> str:
    """Return the note that explains the columns."""
    what, perplexity = "Accuracy", ""
    if config.data.dataset == PLAYS:
        what = "Next-character accuracy"
        perplexity = " Perplexity is exp of the test loss of a character."
    runs, bands = "one seed", ""
    if len(config.seeds) > 1:
        runs = f"mean ± standard deviation over {len(config.seeds)} seeds"
        bands = " Curves are means over seeds, bands their ranges."
    return (
        f"{what} in %, {runs}, of the last model: on the test data, then the mean over held-out "
        "clients of the model as it is and fine-tuned on 25 or 50 % of their data, always on the "
        "other half. The barrier is in nats of the loss, the mean over the rounds measured."
        f"{perplexity} Down and up are a client's bytes in a round. Diverged clients are counted "
        f"over all rounds.{bands}"
    )


def figure(
    config: Federated, rows: Sequence[records.Row], metric: tuple[str, str], what: str, file: str
) -> None:
    """Draw a (split, metric) over all local epochs, with a panel for each number a round."""
    count = len(config.local_epochs)
    width = 2.2 + 3.2 * count
    side_by_side = int(width / 1.8)  # of the legend's labels
    height = 3.7 + 0.22 * math.ceil(len(config.merging.algorithms) / side_by_side)
    drawn, axes = figures.canvas(width, height, columns=count, grid="both", sharey=True)
    panels = np.atleast_1d(axes)
    for panel, epochs in zip(panels, config.local_epochs, strict=True):
        for algorithm in config.merging.algorithms:
            _curve(panel, rows, algorithm, epochs, metric)
        heading = f"{epochs} local epoch{'s' * (epochs > 1)} a round"
        panel.set_title(heading, fontsize="medium", loc="left")
        panel.set_xlabel("local epochs in all")
    panels[0].set_ylabel(what)
    figures.save_with_legend(drawn, config.out / file, columns=side_by_side)


def _curve(
    panel: Any, rows: Sequence[records.Row], algorithm: str, epochs: int, metric: tuple[str, str]
) -> None:
    """Draw the mean over seeds, and their range as a band."""
    what, scale = (algorithm, epochs, *metric), 100 if metric[1] == "accuracy" else 1
    own = [x for x in rows if (x.algorithm, x.local_epochs, x.split, x.metric) == what]
    series = tables.gathered((epochs * row.round, scale * row.value) for row in own)
    x, looks = list(series), figures.style(algorithm)
    means, low, high = ([of(series[place]) for place in x] for of in (statistics.fmean, min, max))
    looks |= {"linestyle": figures.line_style(algorithm), "markevery": max(1, len(x) // _MARKED)}
    panel.plot(x, means, markersize=5, **looks)
    panel.fill_between(x, low, high, color=looks["color"], alpha=0.15, linewidth=0)


def _cells(config: Federated, rows: Sequence[records.Row]) -> dict[str, str]:
    """Return the final numbers of an algorithm with a number of local epochs, by heading."""
    first = rows[0]
    last = [row for row in rows if row.round == rounds.number(config, first.local_epochs)]

    def percent(split: str, fraction: float | None = None) -> str:
        return tables.spread([100 * value for value in _values(last, split, "accuracy", fraction)])

    cells = {
        "algorithm": figures.label(first.algorithm),
        "local epochs": str(first.local_epochs),
        "server rate": f"{first.server_learning_rate:g}",
        "test %": percent("test"),
    }
    if config.data.dataset == PLAYS:
        losses = _values(last, "test", "loss")
        with np.errstate(over="ignore"):  # a diverged model has any loss
            cells["perplexity"] = tables.spread(np.exp(losses).tolist(), digits=2)
    for fraction in rounds.FRACTIONS:
        name = f"{100 * fraction:g} % tuned" if fraction else "held out %"
        cells[name] = percent("held_out", fraction)
    seeds = dict.fromkeys(row.seed for row in rows)
    own = [_values([r for r in rows if r.seed == seed], "cohort", "barrier_loss") for seed in seeds]
    return cells | {
        "barrier": tables.spread([statistics.fmean(values) for values in own if values], digits=3),
        "down": tables.size(_values(last, "traffic", "down")[0]),
        "up": tables.size(_values(last, "traffic", "up")[0]),
        "diverged": f"{sum(_values(rows, 'cohort', 'diverged')):.0f}",
    }


def _values(
    rows: Sequence[records.Row], split: str, metric: str, fraction: float | None = None
) -> list[float]:
    where = split, metric, fraction
    return [row.value for row in rows if (row.split, row.metric, row.fraction) == where]
