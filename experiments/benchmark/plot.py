"""Draw the figure of a run: bars of the times of all cases, or curves of growth."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

from experiments.benchmark.report import MATMUL, Row, numbers
from experiments.harness.figures import GREY, GRID, INK, canvas, legend, style
from fisherjax import algorithms

_OURS = "#0b4f8a"
_CURVES = ((_OURS, "o", "-"), ("#d98200", "s", "--"), (INK, "^", ":"), ("#57b894", "D", "-."))
_STACKED = (("#d98200", "///"), ("#57b894", "..."), ("#0b4f8a", ""), (GRID, ""))
_GROWING = {
    "seconds": lambda case: case["median"],
    "ms a step, or an upload": lambda case: 1e3 / case["rate"],
    "peak memory, MiB": lambda case: case["peak_memory"] / 2**20,
}
_OVER = ("clients", "uploads", "parameters", "layers")
_ALIKE = 4  # largest ratio of times at which panels share an axis


def bars(rows: Sequence[Row]) -> Any:
    """Draw the median of each case, with its speed relative to the reference."""
    groups = numbers(row for row in rows if not row.case.startswith(MATMUL))
    compared = {row.unit.removeprefix("x ") for row in rows if row.unit.startswith("x ")}
    counts = list(map(len, groups.values()))
    longest = [max(case["median"] for case in own.values()) for own in groups.values()]
    shared = max(longest) < _ALIKE * min(longest)
    height = 0.5 + sum(0.55 + 0.3 * count for count in counts)
    how = {"squeeze": False, "sharex": shared, "height_ratios": counts}
    figure, grid = canvas(9.0, height, rows=len(groups), **how)
    for panel, (title, own), most in zip(grid[:, 0], groups.items(), longest, strict=True):
        seconds = [case["median"] for case in own.values()]
        ratios = [f"  ({c['speedup']:.3g} x)" if "speedup" in c else "" for c in own.values()]
        labels = [f"{x:.3g} s{ratio}" for x, ratio in zip(seconds, ratios, strict=True)]
        drawn = panel.barh(list(own), seconds, color=[_colour(name, compared) for name in own])
        panel.bar_label(drawn, labels, padding=4, fontsize="small")
        panel.invert_yaxis()
        panel.set_xlim(right=1.4 * (max(longest) if shared else most))
        panel.set_title(title, fontsize="medium", loc="left")
    references = sorted({row.unit.removeprefix("x ") for row in rows if row.metric == "speedup"})
    explained = f"; in brackets how many times as fast as {', '.join(references)}"
    figure.supxlabel(f"seconds, median{explained if references else ''}", fontsize="medium")
    return figure


def growth(
    rows: Sequence[Row], values: Mapping[str, Callable[[dict[str, float]], float]] = _GROWING
) -> Any:
    """Draw values of cases, of which the last is memory, over their number of clients or else."""
    curves = []
    for title, own in numbers(rows).items():
        cases = list(own.values())
        over = next(name for name in _OVER if name in cases[0])
        curves.append((title, over, sorted(cases, key=itemgetter(over))))
    across = list(dict.fromkeys(over for _, over, _ in curves))
    size = 1.0 + 4.5 * len(across), 0.5 + 2.4 * len(values)
    how = {"grid": "both", "squeeze": False, "sharex": "col", "sharey": "row"}
    figure, grid = canvas(*size, len(across), len(values), **how)
    for (title, over, cases), look in zip(curves, itertools.cycle(_CURVES), strict=False):
        how = dict(zip(("color", "marker", "linestyle"), look, strict=True), markersize=5)
        for panel, value in zip(grid[:, across.index(over)], values.values(), strict=True):
            panel.plot([case[over] for case in cases], list(map(value, cases)), label=title, **how)
    for panel in grid.ravel():
        panel.set(xscale="log", yscale="log")
    for panel, label in zip(grid[:, 0], values, strict=True):
        panel.set_ylabel(label)
    for panel, over in zip(grid[-1], across, strict=True):
        panel.set(xlabel=over, yscale="linear", ylim=(0, None))
        sizes = sorted({case[over] for _, own, cases in curves if own == over for case in cases})
        if sizes[-1] < 100 * sizes[0]:
            # Labels of a short logarithmic axis would overlap.
            panel.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], minor=False)
            panel.set_xticks([], minor=True)
    legend(figure, grid.ravel(), columns=2)
    return figure


def stacks(rows: Sequence[Row]) -> Any:
    """Draw the seconds of tracing, lowering, compiling and of all else, a bar for each run."""
    groups = numbers(rows)
    bars = [
        (f"{task}, {case}", own) for task, cases in groups.items() for case, own in cases.items()
    ]
    names = [name for name, _ in bars]
    figure, panel = canvas(8.0, 1.4 + 0.2 * len(bars), grid="x")
    left = [0.0] * len(bars)
    parts = ("tracing", "lowering", "compiling", "other")
    for part, (colour, hatch) in zip(parts, _STACKED, strict=True):
        widths = [own[f"{part}_seconds"] for _, own in bars]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        panel.barh(names, widths, left=left, label=part, **look)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    for place, (_, own) in enumerate(bars):
        said = f", {own['programs']:.0f} programs" if own["programs"] else ""
        words = f" {left[place]:.1f} s{said}"
        panel.text(left[place], place, words, va="center", fontsize="small", clip_on=False)
    panel.set(xlim=(0, 1.2 * max(left)), ylim=(len(bars) - 0.5, -0.5))
    panel.tick_params(axis="y", labelsize="small")
    panel.set_xlabel("seconds of a fresh process (second seed: what one more seed adds)")
    legend(figure, [panel])
    return figure


def _colour(case: str, compared: Collection[str]) -> str:
    if case.startswith(tuple(compared)):
        return GREY
    algorithm = case.partition(",")[0]
    return style(algorithm)["color"] if algorithm in algorithms.merges() else _OURS
