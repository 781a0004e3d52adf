"""Functions run in a process of their own, so that memory and compilation are their own."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

from experiments.benchmark.config import Config
from experiments.benchmark.measure import Apart, Case, Measurement, alone


def call(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Run a function of a module in a fresh process, with variables beside those of this one."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as process:
        return process.submit(function, *arguments).result()


def case(name: str, function: Callable[..., Any], *arguments: Any) -> Apart:
    """Make a case of a function that ends with `measured`."""

    def run() -> Measurement:
        units, *result = call(function, *arguments)
        return Measurement(Case(name, run, units), *result)

    return Apart(name, run)


def measured(case: Case, config: Config) -> tuple[Any, ...]:
    """Measure the only case of this process; what is returned can go to another one."""
    _, *result = alone(case, config.repeats, config.seconds_per_case)
    return case.units, *result
