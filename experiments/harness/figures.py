"""Draw figures: each algorithm has one colour and one marker everywhere, accuracies are in %.

Figures are read on pages of about seven inches, so wider ones are read at a smaller scale; what
tells curves apart (markers, lines, hatches) is seen in greyscale too.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
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
_LABELS = {
    **{"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "emnist": "EMNIST"},
    **{"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn_cropped": "SVHN"},
    **{"mlp": "MLP", "lenet": "LeNet", "cnn": "CNN", "resnet18": "ResNet-18"},
}
INK, GRID, GREY = "#222222", "#dddddd", "#8a8a8a"
# In the order of `merges`. Neighbours differ in lightness too, so greyscale tells them apart.
_COLOURS = (
    *("#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#0b4f8a", "#7fc8e8", "#8b1e6b"),
    *("#d16ba5", "#e8a6cf", "#b89400", "#c4501b", "#f0936a", "#4d7a1f", "#5f3c25"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))
_DPI = 200  # a page shows about half of it; screens of phones show all
_MOST_COLOURS = 20_000  # drawings have fewer colours, photographs more


def label(name: str) -> str:
    """Return the label of an algorithm, a data set or a network in tables and figures.

    Another name stays as it is.
    """
    first, *others = name.split("+")
    rows = algorithms.METHODS
    merge = rows[first].label if first in rows else _LABELS.get(first, first)
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
    marker = MARKERS[(place + turn) % len(MARKERS)]
    return {"color": _COLOURS[place], "marker": marker, "label": label(name)}


def line_style(name: str) -> Any:
    """Return the line style of an algorithm, for panels in which several lines cross."""
    names = list(algorithms.merges())
    return LINES[names.index(name) % len(LINES)] if name in names else ":"


def curve(panel: Any, series: Mapping[float, Sequence[float]], **looks: Any) -> None:
    """Draw the means of several values at each place, and their ranges as a band."""
    means, low, high = (list(map(of, series.values())) for of in (fmean, min, max))
    panel.plot(list(series), means, markersize=5, **looks)
    panel.fill_between(list(series), low, high, color=looks["color"], alpha=0.15, linewidth=0)


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


def in_two_columns(count: int, height: float, **shared: Any) -> tuple[Any, list[Any]]:
    """Make a figure as wide as a page of `count` panels in two columns, and return its panels.

    `height` is that of a panel in inches; the other options are of `canvas`.
    """
    columns = min(2, count)
    rows = -(-count // columns)
    size = 7.4, height * rows + 0.9
    figure, axes = canvas(*size, columns, rows, squeeze=False, **shared)
    for panel in axes.ravel()[count:]:
        panel.set_visible(False)
    return figure, list(axes.ravel()[:count])


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
    from PIL import Image

    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    _with_palette(Image.open(drawn).convert("RGB")).save(picture, format="png", optimize=True)
    write_bytes(path, picture.getvalue())


def _with_palette(picture: Any) -> Any:
    """Return a drawing in its 256 most frequent colours, a third of the bytes; photographs stay.

    A rarer colour, between others at the edge of a letter, becomes the nearest of these.
    """
    from PIL import Image
    from scipy.spatial import KDTree

    pixels = np.asarray(picture).reshape(-1, 3)
    colours, place, counts = np.unique(
        pixels @ np.array([65536, 256, 1]), return_inverse=True, return_counts=True
    )
    if len(colours) > _MOST_COLOURS:
        return picture
    parts = colours[:, None] // np.array([65536, 256, 1]) % 256
    palette = parts[np.argsort(-counts)[:256]]
    _, nearest = KDTree(palette).query(parts)
    made = Image.fromarray(nearest.astype(np.uint8)[place].reshape(picture.size[::-1]))
    made.putpalette(palette.astype(np.uint8).tobytes())
    return made


def image(panel: Any, pixels: np.ndarray, name: str = "", **how: Any) -> None:
    """Draw an image without axes, with its name on the left."""
    panel.imshow(pixels, **how)
    panel.set(xticks=[], yticks=[])
    panel.set_ylabel(name, rotation=0, ha="right", va="center")
