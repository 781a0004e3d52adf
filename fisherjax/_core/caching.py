"""Cache factories by the values of their arguments: equal arguments return the same object.

`jax.jit` recognises a function by its identity. With these caches, a loop that writes
`partial(fisher.sampled, num_samples=2)` or `fedfisher(model)` in its body compiles only once.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Options = ParamSpec("Options")
Result = TypeVar("Result")


class _Partial(functools.partial):
    """A `functools.partial` that is equal to another one of the same function and arguments."""

    def _content(self) -> tuple:
        return self.func, self.args, tuple(sorted(self.keywords.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Partial) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())


def by_value(value: Any) -> Any:
    """Return a `functools.partial` that is compared by its function and arguments.

    Partials inside it are treated likewise. A value that is no partial, or a partial with an
    argument that cannot be hashed, such as an array, is returned unchanged.

    Example:
        >>> from functools import partial
        >>> by_value(partial(int, base=2)) == by_value(partial(int, base=2))
        True
    """
    # jax.tree_util.Partial, a subclass, is left alone: its arguments are arrays.
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


def cached(factory: Callable[Options, Result]) -> Callable[Options, Result]:
    """Make a factory return the same object for equal arguments.

    The factory must depend on its arguments only. Arguments that cannot be hashed, such as traced
    numbers, make a new object each time.

    Example:
        >>> make = cached(lambda damping=1.0: [damping])
        >>> make() is make(damping=1.0), make() is make(2.0)
        (True, False)
    """
    signature = inspect.signature(factory)
    # The size is bounded, because a cached object keeps its model and optimiser alive. Types are
    # compared too: 1, 1.0 and True are equal, but a factory may refuse one of them.
    remembered = functools.lru_cache(maxsize=256, typed=True)(factory)

    @functools.wraps(factory)
    def make(*args: Options.args, **kwargs: Options.kwargs) -> Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return factory(*args, **kwargs)  # raises Python's error of a wrong call
        # A call that leaves an argument out equals one that passes its default.
        bound.apply_defaults()
        bound.arguments = {name: by_value(value) for name, value in bound.arguments.items()}
        if not _is_hashable((bound.args, tuple(bound.kwargs.items()))):
            return factory(*args, **kwargs)
        return remembered(*bound.args, **bound.kwargs)

    return make


def name_of(value: Any) -> str:
    """Return the name of a function, with the arguments that a partial adds to it.

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
