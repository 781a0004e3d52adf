"""Count the programs that a task compiles in this process, and the seconds that it compiles.

    python -m experiments.benchmark.programs --seeds 2 digits
    python -m experiments.benchmark.programs experiments.one_shot --dataset digits --model mlp

The first word is a task of `experiments.benchmark.compile_tasks`, or a module, whose options
follow; options of this program come before it. After a task's own output, it prints the number of
programs, the seconds of tracing, lowering and compiling, and the functions that take most of them.
`--seeds 2` runs a task again in the same process with another seed and equal shapes, which should
compile nothing. `--write FILE` writes the numbers as JSON.

`in_fresh_process` does the same for a test or a table.
"""

# Only modules of Python's own: what a task imports belongs to its seconds.
import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = "experiments.benchmark.programs"
ROOT = Path(__file__).resolve().parents[2]
_BEGAN = time.perf_counter()
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_MISS = "/jax/compilation_cache/cache_misses"
_LATE = 1e-4  # seconds by which JAX may report an event after its end
_SHOWN = 15


class Failed(RuntimeError):
    """A task that ended with an error, or took too long."""


class Counts(NamedTuple):
    """What one run of a task compiled.

    An event inside another one, such as the tracing of a function that another one calls, counts
    once, as the inner one. `waiting` is the time during which at least one thread traces, lowers or
    compiles; the three others are sums over threads.
    """

    programs: int  # number of programs, also those that a persistent cache holds
    missed: int  # number of programs that the persistent cache did not hold; 0 without a cache
    seconds: float  # seconds of the whole run; of the first one, since the process began
    tracing: float
    lowering: float
    compiling: float  # includes reading from a persistent cache
    waiting: float
    names: dict[str, list[float]]  # function: its programs, and its seconds of all three
    processor: float = 0.0  # seconds of all processors during the whole run


class Event(NamedTuple):
    """A duration that JAX reported."""

    phase: str
    name: str
    thread: int
    end: float
    seconds: float


class Texts(NamedTuple):
    """The sizes of all programs of a run."""

    operations: int  # of StableHLO, before optimisation
    instructions: int  # of HLO, after optimisation, with those inside fusions
    fusions: int
    products: int  # of two matrices, of different shapes, before optimisation


def listen() -> tuple[list[Event], list[str]]:
    """Return two lists that grow: the compiler's durations, and the misses of a cache."""
    import jax

    events: list[Event] = []
    misses: list[str] = []

    def note(event: str, seconds: float, fun_name: str = "?", **_: Any) -> None:
        if event in PHASES:
            name = re.sub(r"^jit\((.*)\)$", r"\1", fun_name)
            when = threading.get_ident(), time.perf_counter(), seconds
            events.append(Event(PHASES[event], name, *when))

    def note_miss(event: str, **_: Any) -> None:
        if event == _MISS:
            misses.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.monitoring.register_event_listener(note_miss)
    return events, misses


