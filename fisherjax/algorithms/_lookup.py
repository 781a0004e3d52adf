"""Select, describe and make the methods of the registry by name."""

import inspect
from collections.abc import Iterable, Mapping

from fisherjax._core import checks
from fisherjax.algorithms._rows import Row
from fisherjax.algorithms.base import Algorithm
from fisherjax.algorithms.registry import METHODS
from fisherjax.typing import Model


def merges() -> dict[str, Row]:
    """Return the methods that merge trained models into one, or into models that vote.

    Example:
        >>> list(merges())[:2], "fedper" in merges(), "analytic_head" in merges()
        (['fedavg', 'fisher_merge'], False, False)
    """
    return {
        name: row
        for name, row in METHODS.items()
        if row.gives != "model per client" and "exchange" not in row.laws
    }


def personal() -> dict[str, Row]:
    """Return the methods that make a model for each client.

    Example:
        >>> list(personal())[:3]
        ['single_set', 'fedper', 'fedbn']
    """
    return {name: row for name, row in METHODS.items() if row.gives == "model per client"}


def options(name: str) -> dict[str, object]:
    """Return the keyword options of a method and their defaults.

    Example:
        >>> options("fedprox")
        {'mu': 0.001}
    """
    parameters = _parameters(name).values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def required(name: str) -> tuple[str, ...]:
    """Return the arguments of a method that have no default, besides the model.

    Example:
        >>> required("fedper"), required("regmean")
        (('head',), ())
    """
    parameters = _parameters(name).values()
    needed = (p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
    return tuple(p.name for p in needed if p.name != "model")


def make(name: str, model: Model, **chosen: object) -> Algorithm:
    """Make a method of `METHODS`, the same object for equal arguments.

    The model is ignored if the method does not need it. The keyword arguments are `options` of the
    method, and must include those that are `required`: `head` of FedPer, `shape` of DENSE.

    Raises:
        ValueError: If the name is unknown; the message names the nearest three.
        TypeError: If the method has no such option.

    Example:
        >>> from fisherjax.algorithms import fedprox
        >>> make("fedprox", None, mu=0.1) is fedprox(mu=0.1)
        True
    """
    check_options(name, chosen)
    factory = METHODS[name].factory
    return factory(model, **chosen) if "model" in _parameters(name) else factory(**chosen)


def check_options(name: str, chosen: Iterable[str]) -> None:
    """Raise TypeError if a method does not have one of the options; it names the nearest option.

    Example:
        >>> check_options("fedprox", ["mu"])
    """
    parameters = _parameters(name)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # passed on to another factory, which checks them
    known = sorted(parameters.keys() - {"model"})
    for option in sorted(set(chosen) - set(known)):
        hint = f"Did you mean {checks.nearest(option, known)}? " if known else ""
        raise TypeError(
            f"{name} has no option {option!r}. {hint}algorithms.options({name!r}) returns all "
            "options with their defaults."
        )


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    checks.one_of("algorithm", name, METHODS, "algorithms.METHODS")
    # In the signature of a `partial`, the arguments that it fixes are defaults.
    return inspect.signature(METHODS[name].factory).parameters
