"""Interpret the names of methods on a command line by the rows of the registry."""

import ast
import inspect
from typing import Any

from fisherjax.algorithms import METHODS, Distillation, Row, options
from fisherjax.fisher import Dense

STUDENT = "fedov+student"
"""The name of the model that distils FedOV's vote."""


def takes(row: Row) -> set[str]:
    """Return the names of the arguments of a row's factory.

    Example:
        >>> sorted(takes(METHODS["fedprox"]))
        ['mu']
    """
    return set(inspect.signature(row.factory).parameters)


def parts(name: str) -> list[str]:
    """Return the methods of a name, without their options.

    Example:
        >>> parts("fedavg+dense"), parts("fedprox@mu=0.1")
        (['fedavg', 'dense'], ['fedprox'])
    """
    return [part.partition("@")[0] for part in name.split("+")]


def options_in(name: str) -> dict[str, Any]:
    """Return the options in a name NAME@option=value,option=value.

    Example:
        >>> options_in("fedfisher_kfac@damping=0.3,max_examples=500"), options_in("fedavg")
        ({'damping': 0.3, 'max_examples': 500}, {})
    """
    found = {}
    _, at, text = name.partition("@")
    for words in text.split(",") if at else ():
        option, _, value = (part.strip() for part in words.partition("="))
        if option in found:
            raise ValueError(f"--algorithms is {name}, expected {option} only once")
        try:
            found[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"--algorithms is {name}, expected NAME@option=number, also True, False or None"
            ) from None
    return found


def distils(name: str) -> bool:
    """Return whether a method trains its model on the server, on images generated there.

    Example:
        >>> distils("dense"), distils("fedavg"), distils("ensemble")
        (True, False, False)
    """
    return name in METHODS and any(isinstance(x, Distillation) for x in options(name).values())


def merged_first(name: str) -> str:
    """Return the method from whose model NAME+dense starts; other names are returned unchanged.

    Example:
        >>> merged_first("fedavg+dense"), merged_first("dense"), merged_first("fedov+student")
        ('fedavg', 'dense', 'fedov+student')
    """
    first, _, last = name.rpartition("+")
    return first if first and distils(last) else name


def is_vote(name: str) -> bool:
    """Return whether a name is a method whose clients vote, or the student of their vote.

    Example:
        >>> is_vote("fedov"), is_vote(STUDENT), is_vote("fedavg")
        (True, True, False)
    """
    first = name.partition("+")[0]
    return first in METHODS and METHODS[first].gives == "votes"


def is_exchanged(name: str) -> bool:
    """Return whether a name ends in an exchange without training, such as fedavg+ccvr.

    Example:
        >>> is_exchanged("fedavg+ccvr"), is_exchanged("fedavg+dense")
        (True, False)
    """
    last = name.rpartition("+")[2]
    return last in METHODS and "exchange" in METHODS[last].laws


def sends_full_matrices(name: str) -> bool:
    """Return whether clients send matrices of all parameters by all parameters.

    Example:
        >>> sends_full_matrices("fedfisher_full"), sends_full_matrices("fedfisher_sequential")
        (True, False)
    """
    reads = METHODS[name].reads if name in METHODS else None
    return isinstance(reads, dict) and Dense in reads.values()
