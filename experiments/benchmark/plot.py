"""The figure of a run: bars of every case's time, group by group, or curves of growth."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.measure import Row
from experiments.benchmark.report import is_peak, workloads

Panels = dict[tuple[str, str], dict[str, list[tuple[float, float]]]]

_OURS, _OTHER = "#0b5fa5", "#8a8a8a"


def bars(rows: Sequence[Row], path: Path) -> None:
    """Draw the median of each case, with how many times as fast as the reference it is.

    Args:
        rows: of all groups.
        path: of the PNG file.
    """
    medians = [row for row in rows if row.metric == "median" and not is_peak(row)]
    speedups = {(r.workload, r.case): r.value for r in rows if r.metric == "speedup"}
    titles = workloads(medians)
    counts = [sum(row.workload == title for row in medians) for title in titles]
    figure = _figure(9.0, 0.5 + sum(0.55 + 0.3 * count for count in counts))
    grid = figure.subplots(len(titles), 1, squeeze=False, height_ratios=counts)[:, 0]
    for axes, title in zip(grid, titles, strict=True):
        own = [row for row in medians if row.workload == title]
        colours = [_OURS if row.case.startswith("fisherjax") else _OTHER for row in own]
        drawn = axes.barh([row.case for row in own], [row.value for row in own], color=colours)
        labels = [_label(row, speedups.get((title, row.case))) for row in own]
        axes.bar_label(drawn, labels, padding=4, fontsize="small")
        axes.invert_yaxis()
        axes.set_xlim(right=1.4 * max(row.value for row in own))
        axes.set_title(title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set_xlabel("seconds, median; in brackets how many times as fast as the reference")
    _save(figure, path)


def _label(row: Row, speedup: float | None) -> str:
    seconds = f"{row.value:.3g} s"
    return seconds if speedup is None else f"{seconds}  ({speedup:.3g} x)"


def growth(panels: Panels, path: Path) -> None:
    """Draw curves over a logarithmic axis.

    Args:
        panels: by the labels of the two axes, curves by name, each a list of (x, y).
        path: of the PNG file.
    """
    columns = list(dict.fromkeys(x for x, _ in panels))
    lines = list(dict.fromkeys(y for _, y in panels))
    figure = _figure(1.0 + 5.5 * len(columns), 3.0 * len(lines))
    grid = figure.subplots(len(lines), len(columns), squeeze=False)
    for (x, y), curves in panels.items():
        axes = grid[lines.index(y), columns.index(x)]
        for name, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=name)
        axes.set_xscale("log")
        values = [value for points in curves.values() for _, value in points]
        if max(values) > 10 * min(values):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0, top=1.3 * max(values))
        axes.set_ylabel(y)
        axes.set_xlabel(x)
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    # Neither pyplot nor its global state, so that no display is needed.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(picture.getvalue())
    os.replace(partial, path)
