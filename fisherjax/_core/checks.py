"""Every check of an argument, once: what was given, what was expected, how to mend it.

Checks look at types, shapes and dtypes, and at values where those are known: under tracing they
pass. Names of arguments come first, so that the messages read alike.
"""

import difflib
import math
import numbers
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax.typing import Array, Examples, Key, Likelihood, Model, Params


def is_traced(*values: Any) -> bool:
    """Say whether any leaf is known to JAX only while a function is traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def count(name: str, value: Any) -> int:
    """Refuse what is not a positive integer; True is none."""
    # NumPy's integers count too. True is an integer to Python, and a mistake here.
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least 1.")
    return int(value)


def number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Refuse what is not a finite number with low <= value < below."""
    if is_traced(value):
        return
    expected = f"{low:g} <= {name} < {below:g}"
    if below == math.inf:
        expected = "a finite number, " + ("zero or more" if low == 0 else f"at least {low:g}")
    # An array of shape () is one number too, as JAX returns them; True is one to Python only.
    is_array = isinstance(value, (np.ndarray, jax.Array)) and not jnp.shape(value)
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_array:
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating))
    if not is_real:
        raise TypeError(f"{name} is {value!r}; expected {expected}.")
    # Python's integers go beyond every floating-point number.
    is_huge = isinstance(value, numbers.Rational) and value > sys.float_info.max
    if is_huge or not low <= value < below:  # negated, because NaN compares false
        raise ValueError(f"{name} is {value}; expected {expected}.")


def positive(name: str, value: Any) -> None:
    """Refuse what is not a number above zero."""
    number(name, value)
    if not is_traced(value) and not value > 0:
        raise ValueError(f"{name} is {value}; expected a positive number.")


def one_of(name: str, value: Any, known: Iterable[Any], where: str = "") -> None:
    """Refuse what is not among known values: name them if they are few, else the nearest three.

    `where` says where there is a list of all of them, for names that are many.
    """
    known = list(known)
    if value in known:
        return
    if not where:
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, known))}.")
    raise ValueError(
        f"{name} is {value!r}; expected one of {len(known)} names. Did you mean "
        f"{nearest(value, known)}? All are in {where}."
    )


def nearest(value: Any, known: Iterable[Any]) -> str:
    """Name the three names that are nearest to a wrong one, the nearest first, whatever the case.

    Example:
        >>> nearest("FedAvgg", ["fedavg", "fedprox", "regmean", "scaffold", "fedper"])
        "'fedavg', 'fedper' or 'fedprox'"
    """
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(str(value).lower(), names, n=3, cutoff=0.0)
    *others, last = [repr(names[name]) for name in found]
    return f"{', '.join(others)} or {last}" if others else last


def instance(name: str, value: Any, kind: type, expected: str) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {kind_of(value)}; expected {expected}.")


def function(name: str, value: Any, example: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; expected a function such as {example}.")


def optimizer(name: str, value: Any) -> None:
    """Refuse what is not an optax optimiser."""
    # By what it can do, not by its type: a wrapper may have a type of its own.
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} is {value!r}; expected an optax optimiser such as optax.sgd(1e-2)."
        )


def key(value: Key) -> None:
    """Refuse old-style keys, several keys, and what is no key."""
    # What jax.random.PRNGKey makes is a plain array of uint32; only typed keys have this dtype.
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"key is {type(value).__name__} {value!r}, not a typed key; use jax.random.key(seed)."
        )
    if value.shape:
        raise ValueError(
            f"key has shape {value.shape}; expected one key. Use jax.vmap, or take one of them."
        )


def model(value: Model) -> None:
    """Refuse what is not a `Model`, or a model of parts that are none."""
    instance("model", value, Model, "fisherjax.Model(apply, likelihood)")
    function("apply", value.apply, "apply(params, inputs) -> outputs")
    if not isinstance(value.likelihood, Likelihood):
        raise TypeError(
            f"likelihood is {value.likelihood!r}; expected one such as likelihoods.categorical."
        )
    if value.apply_train is not None:
        function("apply_train", value.apply_train, "apply_train(params, inputs, key, weights)")
    if value.positions is not None:
        function("positions", value.positions, "lambda tokens: tokens != 0")


def mask(value: Model, params: Params) -> tuple[bool, ...]:
    """Give a model's mask as one True (trained) or False a leaf; refuse one that does not fit."""
    names = tree.names(params)
    if value.mask is None:
        return (True,) * len(names)
    given = tuple(name for name, _ in value.mask)
    # In the same order too, as the mask is zipped with the leaves wherever it is used.
    if given != names:
        raise ValueError(
            f"The mask has leaves {list(given)}; expected a bool for each leaf of {list(names)}."
        )
    leaves = [leaf for _, leaf in value.mask]
    if not all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves) or not any(leaves):
        raise ValueError(
            f"The mask's leaves are {leaves}; expected Python's True or False, at least one True."
        )
    return tuple(map(bool, leaves))


