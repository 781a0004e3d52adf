"""Check arguments: every error says what was given, what was expected and how to mend it.

The functions check types, shapes and dtypes. They check values too, but only where these are known:
traced values pass. Most functions take the argument's name first, which begins their messages.
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
from jax.core import Tracer

from fisherjax import tree
from fisherjax._core import batches
from fisherjax._other_libraries import check_keys
from fisherjax.typing import AnyArray, Examples, Key, Likelihood, Model, Params


def is_traced(*values: Any) -> bool:
    """Return whether any leaf is a tracer, whose value is not known yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy; True is a mistake, no integer."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def count(name: str, value: Any, least: int = 1, most: float = math.inf, expected: str = "") -> int:
    """Check that a value is an integer from `least` to `most`, and return it as an int.

    `expected` describes the valid values in the message, by default as "an integer of at least 1".
    """
    if not is_integer(value) or not least <= int(value) <= most:
        expected = expected or f"an integer of at least {least}"
        raise ValueError(f"{name} is {value!r}; expected {expected}.")
    return int(value)


def place(name: str, value: Any, length: int) -> None:
    """Check that a value is an integer from 0 to length - 1; traced values pass."""
    kind = "traced" if is_traced(value) else np.asarray(value).dtype.kind
    if kind != "traced" and not (kind in "iu" and np.ndim(value) == 0 and 0 <= value < length):
        raise IndexError(f"{name} is {value!r}; expected 0 to {length - 1}.")


def number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Check that a value is a finite number with low <= value < below; traced values pass."""
    if is_traced(value):
        return
    expected = f"{low:g} <= {name} < {below:g}"
    if below == math.inf:
        expected = "a finite number, " + ("zero or more" if low == 0 else f"at least {low:g}")
    if not _is_real(value):
        raise TypeError(f"{name} is {value!r}; expected {expected}.")
    known = np.asarray(value) if isinstance(value, jax.Array) else value  # also under `jit`
    if _is_huge(known) or not low <= known < below:  # negated: NaN compares false
        raise ValueError(f"{name} is {value}; expected {expected}.")


def _is_real(value: Any) -> bool:
    # An array of shape (), as JAX returns it, is a number too. True is a number in Python only.
    if isinstance(value, (np.ndarray, jax.Array)) and not jnp.shape(value):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating))
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_huge(value: Any) -> bool:
    # Python's integers can exceed every floating-point number.
    return isinstance(value, numbers.Rational) and not value <= sys.float_info.max


def is_in_host_memory(value: Any) -> bool:
    """Return whether NumPy can read an array without a copy, as it can those of a CPU.

    NumPy then computes small things about it, for which no program has to be compiled.
    """
    if not isinstance(value, jax.Array):
        return isinstance(value, np.ndarray)
    if is_traced(value) or not value.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in value.devices())


def positive(name: str, value: Any) -> None:
    """Check that a value is a number above zero; traced values pass."""
    if is_traced(value):
        return
    expected = "a positive number that is finite"
    if not _is_real(value):
        raise TypeError(f"{name} is {value!r}; expected {expected}.")
    if _is_huge(value) or not 0 < value < math.inf:  # negated: NaN compares false
        raise ValueError(f"{name} is {value}; expected {expected}.")


def one_of(name: str, value: Any, known: Iterable[Any], where: str = "") -> None:
    """Check that a value is one of the known ones.

    The error lists all known values, or the nearest three if `where` names the place of the whole
    list, for lists that are long.
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
    """Return the three names that are nearest to a wrong one, nearest first, ignoring case.

    Example:
        >>> nearest("FedAvgg", ["fedavg", "fedprox", "regmean", "scaffold", "fedper"])
        "'fedavg', 'fedper' or 'fedprox'"
    """
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(str(value).lower(), names, n=3, cutoff=0.0)
    *others, last = [repr(names[name]) for name in found]
    return f"{', '.join(others)} or {last}" if others else last


