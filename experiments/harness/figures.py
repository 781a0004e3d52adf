"""How figures look: one colour and one marker for an algorithm everywhere, % on every axis."""

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
"""What algorithms are compared with, and what it is."""
INK, GRID, GREY = "#222222", "#dddddd", "#8a8a8a"
# In the order of `merges`. Neighbours differ in lightness too: greyscale keeps them apart.
_COLOURS = (
    *("#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#0b4f8a", "#7fc8e8", "#8b1e6b"),
    *("#d16ba5", "#e8a6cf", "#b89400", "#c4501b", "#f0936a", "#4d7a1f", "#5f3c25"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))


def label(name: str) -> str:
    """Say what an algorithm is called in tables and figures; another name stays as it is."""
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
    # More algorithms than colours begin again, with markers shifted by one.
    turn, place = divmod(names.index(name), len(_COLOURS))
    marker = _MARKERS[(place + turn) % len(_MARKERS)]
    return {"color": _COLOURS[place], "marker": marker, "label": label(name)}


def line_style(name: str) -> Any:
    """Return how an algorithm's lines are dashed, where several cross in one panel."""
    names = list(algorithms.merges())
    return _LINES[names.index(name) % len(_LINES)] if name in names else ":"


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, **shared: Any) -> Any:
    """Begin a figure, in inches, without pyplot and its global state: no display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **shared)
    for panel in np.atleast_1d(axes).ravel():
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, axes


def legend(figure: Any, panels: Sequence[Any], *, columns: int = 4, **options: Any) -> None:
    """Put one legend under a figure, with every label of its panels once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        own = zip(*panel.get_legend_handles_labels(), strict=True)
        handles |= {name: handle for handle, name in own if name not in handles}
    where = {"loc": "outside lower center", "ncols": min(columns, len(handles)), "frameon": False}
    figure.legend(handles.values(), handles.keys(), **where, **options)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG; the file changes as a whole or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    write_bytes(path, picture.getvalue())