def floating(params: Params, what: str = "params") -> None:
    """Refuse a pytree that has no leaves, or leaves that are no floating-point numbers."""
    if not jax.tree.leaves(params):
        raise ValueError(f"{what} has no leaves; expected a pytree of floating-point arrays.")
    for name, leaf in zip(tree.names(params), jax.tree.leaves(params), strict=True):
        _native(f"Leaf '{name}' of {what}", leaf)
        # Python's numbers have no dtype; the only ones that count are its floats.
        dtype = getattr(leaf, "dtype", None)
        # JAX's check, as NumPy does not count bfloat16 among the floating types.
        if not (type(leaf) is float if dtype is None else jnp.issubdtype(dtype, jnp.floating)):
            given = f"is {kind_of(leaf)}" if dtype is None else f"has dtype {dtype}"
            raise TypeError(
                f"Leaf '{name}' of {what} {given}; expected floating point. Convert it, or keep "
                "what is not trained out of the pytree (close over it in apply)."
            )


def arrays(params: Params, what: str = "params") -> Params:
    """Check params where they come in, and give them with arrays for Python's floats.

    Every function that takes params begins with it, so that a float counts as the array of shape ()
    of JAX's default precision everywhere.

    Example:
        >>> arrays({"scale": 2.0, "w": jnp.ones(2)})["scale"].shape
        ()
    """
    floating(params, what)
    return tree.as_arrays(params)


def stacked(params: Params, num_clients: int, what: str = "the stacked params") -> None:
    """Refuse leaves without a leading axis of clients."""
    for name, shape in tree.shapes(params).items():
        # A slice of the shape, because a scalar has no first axis.
        if shape[:1] != (num_clients,):
            raise ValueError(
                f"Leaf '{name}' of {what} has shape {shape}; expected a leading axis of "
                f"{num_clients} clients. Pass a list to give one pytree for each client."
            )


def examples(value: Examples) -> None:
    """Refuse what are not arrays of fitting lengths."""
    # First each array by itself, then whether they fit together, finally their values.
    instance("examples", value, Examples, "fisherjax.Examples(inputs, targets)")
    for name, x in value._asdict().items():
        if x is not None and not getattr(x, "ndim", 0):
            raise TypeError(f"{name} is {kind_of(x)}; expected an array with an axis of examples.")
        _native(name, x)
    inputs, targets, indices, weights = value
    if inputs is None:
        raise TypeError("inputs is None; expected an array with an axis of examples.")
    if indices is not None and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"indices have dtype {indices.dtype}; expected integers. Turn a mask into rows with "
            "numpy.flatnonzero, or pass it as weights."
        )
    if targets is not None and targets.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"There are {targets.shape[0]} targets for {inputs.shape[0]} inputs; expected as many."
        )
    rows = inputs.shape[0] if indices is None else indices.shape[0]
    if rows == 0 or inputs.shape[0] == 0:
        raise ValueError("The data set is empty; expected at least one example.")
    if weights is not None and weights.shape != (rows,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({rows},), one for each row in use."
        )
    _values("weights", weights, 0, math.inf, "finite numbers, zero or more")
    # JAX clamps a row that is out of range: another example would take its place unseen.
    _values("indices", indices, 0, inputs.shape[0] - 1, f"rows of {inputs.shape[0]} inputs")


def _native(name: str, value: Any) -> None:
    """Refuse what JAX does not hold, of which `tree.native` makes what it can."""
    if tree.native(value, name) is not value:
        raise TypeError(
            f"{name} has dtype {value.dtype.str}, another byte order than this machine's; expected "
            "x.astype(x.dtype.newbyteorder('='))."
        )


def _values(name: str, values: Array | None, low: float, high: float, meaning: str) -> None:
    if values is None or is_traced(values):
        return
    # Two numbers come to the host, not the array.
    smallest, largest = float(values.min()), float(values.max())
    # Negated, because comparisons with NaN are false.
    if not (low <= smallest and largest <= high and largest < math.inf):
        raise ValueError(f"{name} run from {smallest:g} to {largest:g}; expected {meaning}.")


def kind_of(value: Any) -> str:
    article = "an" if type(value).__name__[:1] in "aeiouAEIOU" else "a"
    return f"{article} {type(value).__name__}"