def instance(name: str, value: Any, kind: type, expected: str) -> None:
    """Check that a value is of this type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {kind_of(value)}; expected {expected}.")


def function(name: str, value: Any, example: str) -> None:
    """Check that a value can be called, and is hashable, as programs are compiled for it."""
    expected = f"expected a function such as {example}"
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; {expected}.")
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} has no hash ({error}); {expected}, arrays in params.") from error


def optimizer(name: str, value: Any) -> None:
    """Check that a value is an optax optimiser."""
    # Its methods are checked, not its type: a wrapper may have a type of its own.
    if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
        raise TypeError(
            f"{name} is {value!r}; expected an optax optimiser such as optax.sgd(1e-2)."
        )


def key(value: Key) -> None:
    """Check that a value is one typed key, as `jax.random.key` makes it."""
    # jax.random.PRNGKey makes a plain array of uint32; only typed keys have this dtype.
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
    """Check that a value is a `Model` and that its fields have the right types."""
    instance("model", value, Model, "fisherjax.Model(apply, likelihood)")
    function("apply", value.apply, "apply(params, inputs) -> outputs")
    if not isinstance(found := value.likelihood, Likelihood):
        raise TypeError(f"likelihood is {found!r}; expected one such as likelihoods.categorical.")
    if value.apply_train is not None:
        function("apply_train", value.apply_train, "apply_train(params, inputs, key, weights)")
    if value.positions is not None:
        function("positions", value.positions, "lambda tokens: tokens != 0")


def mask(value: Model, params: Params) -> tuple[bool, ...]:
    """Return a model's mask as one bool per leaf, True where it is trained; check that it fits."""
    names = tree.names(params)
    if value.mask is None:
        return (True,) * len(names)
    given = tuple(name for name, _ in value.mask)
    # The order must be the same too: users of the mask zip it with the leaves.
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
    """Check that a pytree has leaves, and that all of them are floating-point arrays."""
    if not jax.tree.leaves(params):
        raise ValueError(f"{what} has no leaves; expected a pytree of floating-point arrays.")
    for name, leaf in zip(tree.names(params), jax.tree.leaves(params), strict=True):
        batches.check_native(f"Leaf '{name}' of {what}", leaf)
        # Python's numbers have no dtype; of these only floats are accepted.
        dtype = getattr(leaf, "dtype", None)
        # JAX's function is used, because NumPy does not count bfloat16 as a floating type.
        if not (type(leaf) is float if dtype is None else jnp.issubdtype(dtype, jnp.floating)):
            given = f"is {kind_of(leaf)}" if dtype is None else f"has dtype {dtype}"
            raise TypeError(
                f"Leaf '{name}' of {what} {given}; expected floating point. Convert it, or keep "
                "values that are not trained out of the pytree (close over them in apply)."
            )


def arrays(params: Params, what: str = "params") -> Params:
    """Check params, and return them with Python's floats and foreign arrays turned into arrays.

    Every public function that takes params calls it first, so that a float is an array of shape ()
    and of JAX's default precision everywhere, and a PyTorch tensor one of NumPy.

    Example:
        >>> arrays({"scale": 2.0, "w": jnp.ones(2)})["scale"].shape
        ()
    """
    check_keys(params, what)
    params = tree.as_arrays(params)
    floating(params, what)
    return params


def stacked(params: Params, num_clients: int, what: str = "the stacked params") -> None:
    """Check that every leaf has a leading axis of clients."""
    for name, shape in tree.shapes(params).items():
        if shape[:1] != (num_clients,):  # a scalar has no first axis
            raise ValueError(
                f"Leaf '{name}' of {what} has shape {shape}; expected a leading axis of "
                f"{num_clients} clients. Pass a list to give one pytree for each client."
            )


def examples(value: Examples) -> None:
    """Check that a value is `Examples`, with arrays of fitting lengths and values in range."""
    # First each array is checked by itself, then their lengths, finally their values.
    instance("examples", value, Examples, "fisherjax.Examples(inputs, targets)")
    inputs, targets, indices, weights = value
    arrays_of = batches.named_leaves(inputs) or {"inputs": inputs}
    rest = {"targets": targets, "indices": indices, "weights": weights}
    for name, x in (arrays_of | {k: x for k, x in rest.items() if x is not None}).items():
        if not getattr(x, "ndim", 0):
            given = kind_of(x) if jax.tree.leaves(x) else repr(x)
            raise TypeError(
                f"{name} is {given}; expected an array with an axis of examples, such as "
                "numpy.asarray returns."
            )
        batches.check_native(name, x)
        batches.check_range(x, name)
    number = batches.num_rows(inputs)
    if any(x.shape[0] != number for x in arrays_of.values()):
        raise ValueError(
            f"inputs are {batches.describe(inputs)}; expected as many examples in all of them."
        )
    if indices is not None and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(
            f"indices have dtype {indices.dtype}; expected integers. Turn a mask into rows with "
            "numpy.flatnonzero, or pass it as weights."
        )
    if targets is not None and targets.shape[0] != number:
        raise ValueError(f"There are {len(targets)} targets for {number} inputs; expected as many.")
    rows = number if indices is None else indices.shape[0]
    if rows == 0 or number == 0:
        raise ValueError("The data set is empty; expected at least one example.")
    if weights is not None and weights.shape != (rows,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({rows},), one for each row in use."
        )
    _values("weights", weights, 0, math.inf, "finite numbers, zero or more")
    # JAX clamps a row that is out of range: another example would replace it without an error.
    _values("indices", indices, 0, number - 1, f"rows of {number} inputs")


def _values(name: str, values: AnyArray | None, low: float, high: float, meaning: str) -> None:
    if values is None or is_traced(values):
        return
    # Only two numbers are transferred to the host, not the array.
    smallest, largest = float(values.min()), float(values.max())
    # The condition is negated, because comparisons with NaN are false.
    if not (low <= smallest and largest <= high and largest < math.inf):
        raise ValueError(f"{name} run from {smallest:g} to {largest:g}; expected {meaning}.")


def kind_of(value: Any) -> str:
    """Return the name of a value's type with its article, such as "an int"."""
    article = "an" if type(value).__name__[:1] in "aeiouAEIOU" else "a"
    return f"{article} {type(value).__name__}"
