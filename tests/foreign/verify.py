"""Run cells, and compare what is compiled with what is not."""

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from tests.foreign import by_hand, programs, reference
from tests.foreign.cells import Cell
from tests.foreign.processes import Finding

BOUNDS = {"float32": 1e-5, "bfloat16": 4 * 2.0**-8}
"""Of the error relative to the largest entry of each array; four units of bfloat16's last place."""
ILL_CONDITIONED = {
    # The ridge of largest evidence is small, and a solve multiplies rounding by the condition of
    # the features' second moment.
    "head of largest evidence": 1e-3,
    # Features are drawn by a root of their covariance, which is singular where a unit never fires:
    # the root of a rounding error is some 3e-4.
    "ccvr": 2e-3,
    # Solves with dampings of 1 and 0.1, and then for how far to go along directions that nearly
    # agree.
    "natural gradient": 1e-2,
}
"""Bounds of quantities that multiply rounding, on versions without any fault as well."""
SMALL = 3
"""Examples up to which a loop of NumPy in float64 takes little time."""


def findings(cell: Cell) -> list[Finding]:
    """Run a cell's program compiled and eagerly, and compare each quantity."""
    try:
        return [
            Finding(cell.name, quantity, error(found, expected), bound(cell, quantity))
            for quantity, found, expected in _pairs(cell)
        ]
    except Exception as stopped:
        if _is_refused_by_jax(cell, stopped):
            return [Finding(cell.name, "refused by JAX", 0.0, 0.0)]
        return [Finding(cell.name, "stopped", float("inf"), 0.0, _last_lines())]


def _is_refused_by_jax(cell: Cell, stopped: Exception) -> bool:
    """Return whether JAX itself cannot run the program.

    Releases 0.7.1 and 0.7.2 cannot map a convolution over examples or clients inside `shard_map`,
    and raise a NotImplementedError without a word, which is the cause of the library's own; an
    error of anybody else has a message.
    """
    is_such = (0, 7, 1) <= jax.__version_info__ <= (0, 7, 2) and cell.devices == "2"
    first = stopped.__cause__ or stopped
    return is_such and type(first) is NotImplementedError and not first.args


def _pairs(cell: Cell) -> list[tuple[str, Any, Any]]:
    case = programs.case(cell)
    mesh = fj.devices.client_mesh() if cell.devices == "2" else None
    found = jax.device_get(programs.run(case._replace(mesh=mesh)))
    # On one device, one operation at a time; of bfloat16 in float32.
    with jax.disable_jit(), _unoptimised():
        expected = by_hand.expected(programs.widened(case))
    pairs = [(name, found[name], expected[name]) for name in found if is_compared(cell, name)]
    if cell.program == "outputs" and cell.dtype == "float32" and int(cell.batch) <= SMALL:
        by_numpy = reference.outputs(cell, case.network.params, case.inputs)
        pairs.append(("outputs, by NumPy", found["outputs"], by_numpy))
    return pairs


@contextlib.contextmanager
def _unoptimised() -> Iterator[None]:
    """Compile single operations without optimisation: in a run of all cells they are thousands."""
    # From where JAX has it, too: some versions do not let it be read.
    before = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def error(found: Any, expected: Any) -> float:
    """Return the largest difference of two pytrees, relative to each array's largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(_error(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs)


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape:
        return float("inf")
    size, difference = np.abs(expected).max(initial=0), np.abs(found - expected).max(initial=0)
    # NaN is no number that anything is close to.
    if not np.isfinite(difference):
        return float("inf")
    return float(difference / size) if size > 0 else float(difference)


def _last_lines() -> str:
    """Describe the error under way, by where it was raised and what it says."""
    return "".join(traceback.format_exc().splitlines(keepends=True)[-4:])


def bound(cell: Cell, quantity: str) -> float:
    """Return how large an error may be."""
    return max(BOUNDS[cell.dtype], ILL_CONDITIONED.get(quantity, 0.0))


def is_compared(cell: Cell, quantity: str) -> bool:
    """Say whether two right programs give nearly the same quantity.

    In bfloat16 gradients do not: they are sums over thousands of positions, which compiled and
    eager programs take in bfloat16 itself and lose the small terms of, each in its own order. The
    exponentials of a softmax round on the way, and derivatives multiply that.
    """
    if cell.dtype == "float32":
        return True
    return quantity != "gradients" and not (cell.pooling == "queries" and quantity == "jvp")
