"""Draw figures: each algorithm has one colour and one marker everywhere, accuracies are in %."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.records import write_bytes
from fisherjax import algorithms

REFERENCES = {
    "local": "one client's own model, mean over clients",
    "ensemble": "mean of all clients' outputs: M models, not one",
    "central": "one model trained on all the data: the ceiling",
}
"""The references that algorithms are compared with, and what each is."""
INK, GRID, GREY = "#222222", "#dddddd", "#8a8a8a"
# In the order of `merges`. Neighbours differ in lightness too, so greyscale tells them apart.
_COLOURS = (
    *("#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#0b4f8a", "#7fc8e8", "#8b1e6b"),
    *("#d16ba5", "#e8a6cf", "#b89400", "#c4501b", "#f0936a", "#4d7a1f", "#5f3c25"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))


def label(name: str) -> str:
    """Return the label of an algorithm in tables and figures; another name stays as it is."""
    first, *others = name.split("+")
    rows = algorithms.METHODS
    merge = rows[first].label if first in rows else first
    later = (rows[n].label if n in rows else n.replace("_", " ") for n in others)
    return " + ".join([merge, *later])


def style(name: str) -> dict[str, Any]:
    """Return an algorithm's colour, marker and label, the same in every figure and any order."""
    first, *exchanges = name.split("+")
    if exchanges:
        return style(first) | {"marker": "*", "label": label(name)}
    names = list(algorithms.merges())
    if name not in names:
        return {"color": GREY, "marker": "o", "label": name}
    # Where there are more algorithms than colours, these repeat with shifted markers.
    turn, place = divmod(names.index(name), len(_COLOURS))
    marker = _MARKERS[(place + turn) % len(_MARKERS)]
    return {"color": _COLOURS[place], "marker": marker, "label": label(name)}


def line_style(name: str) -> Any:
    """Return the line style of an algorithm, for panels in which several lines cross."""
    names = list(algorithms.merges())
    return _LINES[names.index(name) % len(_LINES)] if name in names else ":"


def canvas(
    width: float, height: float, columns: int = 1, rows: int = 1, grid: str = "", **shared: Any
) -> Any:
    """Make a figure of a size in inches and its panels, without pyplot and its global state.

    `grid` draws lines of an axis behind what is drawn: "x", "y" or "both".
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **shared)
    for panel in np.atleast_1d(axes).ravel():
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
        if grid:
            panel.grid(axis=grid, color=GRID, linewidth=0.8)
    return figure, axes


def legend(figure: Any, panels: Sequence[Any], *, columns: int = 4, **options: Any) -> None:
    """Add one legend under a figure, with every label of its panels once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        named = zip(*panel.get_legend_handles_labels(), strict=True)
        handles |= {name: handle for handle, name in named if name not in handles}
    where = {"loc": "outside lower center", "ncols": min(columns, len(handles)), "frameon": False}
    figure.legend(handles.values(), handles.keys(), **where, **options)


def save_with_legend(figure: Any, path: Path, **options: Any) -> None:
    """Add one legend of all panels under a figure, and write it; the options are of `legend`."""
    legend(figure, figure.axes, **options)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG; the file is replaced as a whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes(path, picture.getvalue())


def image(panel: Any, pixels: np.ndarray, name: str = "", **how: Any) -> None:
    """Draw an image without axes, with its name on the left."""
    panel.imshow(pixels, **how)
    panel.set(xticks=[], yticks=[])
    panel.set_ylabel(name, rotation=0, ha="right", va="center")
