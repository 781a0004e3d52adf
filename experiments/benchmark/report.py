"""What a run leaves: a table on the terminal, results.csv, results.json and plot.png."""

import csv
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from experiments import records
from experiments.benchmark.config import Config
from experiments.benchmark.measure import MATMUL, Row
from experiments.commands import contents

CSV, JSON, PLOT = "results.csv", "results.json", "plot.png"
_SHOWN = {
    "first_call": "first call",
    "median": "median",
    "rate": "rate",
    "speedup": "speed-up",
    "cost": "cost",
    "flops_per_second": "FLOP/s",
    "fraction_of_peak": "of peak",
    "peak_memory": "peak memory",
}


_WIDE = 10  # columns; more metrics become lines


def table(workload: str, rows: Sequence[Row]) -> Table:
    """Lay out one group: a line for each case and a column for each metric, or the other way round.

    Args:
        workload: the group's title.
        rows: of that group.

    Returns:
        The table for the terminal.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric != "seconds"))
    ordered = [m for m in _SHOWN if m in metrics] + [m for m in metrics if m not in _SHOWN]
    units = {row.metric: row.unit for row in rows if row.unit.startswith("x ")}
    laid = Table(title=workload, title_justify="left", caption_justify="left")
    laid.caption = ", ".join(f"{_SHOWN[metric]}: {unit}" for metric, unit in units.items())
    cases = list(dict.fromkeys(row.case for row in rows))
    cells = {(row.case, row.metric): _cell(row) for row in rows}
    shown = {metric: _SHOWN.get(metric, metric.replace("_", " ")) for metric in ordered}
    if len(ordered) > _WIDE:
        laid.add_column("", no_wrap=True)
        for case in cases:
            laid.add_column(case, justify="right")
        for metric, title in shown.items():
            laid.add_row(title, *(cells.get((case, metric), "") for case in cases))
        return laid
    laid.add_column("case", no_wrap=True)
    for title in shown.values():
        laid.add_column(title, justify="right")
    for case in cases:
        laid.add_row(case, *(cells.get((case, metric), "") for metric in ordered))
    return laid


def _cell(row: Row) -> str:
    if row.metric == "fraction_of_peak":
        return f"{row.value:.0%}"
    if row.unit == "bytes":
        return f"{row.value / 2**20:,.0f} MiB"
    if row.unit == "FLOP/s":
        return f"{row.value / 1e9:,.1f} G"
    if row.unit == "s":
        return f"{row.value:.3g} s" if row.value < 100 else f"{row.value:,.0f} s"
    suffix = f" {row.unit}" if row.unit.endswith("/s") else ""
    number = f"{row.value:,.0f}" if row.value >= 1000 else f"{row.value:.3g}"
    return number + suffix


def environment() -> dict[str, Any]:
    """Return the hardware, the versions and the settings that times depend on."""
    known: dict[str, Any] = records.environment()
    for package in ("torch", "nngeometry"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = None
    known["processor"] = _processor()
    if hasattr(os, "sched_getaffinity"):
        known["usable_cpus"] = len(os.sched_getaffinity(0))
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        known["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("XLA_FLAGS", "OMP_NUM_THREADS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
    known["variables"] = {name: os.environ[name] for name in names if name in os.environ}
    known["load_average"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    known["jax_compilation_cache"] = jax.config.jax_compilation_cache_dir
    return known


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def check_out(out: Path) -> None:
    """Refuse a folder that holds results or cannot be written to, before anything is measured.

    Args:
        out: the folder; made if it does not exist.

    Raises:
        ValueError: if it holds results.
        OSError: if it cannot be made or written to.
    """
    if (out / JSON).exists():
        raise ValueError(f"--out {out} holds results already: choose another, or delete it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        records.write_text(out / CSV, ",".join(Row._fields) + "\n")
    except OSError as error:
        raise OSError(f"cannot write to --out {out} ({error}): choose another folder") from error


def write(config: Config, rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Write results.csv and results.json; each changes as a whole or not at all.

    Args:
        config: what was run.
        rows: everything measured so far.
        notes: what the reader must know, such as a peer that is missing.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)
    records.write_text(config.out / CSV, text.getvalue())
    document = {
        "configuration": contents(config),
        "environment": environment(),
        "notes": list(notes),
        "results": [row._asdict() for row in rows if row.metric != "seconds"],
    }
    records.write_text(config.out / JSON, json.dumps(document, indent=2) + "\n")


def workloads(rows: Sequence[Row]) -> list[str]:
    """List the groups that rows belong to, in order."""
    return list(dict.fromkeys(row.workload for row in rows))


def is_peak(row: Row) -> bool:
    """Tell rows that measure the machine from rows that measure a case."""
    return row.case.startswith(MATMUL)
