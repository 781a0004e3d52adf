"""Time cases in turn: the first call is reported separately, and the median of others counts."""

import contextlib
import multiprocessing
import os
import re
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax


def peak_bytes() -> int:
    """Return the peak memory: of the device since the start, of the process since `_reset_peak`."""
    if device := _device_memory():
        return device["peak_bytes_in_use"]
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"^VmHWM:\s*(\d+)", status.read_text(), re.M)[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def current_bytes() -> int:
    """Return the memory in use now: of the device, or of the process."""
    device = _device_memory()
    _reset_peak()
    return device["bytes_in_use"] if device else peak_bytes()


def _reset_peak() -> None:
    """Reset the peak memory of the process; only Linux can, and no device."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _device_memory() -> dict[str, int] | None:
    return None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()


def in_own_process(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Run a function of a module in a new process, with additional environment variables."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as process:
        return process.submit(function, *arguments).result()


class Case(NamedTuple):
    """One side of a comparison."""

    name: str  # name of the side
    run: Callable[[], Any]  # runs once to the end; JAX arrays in its result are waited for
    units: float = 1.0  # work of a run, in the group's unit
    flops: float | None = None  # FLOPs of a run; None if not counted
    precision: str = "default"  # precision of its matrix products, for the fraction of the peak
    times: float = 1.0  # factor of the seconds of later calls, for work that is extrapolated
    facts: Callable[[Any], dict[str, float]] = lambda _: {}  # more numbers of the last result
    compare: Callable[[Any, Any], dict[str, float]] = lambda *_: {}  # with the reference's result
    peak: Callable[[Any], int] = lambda _: peak_bytes()  # peak memory after a run, of its result


class Measurement(NamedTuple):
    """The numbers of one case."""

    name: str
    first: float  # seconds of the first call, which compiles
    seconds: list[float]  # of every later call
    peak: int | None  # largest peak memory of those calls in bytes; None if not measured
    facts: dict[str, float]  # more numbers
    units: float = 1.0  # as in the case, like the following
    flops: float | None = None
    precision: str = "default"

    @property
    def median(self) -> float:
        """The median of the later calls."""
        return statistics.median(self.seconds)


class Apart(NamedTuple):
    """A case that is measured in a separate process, or was measured before."""

    name: str
    measure: Callable[[], Measurement]


class Group(NamedTuple):
    """Cases that do the same work."""

    workload: str  # description of the work
    unit: str  # unit of work
    reference: str | None  # name of the case that all are compared with
    cases: Sequence[Case | Apart]  # cases that are measured elsewhere come first
    beside: str | None = None  # name of the case whose time is the unit of the metric `cost`


def measure(
    group: Group, repeats: int, budget: float, progress: Callable[[str], None] = lambda _: None
) -> list[Measurement]:
    """Run the cases of a group in turn, A B A B ..., once to compile and then to be timed.

    After `budget` seconds a case takes no further turns, but it is timed at least once. `progress`
    is called with the name of a case before it runs.
    """
    measurements, cases = [], []
    for case in group.cases:
        if isinstance(case, Apart):
            progress(case.name)
            measurements.append(case.measure()._replace(name=case.name))
        else:
            cases.append(case)
    seconds: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    results: dict[str, Any] = {}
    for turn in range(repeats + 1):
        for case in cases:
            progress(case.name)
            if turn > 1 and sum(seconds[case.name]) > budget:
                continue
            results.pop(case.name, None)
            _reset_peak()
            start = time.perf_counter()
            results[case.name] = jax.block_until_ready(case.run())
            seconds[case.name].append(time.perf_counter() - start)
            peaks[case.name].append(case.peak(results[case.name]))
    for case in cases:
        result, (first, *later) = results[case.name], seconds[case.name]
        facts = case.facts(result)
        if group.reference in results:
            facts = facts | case.compare(result, results[group.reference])
        timed = first, [case.times * s for s in later], max(peaks[case.name][1:])
        measured = Measurement(case.name, *timed, facts, case.units, case.flops, case.precision)
        measurements.append(measured)
    return measurements


def alone(case: Case, repeats: int, budget: float = float("inf")) -> Measurement:
    """Measure a single case, without a comparison."""
    return measure(Group("", "", None, [case]), repeats, budget)[0]
