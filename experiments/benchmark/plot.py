"""The figure of a run: bars of every case's time, group by group, or curves of growth."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.measure import Row
from experiments.benchmark.report import is_peak, workloads

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
        axes.set_xscale("log")
        axes.set_xlim(right=12 * max(row.value for row in own))
        axes.set_title(title, fontsize="medium", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set_xlabel("seconds, median; in brackets how many times as fast as the grey reference")
    _save(figure, path)


def _label(row: Row, speedup: float | None) -> str:
    seconds = f"{row.value:.3g} s"
    return seconds if speedup is None else f"{seconds}  ({speedup:.3g} x)"


def growth(panels: dict[str, dict[str, list[tuple[float, float]]]], path: Path) -> None:
    """Draw curves on logarithmic axes.

    Args:
        panels: by the label of the vertical axis, curves by name, each a list of (x, y).
        path: of the PNG file.
    """
    figure = _figure(9.0, 3.0 * len(panels))
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (label, curves) in zip(grid, panels.items(), strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1].set_xlabel("clients M, or uploads")
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
