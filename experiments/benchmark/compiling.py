"""Count the programs of standard tasks, and time compiling beside the work, in fresh processes.

Each task runs in two processes. The first one has an empty persistent cache; what it compiles
fills the cache. The second one reads the cache and runs the task with two seeds. It also writes the
programs' texts, whose operations are counted: that takes less than the noise of its seconds.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from experiments.benchmark import programs
from experiments.benchmark.compile_tasks import TASKS
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Apart, Group, Measurement
from experiments.benchmark.report import Row, numbers
from experiments.harness import tables

COLD, WARM, AGAIN = "cold", "warm cache", "second seed"
PARTS = ("tracing", "lowering", "compiling")


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Yield a group for each task: a cold process, one with a warm cache, and a second seed there.

    The facts are the numbers of `programs.Counts`, and of `programs.Texts` for the second process.
    """
    if config.data_dir is not None:
        os.environ["TFDS_DATA_DIR"] = str(config.data_dir)
    note("Seconds vary with the load of the machine; programs and operations do not.")
    for name in config.tasks:
        note(f"{name}: {TASKS[name].what}")
        with tempfile.TemporaryDirectory() as folder:
            yield Group(name, "runs", None, _cases(name, Path(folder), config.task_seconds))


def _cases(name: str, folder: Path, seconds: float) -> list[Apart]:
    """Return the runs of a task, which must be measured in their order."""
    run = partial(programs.in_fresh_process, name, cache=folder / "cache", timeout=seconds)
    dump = folder / "dump"
    both = cache(partial(run, seeds=2, dump=dump))
    return [
        Apart(COLD, lambda: measurement(*run())),
        Apart(WARM, lambda: measurement(both()[0], programs.texts(dump))),
        Apart(AGAIN, lambda: measurement(both()[1])),
    ]


def measurement(counts: programs.Counts, texts: programs.Texts | None = None) -> Measurement:
    """Return counts as the facts of a measurement of one run."""
    facts = {"programs": counts.programs, "cache_misses": counts.missed}
    facts |= {} if texts is None else texts._asdict()
    facts |= {f"{part}_seconds": getattr(counts, part) for part in (*PARTS, "waiting")}
    facts["other_seconds"] = counts.seconds - counts.waiting
    return Measurement("", counts.seconds, [counts.seconds], None, facts)


def summary(rows: Sequence[Row]) -> tables.Table:
    """Return one table of all tasks, each a line."""
    lines = []
    for task, cases in numbers(rows).items():
        cold, warm, again = (cases[case] for case in (COLD, WARM, AGAIN))
        # Older records do not count products.
        sizes = [warm.get(name, math.nan) for name in programs.Texts._fields]
        seconds = [cold[f"{part}_seconds"] for part in (*PARTS, "other")]
        seconds += [warm["waiting_seconds"], warm["other_seconds"], again["median"]]
        whole = [cold["programs"], *sizes, warm["cache_misses"], again["programs"]]
        lines.append([task, *(f"{x:,.0f}" for x in whole), *(f"{x:.1f}" for x in seconds)])
    headings = (
        *("task", "programs", "operations", "instructions", "fusions", "products"),
        *("missed when warm", "programs of a second seed", "tracing, s", "lowering, s"),
        *("compiling, s", "other, s", "warm: compiler, s", "warm: other, s", "second seed, s"),
    )
    return tables.Table("", headings, lines)
