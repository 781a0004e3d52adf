"""Report a run: a table on the terminal, results.csv and results.json."""

import importlib.metadata
import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.benchmark.config import Config
from experiments.benchmark.measure import Group, Measurement
from experiments.harness import commands, folders, records, tables

CSV, JSON, PLOT = "results.csv", "results.json", "plot.png"
MATMUL = "matrix product"
"""Prefix of the names of cases that measure the peak."""
_VARIABLES = ("XLA_FLAGS", "OMP_NUM_THREADS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_NAMES = {"flops_per_second": "", "rate": "", "fraction_of_peak": "of peak", "peak_memory": "peak"}
_SHARES = ("accuracy", "fraction", "wasted")
# Names of units in a table, and divisors of their values.
_SCALES = {"bytes": ("MiB", 2**20), "FLOP/s": ("GFLOP/s", 1e9), "%": ("%", 0.01), "1": ("", 1)}
_WIDE = 10  # with more metrics than columns, metrics become lines


class Row(NamedTuple):
    """One number; a line of results.csv."""

    suite: str
    workload: str  # the work of all cases of a group
    case: str  # name of the case
    metric: str  # see `rows`
    repeat: int | None  # of `seconds`, from 1
    value: float
    unit: str


def rows(suite: str, group: Group, measurements: Iterable[Measurement]) -> list[Row]:
    """Return measurements as rows, one for each number.

    They are `first_call`, `seconds` of each repeat, `median`, `rate` (units of work a second),
    `speedup` (the reference's seconds a unit over this case's), `cost` (this case's seconds a unit
    over those of the case it stands beside), `flops_per_second`, `fraction_of_peak` (of the group's
    matrix product of the same precision), `peak_memory`, and the facts.
    """
    named = {m.name: m for m in measurements}
    rates = {name: m.units / m.median for name, m in named.items()}
    products = {name: m for name, m in named.items() if name.startswith(MATMUL)}
    peaks = {m.precision: m.flops / m.median for m in products.values()}
    found = []
    for name, m in named.items():
        numbers = {"first_call": (m.first, "s"), "median": (m.median, "s")}
        if name not in products:
            numbers["rate"] = rates[name], f"{group.unit}/s"
            if group.reference in rates:
                numbers["speedup"] = rates[name] / rates[group.reference], f"x {group.reference}"
            if group.beside in rates:
                numbers["cost"] = rates[group.beside] / rates[name], f"x {group.beside}"
            if m.peak is not None:
                numbers["peak_memory"] = m.peak, "bytes"
        if m.flops is not None:
            rate = m.flops / m.median
            numbers["flops_per_second"] = rate, "FLOP/s"
            if m.precision in peaks:
                numbers["fraction_of_peak"] = rate / peaks[m.precision], "1"
        units = {"bytes": "bytes", "seconds": "s"}
        numbers |= {k: (x, units.get(k.rpartition("_")[2], "1")) for k, x in m.facts.items()}
        where = suite, group.workload, name
        found += [Row(*where, "seconds", i, s, "s") for i, s in enumerate(m.seconds, start=1)]
        found += [Row(*where, k, None, float(value), unit) for k, (value, unit) in numbers.items()]
    return found


def numbers(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Gather the numbers of every group's cases by metric."""
    groups: Any = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        groups[row.workload][row.case][row.metric] = row.value
    return groups


def table(rows: Sequence[Row]) -> tables.Table:
    """Return the table of a group, with a line for each case, or for each metric if many."""
    [(workload, cases)] = numbers(rows).items()
    units = {row.metric: row.unit for row in rows if row.metric != "seconds"}
    columns = [("", *cases)]
    for metric, unit in units.items():
        name, size = _SCALES.get("%" if metric.startswith(_SHARES) else unit, (unit, 1))
        plain = metric.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")
        words = _NAMES.get(metric, plain), "" if unit.startswith("x ") else name
        values = [own[metric] / size if metric in own else None for own in cases.values()]
        columns.append((", ".join(filter(None, words)), *map(_text, values)))
    headings, *lines = columns if len(units) > _WIDE else zip(*columns, strict=True)
    compared = [f"{metric}: {unit}" for metric, unit in units.items() if unit.startswith("x ")]
    return tables.Table("; ".join([workload, *compared]), headings, lines)


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def environment() -> dict[str, Any]:
    """Return the hardware, the versions and the settings that times depend on."""
    known = folders.environment()
    for package in ("torch", "nngeometry"):
        found = importlib.metadata.distributions(name=package)
        known[package] = next((one.version for one in found), None)
    cpuinfo = Path("/proc/cpuinfo")
    named = cpuinfo.exists() and re.search(r"^model name\s*: *(.+)$", cpuinfo.read_text(), re.M)
    known["processor"] = named[1].strip() if named else platform.processor() or platform.machine()
    if hasattr(os, "sched_getaffinity"):
        known["usable_cpus"] = len(os.sched_getaffinity(0))
    if "SC_PHYS_PAGES" in os.sysconf_names:
        known["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    known["variables"] = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    known["load_average"] = os.getloadavg()[0]
    known["jax_compilation_cache"] = jax.config.jax_compilation_cache_dir
    return known


def write(config: Config, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Write results.csv and results.json; notes are remarks that readers of the run need."""
    records.write_rows(config.out / CSV, rows, Row._fields)
    document = {
        "configuration": commands.contents(config),
        "environment": environment(),
        "notes": list(notes),
        "results": [row._asdict() for row in rows if row.metric != "seconds"],
    }
    records.write_text(config.out / JSON, json.dumps(document, indent=2) + "\n")
