"""The figure of a run: bars of every case's time, group by group, or curves of growth."""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from experiments.benchmark.report import MATMUL, Row
from experiments.harness.figures import GREY, GRID, INK, canvas, legend, style
from fisherjax.algorithms import TABLE

_OURS = "#0b4f8a"
_CURVES = ((_OURS, "o", "-"), ("#d98200", "s", "--"), (INK, "^", ":"), ("#57b894", "D", "-."))
_GROWING = {
    "seconds": lambda case: case["median"],
    "ms a step, or an upload": lambda case: 1e3 / case["rate"],
    "peak memory, MiB": lambda case: case["peak_memory"] / 2**20,
}
_ALIKE = 4  # so many times as long, panels still share an axis


def bars(rows: Sequence[Row]) -> Any:
    """Draw the median of each case, with how many times as fast as the reference it is."""
    cases = {place: case for place, case in _cases(rows).items() if not place[1].startswith(MATMUL)}
    compared = {row.unit.removeprefix("x ") for row in rows if row.unit.startswith("x ")}
    titles = list(dict.fromkeys(title for title, _ in cases))
    counts = [sum(title == own for own, _ in cases) for title in titles]
    longest = [max(c["median"] for (own, _), c in cases.items() if own == t) for t in titles]
    shared = max(longest) < _ALIKE * min(longest)
    height = 0.5 + sum(0.55 + 0.3 * count for count in counts)
    figure, grid = canvas(
        9.0, height, rows=len(titles), squeeze=False, sharex=shared, height_ratios=counts
    )
    for panel, title, most in zip(grid[:, 0], titles, longest, strict=True):
        own = {name: case for (of, name), case in cases.items() if of == title}
        colours = [_colour(name, compared) for name in own]
        seconds = [case["median"] for case in own.values()]
        ratios = [f"  ({c['speedup']:.3g} x)" if "speedup" in c else "" for c in own.values()]
        labels = [f"{x:.3g} s{ratio}" for x, ratio in zip(seconds, ratios, strict=True)]
        drawn = panel.barh(list(own), seconds, color=colours)
        panel.bar_label(drawn, labels, padding=4, fontsize="small")
        panel.invert_yaxis()
        panel.set_xlim(right=1.4 * (max(longest) if shared else most))
        panel.set_title(title, fontsize="medium", loc="left")
    references = sorted({row.unit.removeprefix("x ") for row in rows if row.metric == "speedup"})
    explained = f"; in brackets how many times as fast as {', '.join(references)}"
    figure.supxlabel(f"seconds, median{explained if references else ''}", fontsize="medium")
    return figure


def growth(rows: Sequence[Row]) -> Any:
    """Draw time, time for a step or upload, and peak memory over their numbers."""
    curves: dict[tuple[str, str], list[dict[str, float]]] = {}
    for (title, _), case in _cases(rows).items():
        over = "clients" if "clients" in case else "uploads"
        curves.setdefault((over, title), []).append(case)
    across = list(dict.fromkeys(over for over, _ in curves))
    size = 1.0 + 4.5 * len(across), 0.5 + 2.4 * len(_GROWING)
    figure, grid = canvas(
        *size, len(across), len(_GROWING), squeeze=False, sharex="col", sharey="row"
    )
    for ((over, title), cases), look in zip(curves.items(), itertools.cycle(_CURVES), strict=False):
        how = dict(zip(("color", "marker", "linestyle"), look, strict=True), markersize=5)
        cases.sort(key=lambda case, over=over: case[over])
        for panel, value in zip(grid[:, across.index(over)], _GROWING.values(), strict=True):
            panel.plot([case[over] for case in cases], list(map(value, cases)), label=title, **how)
    for panel in grid.ravel():
        panel.set(xscale="log", yscale="log")
        panel.grid(color=GRID, linewidth=0.8)
    for panel, label in zip(grid[:, 0], _GROWING, strict=True):
        panel.set_ylabel(label)
    for panel, label in zip(grid[-1], across, strict=True):
        panel.set(xlabel=label, yscale="linear", ylim=(0, None))
    legend(figure, grid.ravel(), columns=2)
    return figure


def _cases(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Gather the numbers of each case by metric."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cases.setdefault((row.workload, row.case), {})[row.metric] = row.value
    return cases


def _colour(case: str, compared: Collection[str]) -> str:
    if case.startswith(tuple(compared)):
        return GREY
    algorithm = case.partition(",")[0]
    return style(algorithm)["color"] if algorithm in TABLE else _OURS
