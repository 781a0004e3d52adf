"""Tabulate the cells of an item: those that are compared, and those that were not run."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.harness import papers, tables
from experiments.harness.figures import label
from experiments.papers import items
from experiments.papers.items import Comparison, Item

_LABELS = {"weighted_fedavg_personal_bn": "weighted_fedbn"}
_NAMES = {"beta": "β", "alpha": "α", "classes": "classes a client", "quantization": "s_q"}
_UNITS = {"percent": "points", "count": ""}


def compared(own: Sequence[Comparison], link: Callable[[str], str]) -> tables.Table:
    """Tabulate comparisons; they name their records if there are several."""
    several = len({one.record for one in own}) > 1
    varying = _varying([one.cell for one in own])
    lines = []
    for one in own:
        digits = _digits(one)
        where = one.cell.dataset, setting(one.cell.setting, varying), _label(one.cell.algorithm)
        numbers = _spread(f"{one.ours.value:.{digits}f}", _text(one.ours.spread, digits))
        theirs = _spread(one.cell.value, one.cell.spread)
        difference = f"{one.difference:+.{digits}f}"
        within = {True: "yes", False: "no", None: "-"}[one.within]
        record = [link(one.record)] * several
        lines.append((*where, *record, numbers, theirs, difference, within))
    words = ("data set", "setting", "method", *["record"] * several)
    heading = (*words, "ours", "paper", "difference", "within")
    return tables.Table("", heading, lines, text=len(words))


def absent(
    every: Sequence[papers.Number], own: Sequence[Comparison], item: Item
) -> tables.Table | None:
    """Tabulate the cells without a record; methods that lack the same settings share a line."""
    have, varying = {items.place(one.cell) for one in own}, _varying(every)
    where = [(cell, setting(cell.setting, varying)) for cell in every]
    whole = tables.gathered((cell.dataset, text) for cell, text in where)
    of_method = tables.gathered(
        ((cell.dataset, items.reason(item, cell), cell.algorithm), text)
        for cell, text in where
        if items.place(cell) not in have
    )
    alike = tables.gathered(
        ((dataset, reason, tuple(dict.fromkeys(texts))), (_label(name), len(texts)))
        for (dataset, reason, name), texts in of_method.items()
    )
    lines = []
    for (dataset, reason, texts), methods in alike.items():
        names, numbers = zip(*methods, strict=True)
        those = "all" if {*texts} == {*whole[dataset]} else "; ".join(texts)
        words = (dataset or "-", ", ".join(filter(None, names)) or "-", those, reason)
        lines.append((*words, str(sum(numbers))))
    heading = ("data set", "method", "setting", "why", "cells")
    return tables.Table("", heading, lines, text=4) if lines else None


def far(own: Sequence[Comparison]) -> tuple[str, str]:
    """Return the median absolute difference, and how many comparisons are within."""
    if not own:
        return "-", "-"
    unit = _UNITS.get(own[0].cell.unit, own[0].cell.unit)
    median = _text(statistics.median(abs(x.difference) for x in own), max(map(_digits, own)))
    known = [one.within for one in own if one.within is not None]
    return f"{median} {unit}".strip(), f"{sum(known)} of {len(known)}" if known else "-"


def shared(own: Sequence[Comparison]) -> list[str]:
    """List the settings that all comparisons share with the paper, but for what tables show."""
    keys = [{*one.ours.key.items()} for one in own]
    columns = ("dataset", "algorithm", "metric")
    same = set.intersection(*keys) if keys else set()
    return sorted(setting({name: value}) for name, value in same if name not in columns)


def differing(item: Item, own: Sequence[Comparison]) -> list[str]:
    """List the settings in which records are not as the paper: ours, and the paper's if known."""
    found = []
    for name in dict.fromkeys(name for one in own for name in one.ours.how):
        some = [one for one in own if name in one.ours.how]
        ours = sorted({one.ours.how[name] for one in some}, key=float)
        theirs = sorted({one.cell.setting.get(name) or item.theirs.get(name, "") for one in some})
        known = [value for value in theirs if value]
        if ours != known:
            found.append(f"{name} {', '.join(ours)}" + f" for {', '.join(known)}" * bool(known))
    return found


def distinct(own: Iterable[Comparison]) -> int:
    """Count the cells that have a comparison."""
    return len({items.place(one.cell) for one in own})


def setting(values: Mapping[str, str], names: Iterable[str] | None = None) -> str:
    """Return settings as text, those of some names alone if they are given.

    Example:
        >>> setting({"beta": "0.1", "epochs": "10"}, ["beta"])
        'β 0.1'
    """
    asked = values.keys() if names is None else names
    words = (
        f"{_NAMES.get(name, name.replace('_', ' '))} {value.replace('_', ' ')}"
        for name, value in values.items()
        if name in asked
    )
    return ", ".join(words) or "-"


def _varying(cells: Sequence[papers.Number]) -> set[str]:
    """Return the names of settings that tell cells apart."""
    names = {name for cell in cells for name in cell.setting} - {"partition"}
    return {name for name in names if len({cell.setting.get(name) for cell in cells}) > 1}


def _label(names: str) -> str:
    return ", ".join(label(_LABELS.get(name, name)) for name in names.split("|"))


def _digits(one: Comparison) -> int:
    return len(one.cell.value.partition(".")[2])


def _text(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _spread(value: str, spread: str) -> str:
    return f"{value} ± {spread}" if spread else value
