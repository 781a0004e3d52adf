"""Which rows of the registry tests run, and with what options; no test lists methods by name."""

from collections.abc import Mapping

import pytest

from fisherjax import algorithms, solvers

EXACT = solvers.conjugate_gradients(tolerance=1e-13, max_iterations=500)
MERGED = [
    name
    for name, row in algorithms.merges().items()
    if row.gives == "model" and not algorithms.required(name)
]
"""Every method that merges the models of clients to one of their shapes, of nothing but these."""

_SENT = [algorithms.METHODS[name].sends for name in MERGED]
REPEATS = {name for place, name in enumerate(MERGED) if _SENT[place] in _SENT[:place]}
"""Those that send what an earlier row does: what is sent and how it adds up is tested there."""
SOME_SLOW = [
    pytest.param(name, marks=pytest.mark.slow) if name in REPEATS else name for name in MERGED
]


OF_STATISTICS = {n for n, row in algorithms.METHODS.items() if "normalised channels" in row.sends}
"""Those that need a network with running statistics, which are tested by themselves."""


def laws(name: str) -> tuple[str, ...]:
    """Return the laws that hold for a method."""
    return algorithms.METHODS[name].laws


def reads(name: str) -> dict[str, type]:
    """Return what files read of a method's uploads besides params; {} if they are not merged."""
    found = algorithms.METHODS[name].reads
    return dict(found) if isinstance(found, Mapping) else {}


def is_filed(name: str) -> bool:
    """Return whether files are merged by a method."""
    return isinstance(algorithms.METHODS[name].reads, Mapping)


def exactly(name: str) -> dict[str, object]:
    """Return the options that solve a method's system to the last digits."""
    found = {}
    known = algorithms.options(name)
    if "solver" in known and known["solver"] is None:
        found["solver"] = EXACT
    # A small one, for systems that are singular without.
    if "damping" in known and known["damping"] is None:
        found["damping"] = 0.1
    return found
