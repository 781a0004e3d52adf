"""The figure of a run, a dot for each run and the mean of each algorithm; how figures are made."""

import io
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import MEANINGS, Line

_MERGED, _REFERENCE, _INK = "#0b5fa5", "#8a8a8a", "#222222"


def canvas(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """Begin a figure without pyplot and its global state, so that no display is needed.

    Args:
        width: inches.
        height: inches.
        columns: axes side by side.

    Returns:
        Matplotlib's figure and its axes, an array of them if there are several.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def save(figure: Any, path: Path) -> None:
    """Write a figure; the file changes as a whole or not at all.

    Args:
        figure: from `canvas`.
        path: of the PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(picture.getvalue())
    os.replace(partial, path)


def accuracy(table: Sequence[Line], title: str, path: Path) -> None:
    """Draw the accuracies of all algorithms; the file changes as a whole or not at all.

    Args:
        table: what `report.lines` returned.
        title: above the figure.
        path: of the PNG file.
    """
    figure, axes = canvas(7.2, 0.9 + 0.42 * len(table))
    for place, line in enumerate(table):
        colour = _REFERENCE if line.algorithm in MEANINGS else _MERGED
        mean = statistics.fmean(line.accuracies)
        axes.barh(place, mean, height=0.62, color=colour, alpha=0.25)
        axes.plot([mean, mean], [place - 0.31, place + 0.31], color=colour, linewidth=2.5)
        axes.plot(
            line.accuracies,
            place + _spread(len(line.accuracies)),
            "o",
            color=colour,
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.4,
        )
        # In a column of its own beside the axes, where no dot can lie.
        axes.annotate(
            f"{mean:.1f}",
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=_INK,
            annotation_clip=False,
        )
    axes.set_yticks(range(len(table)), [line.algorithm for line in table])
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("test accuracy, %: a dot is one run, the bar and the number their mean")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    save(figure, path)


def _spread(count: int) -> np.ndarray:
    """Set dots side by side across the bar, in the order of the runs."""
    return np.linspace(-0.2, 0.2, count) if count > 1 else np.zeros(1)
