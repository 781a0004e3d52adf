"""Define the parts of `experiments.benchmark.accelerator` that start processes of their own.

Switches of the compiler and the state of its cache belong to a process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmark import programs
from experiments.benchmark.accelerator_parts import Numbers

_RUN = ("--dataset", "mnist", "--model", "lenet", "--epochs", "10")
_METHODS = ("fedavg", "fisher_merge", "regmean", "fedfisher_kfac")
_NAMED = 8
# The library compiles what runs a few times without autotuning, unless a level is given here.
_SWITCHES = ("", "--xla_gpu_autotune_level=4", "--xla_gpu_enable_triton_gemm=false")
# K-FAC, diagonals, merges, solvers and rounds have passed on an H100.
_TESTS = (
    *("tests/test_secure_aggregation.py", "tests/test_privacy.py", "tests/test_differentiable.py"),
    *("tests/test_compression.py", "tests/algorithms"),
)


def compile_table(small: bool, limit: float) -> Numbers:
    """Count the programs of tasks, cold and with a warm persistent cache."""
    standard = ("lenet_kfac", "transformer_summaries", "flax_cnn_kfac", "lenet_exchange", "digits")
    end = time.monotonic() + limit
    for task in ("tiny_kfac",) if small else standard:
        yield from _cold_and_warm(task, task, end=end)


def whole_runs(small: bool, limit: float) -> Numbers:
    """Time the standard one-shot run, cold and with a warm persistent cache."""
    end = time.monotonic() + limit
    how = ("--dataset", "digits", "--model", "mlp", "--epochs", "1") if small else _RUN
    with tempfile.TemporaryDirectory() as out:
        more = ("--algorithms", *_METHODS, "--seeds", "0", "--exchanges", "5")
        options = (*how, *(("--algorithms", "fedavg", "--seeds", "0") if small else more))
        # Each process has its own folder, so that the second one does not find results.
        yield from _cold_and_warm("one_shot", "experiments.one_shot", *options, end=end, out=out)


def _cold_and_warm(name: str, *task: str, end: float, out: str | None = None) -> Numbers:
    with tempfile.TemporaryDirectory() as cache:
        for kind in ("cold", "warm"):
            place = () if out is None else ("--out", f"{out}/{kind}")
            yield from _compiled(f"{name}, {kind}", *task, *place, end=end, cache=Path(cache))


def _compiled(name: str, *task: str, end: float, cache: Path | None = None) -> Numbers:
    """Count the programs of a task in a fresh process, which ends at `end` at the latest."""
    left = end - time.monotonic()
    if left <= 0:
        yield name, "not begun: no time was left", ""
        return
    try:
        [found] = programs.in_fresh_process(*task, cache=cache, timeout=left)
    except programs.Failed as error:
        yield name, str(error), ""
        return
    yield f"{name}: programs", found.programs, ""
    yield f"{name}: cache misses", found.missed, ""
    for part in ("tracing", "lowering", "compiling", "waiting", "seconds", "processor"):
        yield f"{name}: {part}", getattr(found, part), "s"
    most = list(found.names.items())[:_NAMED]
    said = (f"{function} ({int(number)}) {seconds:.3g}" for function, (number, seconds) in most)
    yield f"{name}: longest", ", ".join(said), "s"


def switches(small: bool, limit: float) -> Numbers:
    """Measure what compiles, and later calls, under switches of XLA, without a cache."""
    end, before = time.monotonic() + limit, os.environ.get("XLA_FLAGS", "")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    task, more = ("tiny_kfac", ("--small",)) if small else ("lenet_kfac", ())
    for switch in ("",) if small else _SWITCHES:
        os.environ["XLA_FLAGS"] = f"{before} {switch}".strip()
        yield from _compiled(switch or "no switch", task, end=end)
        with tempfile.TemporaryDirectory() as out:
            words = ["--out", out, "--parts", "spread", "--here", *more]
            run = [sys.executable, "-m", "experiments.benchmark.accelerator", *words]
            left = max(end - time.monotonic(), 0)
            try:
                subprocess.run(run, cwd=programs.ROOT, capture_output=True, timeout=left)
            except subprocess.TimeoutExpired:
                return
            for line in Path(out, "numbers.jsonl").read_text().splitlines():
                found = json.loads(line)
                if found["what"] != "environment":
                    yield f"{switch or 'no switch'}: {found['what']}", found["value"], found["unit"]


def tests(small: bool, limit: float) -> Numbers:
    """Run the tests that have not run on an accelerator, with matrix products in full precision."""
    chosen = ("tests/test_tree.py",) if small else _TESTS
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        options = ["-q", "-n", "8", "--dist", "loadfile"]
        options += ["-p", "no:benchmark", "-p", "no:cacheprovider", *chosen]
        with open(said, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options],
                cwd=programs.ROOT,
                env={**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(0.9 * limit)
            except subprocess.TimeoutExpired:
                process.kill()
        lines = said.read_text().strip().splitlines() or ["nothing was printed"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        yield from (("failed", line, "") for line in failed)
        yield ", ".join(chosen), lines[-1], ""


PARTS = {"runs": whole_runs, "compile": compile_table, "switches": switches, "tests": tests}
