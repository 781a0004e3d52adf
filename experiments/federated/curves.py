"""Report an experiment in rounds: a table, curves, and the barrier round by round."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console

from experiments.federated import barriers, grid, personal, plan
from experiments.federated.plan import FRACTIONS
from experiments.harness import figures, folders, records, tables
from experiments.harness.config import TEXTS, Federated
from experiments.harness.titles import title

_MARKED = 8  # approximate number of markers on a curve
AXES = {"curves": "local epochs in all", "rounds": "rounds", "bytes": "MB of a client, up and down"}
"""Names of the figures of accuracy, and what is on their axes."""


def report(config: Federated, rows: Sequence[records.Row], program: str, console: Console) -> None:
    """Print the results of a run, and write summary.md and the figures into its folder."""
    chosen = plan.select(config, rows)
    own = [r for r in rows if plan.Unit(*r.unit).cell == chosen.get((r.algorithm, r.local_epochs))]
    whole = plan.finished(config, own)
    own = [r for r in own if plan.Unit(*r.unit) in whole]
    shown = [table(config, own), *personal.tables_of(config, own)]
    for each in shown:
        console.print(tables.terminal(each))
    console.print(footnote(config), style="dim")
    pictures = [f"{name}.png" for name in AXES]
    for name, file in zip(AXES, pictures, strict=True):
        figure(config, own, ("test", "accuracy"), "test accuracy, %", file, name)
    words = barriers.words(config, own) if config.barrier else ""
    if config.barrier:
        pictures.append("barrier.png")
        what = "client-server barrier, nats"
        figure(config, own, ("cohort", "barrier_loss"), what, pictures[-1])
        if words:
            pictures.append("barriers.png")
            barriers.scatter(config, own, config.out / pictures[-1])
    pictures += personal.draw(config, own)
    parts = [tables.markdown(shown[0]), footnote(config), ""]
    parts += [tables.markdown(each, level=2) for each in shown[1:]]
    parts += [words] * bool(words) + grids(config, rows, chosen)
    parts += [x for file in pictures for x in (f"![{file.partition('.')[0]}]({file})", "")]
    folders.write_summary(config, parts, program)
    left = [records.CONFIG, records.RESULTS, "summary.md", *pictures]
    console.print(f"\nIn {config.out}/: {', '.join(left)}", soft_wrap=True)


def grids(
    config: Federated, rows: Sequence[records.Row], chosen: dict[tuple[str, int], grid.Cell]
) -> list[str]:
    """Return what was tried of each grid, in Markdown."""
    if not grid.asked(config):
        return []
    parts = [
        "## Grids of learning rates",
        "",
        "Accuracy on the validation clients, %, with the first seed after a quarter of the rounds. "
        "\\* ran all rounds with all seeds; \\*\\* is the best of these on the validation clients.",
        "",
    ]
    for (name, epochs), cell in chosen.items():
        own = plan.of(rows, (name, epochs))
        tried = grid.table(config, own, plan.number(config, epochs), cell)
        tried = tried._replace(title=f"{figures.label(name)}, {plan.each_round(epochs)}")
        parts.append(tables.markdown(tried, level=3))
    return parts


def table(config: Federated, rows: Sequence[records.Row]) -> tables.Table:
    """Return the table of final numbers with the chosen server rates; plays have a perplexity."""
    found = [_cells(config, own) for _, _, own in plan.each(config, rows)]
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
    if config.data.dataset in TEXTS:
        what = "Next-character accuracy"
        perplexity = " Perplexity is exp of the test loss of a character."
    runs, bands = "one seed", ""
    if len(config.seeds) > 1:
        runs = f"mean ± standard deviation over {len(config.seeds)} seeds"
        bands = " Curves are means over seeds, bands their ranges."
    left_out = "Diverged clients"
    if config.must_improve:
        left_out = (
            "Clients whose loss on their own examples training made worse were left out, as "
            "diverged ones; both"
        )
    return (
        f"{what} in %, {runs}, of the last model: on the test data, then the mean over held-out "
        "clients of the model as it is and fine-tuned on 25 or 50 % of their data, always on the "
        "other half. The barrier is in nats of the loss, the mean over the rounds measured."
        f"{perplexity} Down and up are a client's bytes in a round. {left_out} are counted over "
        f"all rounds.{bands}"
    )


def figure(
    config: Federated,
    rows: Sequence[records.Row],
    metric: tuple[str, str],
    what: str,
    file: str,
    axis: str = "curves",
) -> None:
    """Draw a (split, metric) over one of `AXES`, with a panel for each number of epochs a round."""
    count = len(config.local_epochs)
    width = 2.2 + 3.2 * count
    side_by_side = int(width / 1.8)  # of the legend's labels
    height = 3.7 + 0.22 * math.ceil(len(config.merging.algorithms) / side_by_side)
    drawn, axes = figures.canvas(width, height, columns=count, grid="both", sharey=True)
    panels = np.atleast_1d(axes)
    for panel, epochs in zip(panels, config.local_epochs, strict=True):
        for algorithm in config.merging.algorithms:
            _curve(panel, rows, algorithm, epochs, metric, axis)
        panel.set_title(plan.each_round(epochs), fontsize="medium", loc="left")
        panel.set_xlabel(AXES[axis])
        if axis == "rounds":
            panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel(what)
    figures.save_with_legend(drawn, config.out / file, columns=side_by_side)


def _curve(
    panel: Any,
    rows: Sequence[records.Row],
    algorithm: str,
    epochs: int,
    metric: tuple[str, str],
    axis: str,
) -> None:
    """Draw the mean over seeds, and their range as a band."""
    of, scale = plan.of(rows, (algorithm, epochs)), 100 if metric[1] == "accuracy" else 1
    own = [row for row in of if (row.split, row.metric) == metric]
    seed = min((row.seed for row in of), default=0)
    both = sum(row.value for row in of if row.split == "traffic" and row.seed == seed) / 1e6
    each = {"curves": epochs, "rounds": 1, "bytes": both}[axis]
    series = tables.gathered((each * row.round, scale * row.value) for row in own)
    looks = figures.style(algorithm) | {"linestyle": figures.line_style(algorithm)}
    figures.curve(panel, series, markevery=max(1, len(series) // _MARKED), **looks)


def _cells(config: Federated, rows: Sequence[records.Row]) -> dict[str, str]:
    """Return the final numbers of an algorithm with a number of local epochs, by heading."""
    first = rows[0]
    by_seed = tables.gathered((row.seed, row) for row in rows)
    ends = {seed: max(row.round for row in own) for seed, own in by_seed.items()}
    last = [row for row in rows if row.round == ends[row.seed]]

    def percent(split: str, fraction: float | None = None) -> str:
        return tables.spread([100 * value for value in _values(last, split, "accuracy", fraction)])

    cells = {
        "algorithm": figures.label(first.algorithm),
        "local epochs": str(first.local_epochs),
        **({} if first.learning_rate is None else {"local rate": f"{first.learning_rate:g}"}),
        "server rate": f"{first.server_learning_rate:g}",
        "test %": percent("test"),
    }
    if config.data.dataset in TEXTS:
        losses = _values(last, "test", "loss")
        with np.errstate(over="ignore"):  # a diverged model has any loss
            cells["perplexity"] = tables.spread(np.exp(losses).tolist(), digits=2)
    for fraction in FRACTIONS:
        name = f"{100 * fraction:g} % tuned" if fraction else "held out %"
        cells[name] = percent("held_out", fraction)
    barrier_losses = [_values(own, "cohort", "barrier_loss") for own in by_seed.values()]
    count = {"worse": config.must_improve, "diverged": True}
    return cells | {
        "barrier": tables.spread([statistics.fmean(x) for x in barrier_losses if x], digits=3),
        "down": tables.size(_values(last, "traffic", "down")[0]),
        "up": tables.size(_values(last, "traffic", "up")[0]),
        **{n: f"{sum(_values(rows, 'cohort', n)):.0f}" for n, shown in count.items() if shown},
    }


def _values(
    rows: Sequence[records.Row], split: str, metric: str, fraction: float | None = None
) -> list[float]:
    where = split, metric, fraction
    return [row.value for row in rows if (row.split, row.metric, row.fraction) == where]
