"""Make groups of options of the methods' numbers, switches and choices, for command lines."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_origin

from experiments.harness.names import distils, is_vote, parts
from fisherjax import algorithms
from fisherjax.typing import Scalar

_NUMBERS = (int, float, int | None, float | None)
_FLOATS: dict[Any, Any] = {Scalar: float, Scalar | None: float | None}
_OTHERS = {
    "fedov": ("FedOV", (algorithms.open_set, algorithms.voting)),
    "student": ("FedOV's student", (algorithms.distilled,)),
}
"""Groups of options that belong to no factory of a method: their label, and their functions."""


def of_methods() -> dict[str, type]:
    """Make a dataclass of each method's numbers, switches and choices, for a command line."""
    rows = algorithms.merges().items()
    known = {name: row for name, row in rows if not is_vote(name) and "@" not in name}
    made = {name: (row.label, (row.factory,)) for name, row in known.items()}
    groups = {}
    for name, (label, functions) in (made | _OTHERS).items():
        fields, described = [], ""
        for function in functions:
            more, text = _options(function)
            fields, described = fields + more, described + text
        if fields:
            kind = dataclasses.make_dataclass(f"Options_{name}", fields, frozen=True)
            none = "; None takes the value of --distillation" if distils(name) else ""
            # --help describes each option by the docstring of its function.
            kind.__doc__ = f"Options of {label}{none}.\n\nArgs:\n{described}"
            groups[name] = kind
    return groups


def only(groups: Mapping[str, type], methods: Sequence[str]) -> dict[str, type]:
    """Return the groups of methods that are named, such as fedprox@mu=0.1 or fedavg+dense.

    Example:
        >>> list(only(of_methods(), ["fedprox@mu=0.1", "fedavg+dense", "fedov+student"]))
        ['fedprox', 'dense', 'fedov', 'student']
    """
    named = {part for method in methods for part in parts(method)}
    return {name: group for name, group in groups.items() if name in named}


def _is_simple(kind: Any) -> bool:
    return kind in (*_NUMBERS, bool) or get_origin(kind) is Literal


def _options(function: Callable[..., Any]) -> tuple[list[tuple[str, Any, Any]], str]:
    """Return the options of a function, each with its type and default, and their descriptions.

    Options of `Distillation` constants are included if the function takes some; their default,
    None, stands for the value of the constants.
    """
    plain = getattr(function, "func", function)
    kinds = inspect.get_annotations(inspect.unwrap(plain), eval_str=True)
    # A number that may be traced is a float on a command line.
    kinds = {option: _FLOATS.get(kind, kind) for option, kind in kinds.items()}
    # The signature of a `partial` shows what it fixes as defaults.
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    fields = [(o, kinds[o], x) for o, x in defaults.items() if _is_simple(kinds[o])]
    _, _, described = (inspect.getdoc(plain) or "").partition("Args:\n")
    described = described.partition("\n\n")[0] + "\n"
    for constants in defaults.values():
        if isinstance(constants, algorithms.Distillation):
            known = inspect.get_annotations(type(constants), eval_str=True)
            fields += [(o, kind | None, None) for o, kind in known.items() if kind in _NUMBERS]
            _, _, more = (inspect.getdoc(type(constants)) or "").partition("Attributes:\n")
            described += more
    return fields, described
