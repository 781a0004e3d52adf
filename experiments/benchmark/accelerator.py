"""Measure on one accelerator, within eight minutes, what is not known of it yet.

    python -m experiments.benchmark.accelerator --out DIR --data-dir shared/data
    python -m experiments.benchmark.accelerator --out DIR --small

Parts run in turn, what is least known first, each in its own process with its own limit: one that
hangs or crashes loses only what it had not written. numbers.jsonl gets a line as soon as a number
is known, and table.md is written again after each part. `--small` takes tiny sizes, which prove
the script on a CPU.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.benchmark import accelerator_parts, accelerator_programs, report
from experiments.benchmark.programs import ROOT
from experiments.harness import commands, records, tables

PROGRAM = "experiments.benchmark.accelerator"
NUMBERS, TABLE = "numbers.jsonl", "table.md"
# Seconds of each part, in the order of a run.
LIMITS = {
    **{"runs": 170, "compile": 100, "tf32": 80, "transformer": 90, "solve": 40},
    **{"bfloat16": 60, "switches": 150, "clients": 60, "spread": 60, "tests": 120},
}
# What an H100 and an H200 have not answered.
UNKNOWN = ("runs", "compile", "tf32", "transformer", "solve")
_MEASURE = accelerator_programs.PARTS | accelerator_parts.PARTS
_Parts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PART ...")]
_OUTCOME = "outcome"
_WIDEST = 80


@dataclasses.dataclass(frozen=True)
class Config:
    """Which parts run, and for how long."""

    out: commands.Folder = tyro.MISSING
    """Folder of numbers.jsonl and table.md; numbers are added to those that it holds."""
    parts: _Parts = UNKNOWN
    """Parts to run, in this order; beside these bfloat16, switches, clients, spread, tests."""
    minutes: float = 8.0
    """Minutes after which no part begins and the last one is stopped."""
    small: bool = False
    """Whether all sizes are tiny, for a trial on a CPU."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    here: bool = False
    """Whether the parts run in this process, without a limit."""


def _check(config: Config) -> None:
    commands.check(config, "minutes", "a number above 0", lambda x: x > 0)
    commands.check_list(config, "parts")
    commands.check_names(config, "parts", LIMITS)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False, all_cores=lambda _: False)
def main(asked: Config, console: Console) -> None:
    # JAX would claim most of the memory, which PyTorch and the tests need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if asked.data_dir is not None:
        os.environ["TFDS_DATA_DIR"] = str(asked.data_dir.resolve())
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.here:
        for part in asked.parts:
            _measure(asked, part)
        return
    end = time.monotonic() + 60 * asked.minutes
    for part in asked.parts:
        limit = min(LIMITS[part], end - time.monotonic())
        if limit <= 0:
            _add(asked.out, part, _OUTCOME, "not begun: no time was left", "")
            continue
        console.print(f"{part}, at most {limit:.0f} s")
        start = time.monotonic()
        outcome = _in_own_process(asked, part, limit)
        _add(asked.out, part, _OUTCOME, f"{outcome} after {time.monotonic() - start:.0f} s", "")
        table = _table(asked.out)
        records.write_text(asked.out / TABLE, tables.markdown(table))
        # Lists of names would leave a terminal no room for numbers.
        lines = [line for line in table.lines if line[0] == part and len(line[2]) <= _WIDEST]
        console.print(tables.terminal(table._replace(lines=lines)))
    console.print(f"In {asked.out}/: {NUMBERS}, {TABLE}", soft_wrap=True)


def _in_own_process(asked: Config, part: str, limit: float) -> str:
    """Measure one part, and return how it ended.

    Parts share a persistent compilation cache, because they compile the same programs for LeNet;
    those that measure compiling have caches of their own.
    """
    shared = {"JAX_COMPILATION_CACHE_DIR": str(asked.out.resolve() / "cache")}
    shared["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    words = ["--out", str(asked.out.resolve()), "--parts", part, "--here"]
    command = [sys.executable, "-m", PROGRAM, *words, *["--small"] * asked.small]
    # The part starts processes of its own, which must end with it.
    environment = os.environ | shared
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "stopped"
    return "finished" if status == 0 else f"ended with status {status}"


def _measure(asked: Config, part: str) -> None:
    """Measure one part in this process, and write each number when it is known."""
    for what, value, unit in _MEASURE[part](asked.small, LIMITS[part]):
        _add(asked.out, part, what, value, unit)
    # Asking for the device starts JAX here, which processes of the part must not find occupied.
    _add(asked.out, part, "environment", report.environment(), "")


def _add(out: Path, part: str, what: str, value: Any, unit: str) -> None:
    line = {"part": part, "what": what, "value": value, "unit": unit}
    with open(out / NUMBERS, "a") as file:
        file.write(json.dumps(line) + "\n")


def _table(out: Path) -> tables.Table:
    """Return all numbers that were written, and how each part ended."""
    lines = []
    for text in (out / NUMBERS).read_text().splitlines():
        part, what, value, unit = json.loads(text).values()
        if what == "environment":
            named = ("device", "jax", "python", "processor")
            lines.append((part, "on", ", ".join(str(value[name]) for name in named), ""))
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append((part, what, shown, unit))
    return tables.Table("", ("part", "what", "value", "unit"), lines, text=2)


if __name__ == "__main__":
    raise SystemExit(main())
