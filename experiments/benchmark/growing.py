"""Measure how summaries and merges grow with the number of clients, of parameters and of layers.

Each size has its own process: the first call compiles, and the median of the others counts. Seconds
of processors are those of all threads, which other work on the machine disturbs less.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

import fisherjax as fj
from experiments.benchmark import measure, programs
from experiments.benchmark.compile_networks import Blocks
from experiments.benchmark.compile_tasks import Subject, clients_of, made_up, merged
from experiments.benchmark.config import Config
from experiments.benchmark.report import Row, numbers
from experiments.harness import tables

DIAGONAL, KFAC = "fedfisher_diag", "fedfisher_kfac"
# Larger ones are left out: the width for K-FAC, whose merge takes width^3, and blocks that are
# compiled one by one.
_MOST_WIDTH, _MOST_UNROLLED = 1_200, 24


def _of_clients(number: int) -> Subject:
    return Subject(fj.networks.MLP((32,)), (4, 4, 1), number)


def _of_width(width: int) -> Subject:
    return Subject(fj.networks.MLP((width, width)), (8, 8, 1), 2)


def _of_blocks(scan: bool, number: int) -> Subject:
    return Subject(Blocks(number, scan), (4, 4, 3), 2)


def groups(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each quantity that grows and each method, a case for each size."""
    note("Summaries and merge of clients of 16 examples, by one call; memory is beside `before`.")
    narrow = [width for width in config.widths if width <= _MOST_WIDTH]
    few = [number for number in config.layers if number <= _MOST_UNROLLED]
    scanned, unrolled = partial(_of_blocks, True), partial(_of_blocks, False)
    for over, what, method, make, sizes in [
        ("clients", "an MLP of 32 units", DIAGONAL, _of_clients, config.num_clients),
        ("clients", "an MLP of 32 units", KFAC, _of_clients, config.num_clients),
        ("parameters", "MLPs of two layers", DIAGONAL, _of_width, config.widths),
        ("parameters", "MLPs of two layers", KFAC, _of_width, narrow),
        ("layers", "blocks that are scanned", KFAC, scanned, config.layers),
        ("layers", "blocks that are unrolled", KFAC, unrolled, few),
    ]:
        run = partial(measure.in_own_process, _measured, config, over, method, make)
        cases = [measure.Apart(f"{size}", partial(run, size)) for size in sizes]
        if cases and over in config.over:
            yield measure.Group(f"{over}: {method}, {what}", "runs", None, cases)


def _measured(
    config: Config, over: str, method: str, make: Callable[[int], Subject], size: int
) -> measure.Measurement:
    """Summarise and merge the clients of one size, in this process."""
    subject = make(size)
    _, params, federation = clients_of(subject)
    trained = jax.device_put(made_up(subject, seed=0))
    jax.block_until_ready((trained, federation))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    before, (events, _) = _instructions(), programs.listen()
    grown = parameters if over == "parameters" else size
    known = {over: grown, "before_bytes": measure.current_bytes()}
    used: list[float] = []

    def run() -> object:
        start = time.process_time()
        found = merged(subject, method, trained, 0)
        used.append(time.process_time() - start)
        return found

    def facts(_: object) -> dict[str, float]:
        counts = programs.count(events, 0, 0.0)
        compiled = {"programs": counts.programs, "instructions": _instructions() - before}
        later = statistics.median(used[1:])
        return known | compiled | {"first_processor_seconds": used[0], "processor_seconds": later}

    case = measure.Case("", run, facts=facts)
    return measure.alone(case, config.repeats, config.seconds_per_case)


def _instructions() -> int:
    """Return the number of instructions of all programs of this process, after optimisation."""
    live = jax.devices()[0].client.live_executables()
    return sum(programs.instructions(m.to_string()) for one in live for m in one.hlo_modules())


VALUES: dict[str, Callable[[dict[str, float]], float]] = {
    "processors, s": lambda case: case["processor_seconds"],
    "processors, first call, s": lambda case: case["first_processor_seconds"],
    "programs": lambda case: case["programs"],
    "instructions": lambda case: case["instructions"],
    "peak memory, MiB": lambda case: (case["peak_memory"] - case["before_bytes"]) / 2**20,
}
"""What is drawn and fitted over the size, from the numbers of a case."""


def summary(rows: Sequence[Row]) -> tables.Table:
    """Return the exponents of power laws: over all sizes, and between the two largest."""
    lines = []
    for title, cases in numbers(rows).items():
        sizes = [case[title.partition(":")[0]] for case in cases.values()]
        fitted = [exponents(sizes, list(map(value, cases.values()))) for value in VALUES.values()]
        # Zero is added, as an exponent of -0.00 is one of 0.00.
        shown = [[f"{round(exponent, 2) + 0.0:.2f}" for exponent in pair] for pair in fitted]
        lines.append([title, *(f"{whole} ({end})" for whole, end in shown)])
    return tables.Table("", ["", *VALUES], lines)


def exponents(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Fit values = c sizes^e; return e over all sizes, and between the two largest.

    Example:
        >>> [round(e, 3) for e in exponents([1, 10, 100], [2, 20, 2000])]
        [1.5, 2.0]
    """
    # A peak may be no higher than the memory before.
    x, y = np.log(sizes), np.log(np.maximum(values, 1e-3))
    if len(x) == 1:
        return float("nan"), float("nan")
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))
