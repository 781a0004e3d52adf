"""The figure of a run: one dot for each run and the mean of each algorithm."""

import io
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.report import MEANINGS, Line

_MERGED, _REFERENCE, _INK = "#0b5fa5", "#8a8a8a", "#222222"


def accuracy(table: Sequence[Line], title: str, path: Path) -> None:
    """Draw the accuracies of all algorithms; the file changes as a whole or not at all.

    Args:
        table: what `report.lines` returned.
        title: above the figure.
        path: of the PNG file.
    """
    # Neither pyplot nor its global state, so that no display is needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 0.9 + 0.42 * len(table)), layout="constrained")
    axes = figure.add_subplot()
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
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(picture.getvalue())
    os.replace(partial, path)


def _spread(count: int) -> np.ndarray:
    """Set dots side by side across the bar, in the order of the runs."""
    return np.linspace(-0.2, 0.2, count) if count > 1 else np.zeros(1)
