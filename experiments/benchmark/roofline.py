"""Compare phases that were measured on an H100 with the limits of an H100 and of a TPU v5e.

`python -m experiments.benchmark.roofline` counts, for one minibatch of each phase, the FLOPs and
the bytes of its matrix products, and the kernels of its compiled program. Products in the highest
precision have a ceiling of their own. The floor of a phase is the larger of the time of its FLOPs
and the time of its bytes. It needs no accelerator: the ceilings and the times of the H100 are those
that were recorded, the ceilings of the v5e are its maker's. The kernels are those of this machine's
compiler, whose fusions differ from a GPU's: their number is an estimate.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from experiments.benchmark import config, floors, flops, workloads
from experiments.harness import commands, tables

PROGRAM = "experiments.benchmark.roofline"


class Ceiling(NamedTuple):
    """Rates that a device reaches at most."""

    flops: float  # FLOP/s of products in the default precision
    highest: float  # FLOP/s of products in the highest precision
    bytes: float  # bytes/s of its memory


H100 = Ceiling(352e12, 50e12, 2.6e12)
"""Measured: a product of 8192 x 8192 in TF32 and in float32, and a copy of 2 GB."""
V5E = Ceiling(197e12, 197e12 / 6, 819e9)
"""On paper, in bfloat16; the highest precision of a TPU takes six products of bfloat16."""


class Phase(NamedTuple):
    """A phase of which one minibatch is counted, and its recorded seconds on an H100."""

    network: str
    phase: str  # as in `floors.phases`
    clients: int  # clients that train side by side, or that are merged
    batch: int
    seconds: float  # of one minibatch


_NAMES = {"lenet": "LeNet", "cnn": "CNN"}
# Images a second are those of 26 November 2026. Where clients wait for the largest, a step of M
# clients trains M B (1 - idle share) images.
PHASES = (
    Phase("lenet", "training step", 5, 64, 5 * 64 * (1 - 0.36) / 865_000),
    Phase("lenet", "K-FAC minibatch", 1, 64, 64 / 141_000),
    Phase("lenet", "K-FAC minibatch", 1, 512, 512 / 415_000),
    Phase("lenet", "diagonal minibatch", 1, 64, 64 / 46_700),
    Phase("lenet", "diagonal minibatch", 1, 512, 512 / 55_700),
    Phase("lenet", "server's product", 5, 64, 2.9e-3 / 8),
    Phase("cnn", "training step", 20, 64, 20 * 64 * (1 - 0.45) / 234_000),
    Phase("cnn", "K-FAC minibatch", 1, 64, 64 / 55_400),
    Phase("cnn", "K-FAC minibatch", 1, 512, 512 / 82_900),
    Phase("cnn", "diagonal minibatch", 1, 64, 64 / 26_000),
)
_HEADINGS = (
    *("phase", "GFLOP", "of which highest", "MB", "H100: FLOPs, µs", "bytes, µs", "measured, µs"),
    *("over the larger", "kernels", "µs a kernel", "v5e: FLOPs, µs", "bytes, µs"),
)
# Instructions that no kernel computes.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Which networks are counted."""

    networks: tuple[str, ...] = tuple(_NAMES)
    """Networks: lenet and cnn."""


@commands.command(
    PROGRAM,
    __doc__,
    Config,
    lambda asked: commands.check_names(asked, "networks", _NAMES),
    continues=False,
    all_cores=lambda _: False,
)
def main(asked: Config, console: Console) -> None:
    lines = [line(phase) for phase in PHASES if phase.network in asked.networks]
    console.print(tables.markdown(tables.Table("", _HEADINGS, lines)), soft_wrap=True)


def line(phase: Phase) -> list[str]:
    """Count one phase, and compare its time with its floors."""
    function, *given = _program(phase)
    needed = flops.products(function, *given)
    kernels = launches(jax.jit(function).lower(*given).compile().as_text())
    on_h100, on_v5e = seconds(needed, H100), seconds(needed, V5E)
    size = f"batch {phase.batch}" + (f", {phase.clients} clients" if phase.clients > 1 else "")
    size = size if "minibatch" in phase.phase or "step" in phase.phase else "5 clients"
    return [
        f"{phase.phase}, {_NAMES[phase.network]}, {size}",
        *(f"{x:.3g}" for x in (needed.flops / 1e9, needed.highest / 1e9, needed.bytes / 1e6)),
        *(f"{1e6 * x:.3g}" for x in on_h100),
        f"{1e6 * phase.seconds:.0f}",
        f"{phase.seconds / max(on_h100):.1f}",
        f"{kernels:.0f}",
        f"{1e6 * phase.seconds / kernels:.1f}",
        *(f"{1e6 * x:.3g}" for x in on_v5e),
    ]


def seconds(needed: flops.Products, ceiling: Ceiling) -> tuple[float, float]:
    """Return the least times of FLOPs and of bytes.

    Example:
        >>> seconds(flops.Products(6.0, 8.0, highest=2.0), Ceiling(4.0, 1.0, 2.0))
        (3.0, 4.0)
    """
    default = (needed.flops - needed.highest) / ceiling.flops
    return default + needed.highest / ceiling.highest, needed.bytes / ceiling.bytes


def _program(phase: Phase) -> tuple[Callable[..., Any], Any]:
    """Return the function of a phase and its arguments; clients train side by side."""
    made_up = config.Config("train", Path(), data="synthetic")
    work = workloads.workload(made_up, phase.network, phase.batch)
    function, *given = floors.phases(work, phase.clients)[phase.phase]
    if phase.phase == "training step":
        stacked = jax.tree.map(lambda x: jnp.stack([x] * phase.clients), given)
        return jax.vmap(function), *stacked
    return function, *given


def launches(text: str) -> float:
    """Count the kernels that a compiled program starts, from its text.

    The body of a loop counts every round if the text states their number, else once; of a
    condition, the longest branch counts.
    """
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    # Long types have comments with the number of a part.
    for row in re.sub(r"/\*.*?\*/", "", text).splitlines():
        begins = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", row)
        if begins:
            name = begins[2]
            entry = name if begins[1] else entry
            bodies[name] = []
        elif row.startswith(" ") and name:
            bodies[name].append(row)
    return _launches_of(entry, bodies)


def _launches_of(name: str, bodies: dict[str, list[str]]) -> float:
    total = 0.0
    for row in bodies[name]:
        found = re.search(r" = (?:\([^=]*?\)|\S+) ([a-z][\w-]*)\(", row)
        operation = found[1] if found else "parameter"
        called = partial(_launches_of, bodies=bodies)
        if operation == "while":
            rounds = re.search(r'known_trip_count":\{"n":"(\d+)"', row)
            inside = called(_named("body", row)) + called(_named("condition", row))
            total += (int(rounds[1]) if rounds else 1) * inside
        elif operation == "call":
            total += called(_named("to_apply", row))
        elif operation == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", row)
            named = (
                listed[1]
                if listed
                else " ".join(_named(f"{side}_computation", row) for side in ("true", "false"))
            )
            total += max(map(called, re.findall(r"[\w.-]+", named)))
        else:
            total += operation not in _FREE
    return total


def _named(field: str, row: str) -> str:
    return re.search(rf"{field}=%?([\w.-]+)", row)[1]


if __name__ == "__main__":
    raise SystemExit(main())
