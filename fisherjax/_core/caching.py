"""Configuration by value: what is made of equal arguments is the same object.

`jax.jit` recognises a function by its identity. Whoever writes `partial(fisher.sampled,
num_samples=2)` or `fedfisher(model)` inside a loop must not compile again for it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Options = ParamSpec("Options")
Made = TypeVar("Made")


class _Partial(functools.partial):
    """A partial that equals another of the same function and arguments."""

    def _content(self) -> tuple:
        return self.func, self.args, tuple(sorted(self.keywords.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Partial) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


def by_value(value: Any) -> Any:
    """Make a `functools.partial`, and partials inside it, compare by what they hold.

    What is no partial, or holds what cannot be hashed, such as an array, stays as it is.

    Example:
        >>> from functools import partial
        >>> by_value(partial(int, base=2)) == by_value(partial(int, base=2))
        True
    """
    # Not jax.tree_util.Partial, a subclass whose arguments are arrays.
    if type(value) is not functools.partial:
        return value
    keywords = {name: by_value(item) for name, item in value.keywords.items()}
    equivalent = _Partial(value.func, *map(by_value, value.args), **keywords)
    return equivalent if _is_hashable(equivalent) else value


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def cached(factory: Callable[Options, Made]) -> Callable[Options, Made]:
    """Let a factory, which depends on its arguments only, return one object for equal arguments.

    Arguments that cannot be hashed, such as traced numbers, make a new object each time.

    Example:
        >>> make = cached(lambda damping=1.0: [damping])
        >>> make() is make(damping=1.0), make() is make(2.0)
        (True, False)
    """
    signature = inspect.signature(factory)
    # Bounded, because a cached object keeps its model and optimiser alive.
    # By type too: 1, 1.0 and True are equal, and a factory may refuse one of them.
    made = functools.lru_cache(maxsize=256, typed=True)(factory)

    @functools.wraps(factory)
    def make(*args: Options.args, **kwargs: Options.kwargs) -> Made:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return factory(*args, **kwargs)  # raises what Python says of a wrong call
        # What is left out and what is given as the default are the same call.
        bound.apply_defaults()
        bound.arguments = {name: by_value(value) for name, value in bound.arguments.items()}
        if not _is_hashable((bound.args, tuple(bound.kwargs.items()))):
            return factory(*args, **kwargs)
        return made(*bound.args, **bound.kwargs)

    return make


def name_of(value: Any) -> str:
    """Say what a configured function is: its name, and what a partial adds to it.

    Example:
        >>> from functools import partial
        >>> name_of(partial(int, base=2))
        'int(base=2)'
    """
    if not isinstance(value, functools.partial):
        return getattr(value, "__name__", repr(value))
    extras = [name_of(x) for x in value.args]
    extras += [f"{name}={name_of(x)}" for name, x in sorted(value.keywords.items())]
    return f"{name_of(value.func)}({', '.join(extras)})"
