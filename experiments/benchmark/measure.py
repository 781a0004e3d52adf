"""The one way in which everything is timed: cases in turn, medians, the first call apart."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Row(NamedTuple):
    """One number; a line of results.csv.

    Attributes:
        suite: what was measured.
        workload: what was done by every case of a group.
        case: who did it.
        metric: such as `first_call`, `seconds`, `median`, `speedup`; see `rows`.
        repeat: of `seconds`, from 1; None for others.
        value: the number.
        unit: of the value.
    """

    suite: str
    workload: str
    case: str
    metric: str
    repeat: int | None
    value: float
    unit: str


def peak_bytes() -> int:
    """Return the peak memory: of the device since the start, of the process since `reset_peak`."""
    statistics_ = jax.local_devices()[0].memory_stats()
    if jax.default_backend() != "cpu" and statistics_:
        return statistics_["peak_bytes_in_use"]
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def reset_peak() -> None:
    """Let the peak of the process start anew, where the system can: Linux, but no device."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def no_facts(result: Any) -> dict[str, float]:
    """Report nothing beside times."""
    del result
    return {}


class Case(NamedTuple):
    """One side of a comparison.

    Attributes:
        name: who does it.
        run: does it once, to the end; JAX arrays in its result are waited for.
        units: work of a run, in the group's unit.
        flops: of a run, counted; None where nobody counted.
        precision: of its matrix products, whose peak its FLOP/s are a fraction of.
        times: what the seconds of later calls are multiplied with, for work that is extrapolated.
        facts: of the last result, numbers to stand beside the times.
        peak: reads the peak memory after a run.
    """

    name: str
    run: Callable[[], Any]
    units: float = 1.0
    flops: float | None = None
    precision: str = "default"
    times: float = 1.0
    facts: Callable[[Any], dict[str, float]] = no_facts
    peak: Callable[[], int] = peak_bytes


class Apart(NamedTuple):
    """A case that is measured elsewhere: in a process of its own, or by others before.

    Attributes:
        name: who does it.
        measure: does it.
    """

    name: str
    measure: "Callable[[], Measurement]"


class Group(NamedTuple):
    """Cases that do the same work.

    Attributes:
        workload: the work.
        unit: what it is counted in.
        reference: name of the case that all are compared with; None compares nothing.
        cases: all of them; those apart come first.
        beside: name of the case whose time is the unit of the metric `cost`; None leaves it out.
        compare: of the last results by case, facts by case: how well results agree.
    """

    workload: str
    unit: str
    reference: str | None
    cases: Sequence[Case | Apart]
    beside: str | None = None
    compare: Callable[[dict[str, Any]], dict[str, dict[str, float]]] = lambda _: {}


class Measurement(NamedTuple):
    """What came out for one case.

    Attributes:
        case: which.
        first: seconds of the first call, which compiles.
        seconds: of every later call.
        peak: largest peak memory of those, in bytes; None where nobody looked.
        facts: beside the times.
    """

    case: Case
    first: float
    seconds: list[float]
    peak: int | None
    facts: dict[str, float]

    @property
    def median(self) -> float:
        """The median of the later calls."""
        return statistics.median(self.seconds)

    @property
    def seconds_per_unit(self) -> float:
        """What a unit of work takes."""
        return self.median / self.case.units


def measure(
    group: Group, repeats: int, budget: float, progress: Callable[[str], None]
) -> list[Measurement]:
    """Run the cases of a group in turn, A B A B ..., once to compile and then to be timed.

    Args:
        group: what to run.
        repeats: timed runs of a case.
        budget: seconds after which a case is left out of further turns, timed once at least.
        progress: called with the name of a case before it runs.

    Returns:
        The measurements, in the order of the cases.
    """
    elsewhere = []
    for case in group.cases:
        if isinstance(case, Apart):
            progress(case.name)
            elsewhere.append(case.measure())
    cases = [case for case in group.cases if isinstance(case, Case)]
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    peaks = dict.fromkeys(seconds, 0)
    results: dict[str, Any] = {}
    for turn in range(repeats + 1):
        for case in cases:
            progress(case.name)
            if turn > 1 and sum(seconds[case.name]) > budget:
                continue
            results.pop(case.name, None)
            reset_peak()
            start = time.perf_counter()
            results[case.name] = jax.block_until_ready(case.run())
            seconds[case.name].append(time.perf_counter() - start)
            peaks[case.name] = case.peak() if turn < 2 else max(peaks[case.name], case.peak())
    compared = group.compare(results)
    return elsewhere + [
        Measurement(
            case,
            seconds[case.name][0],
            [case.times * s for s in seconds[case.name][1:]],
            peaks[case.name],
            case.facts(results[case.name]) | compared.get(case.name, {}),
        )
        for case in cases
    ]


def rows(suite: str, group: Group, measurements: Iterable[Measurement]) -> list[Row]:
    """Write measurements as tidy rows.

    Args:
        suite: which.
        group: whose.
        measurements: what `measure` returned.

    Returns:
        One row for each number: `first_call`, `seconds` of each repeat, `median`, `rate` (units of
        work a second), `speedup` (the reference's seconds a unit over this case's), `cost` (this
        case's seconds a unit over those of the case it stands beside),
        `flops_per_second`, `fraction_of_peak` (of the group's matrix product of the same
        precision), `peak_memory`, and the facts.
    """
    measurements = list(measurements)
    named = {m.case.name: m for m in measurements}
    reference, beside = named.get(group.reference), named.get(group.beside)
    peaks = {
        m.case.precision: m.case.flops / m.median
        for m in measurements
        if m.case.name.startswith(MATMUL)
    }
    table = []
    for m in measurements:
        numbers = {"first_call": (m.first, "s"), "median": (m.median, "s")}
        if not m.case.name.startswith(MATMUL):
            numbers["rate"] = (m.case.units / m.median, f"{group.unit}/s")
            if reference is not None:
                ratio = reference.seconds_per_unit / m.seconds_per_unit
                numbers["speedup"] = (ratio, f"x {group.reference}")
            if beside is not None:
                ratio = m.seconds_per_unit / beside.seconds_per_unit
                numbers["cost"] = (ratio, f"x {group.beside}")
            if m.peak is not None:
                numbers["peak_memory"] = (m.peak, "bytes")
        if m.case.flops is not None:
            rate = m.case.flops / m.median
            numbers["flops_per_second"] = (rate, "FLOP/s")
            if m.case.precision in peaks:
                numbers["fraction_of_peak"] = (rate / peaks[m.case.precision], "1")
        numbers |= {name: (value, _unit(name)) for name, value in m.facts.items()}
        where = (suite, group.workload, m.case.name)
        table += [Row(*where, "seconds", i, s, "s") for i, s in enumerate(m.seconds, start=1)]
        table += [Row(*where, name, None, float(v), unit) for name, (v, unit) in numbers.items()]
    return table


def _unit(fact: str) -> str:
    return {"bytes": "bytes", "seconds": "s"}.get(fact.rpartition("_")[2], "1")


MATMUL = "matrix product"
"""How the names of the cases begin that measure the peak."""
