"""Run cells in child processes, one for each number of devices, with all optimisations."""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.foreign.cells import Cell

ROOT = Path(__file__).resolve().parents[2]
FUSION = "xla_cpu_experimental_ynn_fusion_type"


class Finding(NamedTuple):
    """How far a quantity of a cell is from its reference.

    Attributes:
        cell: The cell's name.
        quantity: Such as "gradients"; "stopped" where the program ended with an error.
        error: The largest difference, relative to the largest entry of its array.
        bound: How large it may be.
        message: The error with which the program stopped.
    """

    cell: str
    quantity: str
    error: float
    bound: float
    message: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound


class Answer(NamedTuple):
    """What was found of a cell, and in how many seconds."""

    cell: str
    seconds: float
    findings: list[Finding]


def run(chosen: list[Cell], at_once: int = 2) -> Iterator[Answer]:
    """Run cells, and yield what is found as it is found; so many child processes at once.

    Raises:
        RuntimeError: If a child process dies.
    """
    groups = [
        [cell.name for cell in chosen if cell.devices == devices]
        for devices in sorted({cell.devices for cell in chosen})
    ]
    answers: queue.Queue[Answer | None] = queue.Queue()

    def work(names: list[str]) -> None:
        try:
            for answer in _run(names, names[0][-1]):
                answers.put(answer)
        finally:
            answers.put(None)

    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(work, names) for names in groups]
        left = len(running)
        while left:
            answer = answers.get()
            left -= answer is None
            if answer is not None:
                yield answer
        for each in running:
            each.result()


def _run(names: list[str], devices: str) -> Iterator[Answer]:
    command = [sys.executable, "-m", "tests.foreign.child"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(devices), **pipes) as child:
        is_done = False
        try:
            child.stdin.write("\n".join(names))
            child.stdin.close()
            for line in child.stdout:
                answer = json.loads(line)
                found = [Finding(*finding) for finding in answer["findings"]]
                yield Answer(answer["cell"], answer["seconds"], found)
            is_done = True
        finally:
            if not is_done:  # an interrupt, or nobody reads on
                child.kill()
    if child.returncode:
        raise RuntimeError(
            f"The process of {devices} device(s) ended with status {child.returncode}."
        )


def environment(devices: str) -> dict[str, str]:
    """Return the environment of a child: its devices, and no optimisation left out."""
    own = {"JAX_NUM_CPU_DEVICES": devices, "JAX_PLATFORMS": "cpu"}
    return os.environ | own | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}


def versions() -> str:
    """Describe what is verified: versions and flags."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax"))
    flags = os.environ.get("XLA_FLAGS", "") or "none"
    return f"{packages}, Python {sys.version.split()[0]}, XLA_FLAGS: {flags}"


def is_affected() -> bool:
    """Whether this version's compiler is wrong about the users' own form, see `cells.Cell`.

    Set, the flag that chooses XLA's fusions on the CPU is taken to leave out the faulty ones.
    """
    number = tuple(int(part) for part in version("jaxlib").split(".")[:3])
    return (0, 10, 2) <= number < (0, 12) and FUSION not in os.environ.get("XLA_FLAGS", "")
