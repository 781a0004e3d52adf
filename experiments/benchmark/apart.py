"""Functions run in a process of their own, so that memory and compilation are their own.

`python -m experiments.benchmark.apart MODULE FUNCTION OPTIONS` prints one line of JSON.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from experiments.benchmark import measure
from experiments.benchmark.measure import Apart, Case, Group, Measurement

_ROOT = Path(__file__).resolve().parents[2]


def call(function: Callable[..., Any], options: dict[str, Any], **environment: str) -> Any:
    """Run a function of a module here in a fresh process.

    Args:
        function: of the options, by name; what it returns is JSON.
        options: what JSON holds.
        environment: variables beside those of this process.

    Returns:
        What the function returned.

    Raises:
        RuntimeError: if it failed; the message holds what it said.
    """
    module, name = function.__module__, function.__name__
    command = [sys.executable, "-m", __name__, module, name, json.dumps(options)]
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{name} failed in its own process:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def case(name: str, function: Callable[..., Any], options: dict[str, Any]) -> Apart:
    """Make a case of a function that ends with `measured`."""

    def run() -> Measurement:
        result = call(function, options)
        return Measurement(Case(name, run, result.pop("units")), **result)

    return Apart(name, run)


def measured(case: Case, repeats: int, budget: float) -> dict[str, Any]:
    """Measure the only case of this process, as JSON holds it."""
    group = Group("", "", None, [case])
    [result] = measure.measure(group, repeats, budget, lambda _: None)
    return {
        "units": case.units,
        "first": result.first,
        "seconds": result.seconds,
        "peak": result.peak,
        "facts": result.facts,
    }


def current_bytes() -> int:
    """Return the memory in use now: of the device, or of the process."""
    statistics = jax.local_devices()[0].memory_stats()
    if jax.default_backend() != "cpu" and statistics:
        return statistics["bytes_in_use"]
    measure.reset_peak()
    return measure.peak_bytes()


def main(module: str, function: str, options: str) -> None:
    """Run the function that the command line names."""
    result = getattr(importlib.import_module(module), function)(**json.loads(options))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
