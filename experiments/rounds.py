"""Accuracy round by round: one merge of each algorithm, then federated averaging."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from experiments.figures import canvas, save
from experiments.records import Row

Curves = dict[str, list[tuple[float, ...]]]
"""By algorithm: for each round the accuracies in percent, one for each unit."""


def curves(rows: Sequence[Row], algorithms: Sequence[str]) -> Curves:
    """Gather merged models by algorithm and round.

    Args:
        rows: of one experiment.
        algorithms: in the order of the table.

    Returns:
        The curves of the algorithms that went on after the first round.
    """
    found = {}
    for name in algorithms:
        own = [row for row in rows if row.algorithm == name]
        last = max((row.round for row in own), default=1)
        if last > 1:
            found[name] = [
                tuple(100 * row.value for row in own if row.round == number)
                for number in range(1, last + 1)
            ]
    return found


def table(found: Curves) -> Table:
    """Lay the curves out for a terminal.

    Args:
        found: what `curves` returned.

    Returns:
        A table for `rich`, means in percent.
    """
    shown = Table(title=_TITLE, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    shown.add_column("first round", no_wrap=True)
    for number in _numbers(found):
        shown.add_column(number, justify="right", no_wrap=True)
    for name, cells in _cells(found):
        shown.add_row(name, *cells)
    return shown


def markdown(found: Curves) -> str:
    """Write the curves as a table in Markdown.

    Args:
        found: what `curves` returned.

    Returns:
        The text, with its heading.
    """
    numbers = _numbers(found)
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in _cells(found)]
    return "\n".join(
        [
            f"## {_TITLE}",
            "",
            f"| first round | {' | '.join(numbers)} |",
            f"| --- |{' ---: |' * len(numbers)}",
            *lines,
            "",
            "![accuracy round by round](rounds.png)",
            "",
        ]
    )


def figure(found: Curves, title: str, path: Path) -> None:
    """Draw the curves; the file changes as a whole or not at all.

    Args:
        found: what `curves` returned.
        title: above the figure.
        path: of the PNG file.
    """
    drawn, axes = canvas(7.2, 4.2)
    for name, rounds in found.items():
        means = [statistics.fmean(values) for values in rounds]
        axes.plot(range(1, len(means) + 1), means, marker="o", markersize=4, label=name)
    axes.set_xlabel("round: the first by each algorithm, the others by federated averaging")
    axes.set_ylabel("test accuracy, %, mean over runs")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.legend(frameon=False)
    save(drawn, path)


_TITLE = "Mean accuracy in % after each round"


def _numbers(found: Curves) -> list[str]:
    return [str(number + 1) for number in range(max(map(len, found.values())))]


def _cells(found: Curves) -> list[tuple[str, list[str]]]:
    return [
        (name, [f"{statistics.fmean(values):.1f}" for values in rounds])
        for name, rounds in found.items()
    ]