def count(events: Sequence[Event], missed: int, seconds: float, processor: float = 0.0) -> Counts:
    """Add up events, each thread's in the order of their ends.

    Example:
        >>> inner, outer = Event("tracing", "f", 0, 2.0, 1.0), Event("tracing", "g", 0, 3.0, 3.0)
        >>> found = count([inner, outer, Event("compiling", "g", 1, 4.0, 2.0)], 0, 9.0)
        >>> found.programs, found.tracing, found.compiling, found.waiting
        (1, 3.0, 2.0, 4.0)
    """
    totals = dict.fromkeys(PHASES.values(), 0.0)
    names: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    ended: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for event in events:
        start, before, inside = event.end - event.seconds, ended[event.thread], 0.0
        while before and before[-1][0] >= start - _LATE:
            inside += before.pop()[2]
        own = max(event.seconds - inside, 0.0)
        before.append((start, event.end, event.seconds))
        totals[event.phase] += own
        names[event.name][0] += event.phase == "compiling"
        names[event.name][1] += own
    programs = sum(event.phase == "compiling" for event in events)
    spans = [(start, end) for before in ended.values() for start, end, _ in before]
    most = dict(sorted(names.items(), key=lambda item: -item[1][1]))
    return Counts(programs, missed, seconds, *totals.values(), _covered(spans), most, processor)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def in_fresh_process(
    *task: str,
    seeds: int = 1,
    cache: Path | None = None,
    dump: Path | None = None,
    timeout: float | None = None,
) -> list[Counts]:
    """Run a task in a new process, and return what each seed compiled.

    Args:
        *task: The task's name; or the name of a module and its options.
        seeds: Number of runs, with seeds 0, 1, ..., in the same process.
        cache: Folder of a persistent compilation cache that keeps every program; None uses none.
        dump: Folder for the programs' texts, which `texts` counts; they must be in the cache, as
            XLA writes much more of programs that it compiles.
        timeout: Seconds after which the process is killed.

    Raises:
        Failed: If the process ends with an error, with the last lines of its output.
    """
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    kept = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if cache is not None:
        kept = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        kept["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if dump is not None:
        flags = f"--xla_dump_to={dump / 'hlo'} --xla_dump_hlo_as_text"
        kept["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        kept["JAX_DUMP_IR_TO"] = str(dump / "stablehlo")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "counts.json")
        options = ["--seeds", str(seeds), "--write", str(written)]
        run = [sys.executable, "-m", PROGRAM, *options, *task]
        how = {"env": environment | kept, "timeout": timeout, "text": True}
        try:
            done = subprocess.run(run, capture_output=True, check=False, **how)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{task[0]} was not finished after {timeout:.0f} s") from error
        if done.returncode or not written.exists():
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise Failed(f"{task[0]} ended with status {done.returncode}:\n{said}")
        return [Counts(**found) for found in json.loads(written.read_text())]


def texts(dump: Path) -> Texts:
    """Count the operations, instructions and fusions of the programs in a folder of texts."""
    before = [path.read_text() for path in (dump / "stablehlo").glob("*.mlir")]
    after = [path.read_text() for path in (dump / "hlo").glob("*after_optimizations.txt")]
    return Texts(
        sum(len(re.findall(r"^\s*(?:%\S+ = )?\"?stablehlo\.", text, re.M)) for text in before),
        sum(map(instructions, after)),
        sum(len(re.findall(r" fusion\(", text)) for text in after),
        len(set().union(*map(_products, before))),
    )


def instructions(text: str) -> int:
    """Count the instructions of a program of HLO, with those inside fusions."""
    return len(_INSTRUCTION.findall(text))


def _products(text: str) -> set[tuple[str, ...]]:
    """Return the different products of two matrices: a GPU's compiler tries kernels for each.

    Those of a matrix and a vector, where one side has no axis left, it writes as sums.
    """
    found = set()
    for how, left, right in _PRODUCT.findall(text):
        # The left side's axes that both sides have, and those that are summed over.
        taken = sum(axes.count(",") + bool(axes) for axes in _AXES.findall(how)[::2])
        if all(side.count("x") > taken for side in (left, right)):
            found.add((how, left, right))
    return found


_PRODUCT = re.compile(r"dot_general [^,]*, [^,]*, (.*?) : \((tensor<\S+>), (tensor<\S+>)\)")
_AXES = re.compile(r"\[([\d, ]*)\]")


# Parameters and constants take the compiler no time.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?!.* (?:parameter|constant)\()", re.M)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a task and print what it compiled; return 0."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of a module")
    parser.add_argument("--seeds", type=int, default=1, help="runs in this process (default 1)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="JSON file of the numbers")
    asked = parser.parse_args(arguments)
    events, misses = listen()
    found: list[Counts] = []
    start, used = _BEGAN, 0.0
    for seed in range(asked.seeds):
        _run(asked.task, asked.options, seed)
        passed, processor = time.perf_counter() - start, time.process_time() - used
        found.append(count(events, len(misses), passed, processor))
        events.clear()
        misses.clear()
        start, used = time.perf_counter(), time.process_time()
    for seed, counts in enumerate(found):
        _show(asked.task, seed, counts)
    if asked.write:
        asked.write.write_text(json.dumps([counts._asdict() for counts in found]))
    return 0


def _run(task: str, options: Sequence[str], seed: int) -> None:
    from experiments.benchmark.compile_tasks import TASKS

    if task in TASKS:
        TASKS[task].run(seed)
        return
    if "." not in task:
        known = ", ".join(TASKS)
        raise SystemExit(f"{task} is no task. Known: {known}; or the name of a module")
    run_module(task, options)


def run_module(module: str, options: Sequence[str]) -> None:
    """Run a module with options as `python -m` does; raise SystemExit if it ends with an error."""
    sys.argv = [module, *options]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            raise


def _show(task: str, seed: int, counts: Counts) -> None:
    print(f"\n{task}, seed {seed}: {counts.programs} programs, {counts.missed} cache misses")
    parts = ("tracing", "lowering", "compiling", "waiting")
    said = ", ".join(f"{part} {getattr(counts, part):.2f} s" for part in parts)
    print(f"{counts.seconds:.2f} s in all, {counts.processor:.2f} s of processors: {said}")
    for name, (number, seconds) in list(counts.names.items())[:_SHOWN]:
        print(f"  {seconds:7.2f} s  {int(number):4d}  {name}")


if __name__ == "__main__":
    raise SystemExit(main())
