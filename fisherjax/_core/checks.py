"""Every check of an argument, once: what was given, what was expected, how to mend it.

Checks look at types, shapes and dtypes, and at values where those are known: under tracing they
pass. Names of arguments come first, so that the messages read alike.
"""

import difflib
import math
import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fisherjax import tree
from fisherjax.typing import (
    AnyArray,
    ArrayOrShape,
    Examples,
    Key,
    Likelihood,
    Model,
    Params,
    Positions,
)

IGNORED = -100
"""The class label of a position that has no loss, as PyTorch and Hugging Face write it."""


def is_traced(*values: Any) -> bool:
    """Say whether any leaf is known to JAX only while a function is traced."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


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
    if not _is_real(value):
        raise TypeError(f"{name} is {value!r}; expected {expected}.")
    if _is_huge(value) or not low <= value < below:  # negated, because NaN compares false
        raise ValueError(f"{name} is {value}; expected {expected}.")


def _is_real(value: Any) -> bool:
    # An array of shape () is one number too, as JAX returns them; True is one to Python only.
    if isinstance(value, (np.ndarray, jax.Array)) and not jnp.shape(value):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating))
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_huge(value: Any) -> bool:
    # Python's integers go beyond every floating-point number.
    return isinstance(value, numbers.Rational) and not value <= sys.float_info.max


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
        raise TypeError(f"{name} is {_kind(value)}; expected {expected}.")


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


def positions(value: Positions, inputs: ArrayOrShape) -> Any:
    """Give the shape and dtype of a model's positions; refuse what is no mask [B, T] of 0 and 1."""
    found = _traced("positions", lambda _, x: value(x), None, tree.shape_of(inputs))
    given, batch = getattr(found, "shape", None), inputs.shape[0]
    if given is None or len(given) != 2 or given[0] != batch:
        raise ValueError(
            f"positions returned {_kind(found) if given is None else f'shape {given}'} for inputs "
            f"of shape {tuple(inputs.shape)}; expected [{batch}, T], a number for each position of "
            "each example, as lambda tokens: tokens != 0 returns for tokens [B, T]."
        )
    is_number = any(jnp.issubdtype(found.dtype, x) for x in (jnp.integer, jnp.floating))
    if not is_number and found.dtype != bool:
        raise TypeError(f"positions returned {found.dtype}; expected booleans, or 0 and 1.")
    known = found.dtype != bool and not is_traced(inputs) and hasattr(inputs, "__array__")
    if known:
        with jax.ensure_compile_time_eval():
            mask = jnp.asarray(value(jnp.asarray(inputs)))
            fits = bool(((mask == 0) | (mask == 1)).all())
        if not fits:
            raise ValueError(
                f"positions returned {found.dtype} other than 0 and 1; expected which positions "
                "count, not how much: compare with zero, or pass weights with the examples."
            )
    return found


def are_positions(model: Model, inputs: ArrayOrShape, shape: tuple[int, ...]) -> bool:
    """Decide from shapes whether outputs [B, T, ..., C] are those of positions that are masked.

    Raises:
        ValueError: If outputs are sequences of another length.
    """
    if model.positions is None:
        return False
    length = positions(model.positions, inputs).shape[1]
    if len(shape) < 3:
        return False
    if shape[1] not in (length, 1):
        raise ValueError(
            f"The outputs of an example have shape {tuple(shape[1:])}, a sequence of {shape[1]}, "
            f"but positions says of {length} which count. Let it return [B, {shape[1]}], or let "
            "apply keep the length of its inputs."
        )
    return shape[1] == length


def are_labels(shape: tuple[int, ...], targets: AnyArray) -> bool:
    """Decide from shapes whether targets are class labels, one for each position."""
    # Unsigned numbers cannot be negative.
    is_signed = jnp.issubdtype(targets.dtype, jnp.signedinteger)
    return is_signed and len(shape) > 2 and tuple(targets.shape) == tuple(shape[:-1])


def labels(model: Model, shape: tuple[int, ...], targets: AnyArray) -> AnyArray:
    """Put class 0 for labels that are ignored, so that the others can be checked."""
    if model.positions is None or not are_labels(shape, targets):
        return targets
    return targets * (targets != IGNORED)


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
            given = f"is {_kind(leaf)}" if dtype is None else f"has dtype {dtype}"
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
            raise TypeError(f"{name} is {_kind(x)}; expected an array with an axis of examples.")
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


def outputs(
    model: Model, params: Params, inputs: ArrayOrShape, targets: AnyArray | None = None
) -> Any:
    """Give the outputs' shape and dtype; refuse a network that fails or targets that do not fit."""
    # Shapes only: nothing is computed, however large the data set.
    z = _traced("apply", model.apply, params, tree.shape_of(inputs))
    if getattr(z, "ndim", 0) < 1:
        raise ValueError(f"apply returned {z}; expected outputs [B, C], an array.")
    if model.positions is not None:
        are_positions(model, inputs, z.shape)
    if targets is not None:
        model.likelihood.check(z.shape, labels(model, z.shape, targets))
    return z


def train_outputs(model: Model, params: Params, inputs: ArrayOrShape, batch_size: int) -> None:
    """Trace `apply_train` on a minibatch; refuse it where that fails or does not fit `apply`."""
    if model.apply_train is None:
        return
    # A minibatch, because `apply_train` never sees the whole data set.
    batch = tree.shape_of(inputs, batch_size)
    z = _traced("apply", model.apply, params, batch)
    # The shapes of a key and of weights: nothing is drawn, and nothing runs.
    key = jax.eval_shape(jax.random.key, 0)
    weights = jax.ShapeDtypeStruct((batch_size,), jnp.result_type(float))
    result = _traced("apply_train", model.apply_train, params, batch, key, weights)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"apply_train returned {_kind(result)}; expected a pair (outputs, new), where new is "
            "None or like params."
        )
    given, new = getattr(result[0], "shape", None), result[1]
    if given != z.shape:
        raise ValueError(
            f"apply_train returned outputs of shape {given}; expected {z.shape}, as apply does."
        )
    given, own = ({} if x is None else tree.shapes(x) for x in (new, params))
    # Leaves that it leaves alone may be missing: None stands there.
    places = [len(jax.tree.leaves(x, is_leaf=lambda y: y is None)) for x in (new, params)]
    if not given.items() <= own.items() or (new is not None and places[0] != places[1]):
        raise ValueError(
            f"apply_train returned new leaves {given}; expected None, or those of params, {own}."
        )


def _traced(name: str, function: Callable, params: Params, inputs: Any, *rest: Any) -> Any:
    try:
        return jax.eval_shape(function, params, inputs, *rest)
    # Of any type, as it is the user's function that fails.
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} failed on inputs of shape {inputs.shape} and dtype {inputs.dtype} "
            f"({type(error).__name__}: {said}). Check that the params and the inputs are those of "
            "this network."
        ) from error


def _native(name: str, value: Any) -> None:
    """Refuse what JAX does not hold, of which `tree.native` makes what it can."""
    if tree.native(value, name) is not value:
        raise TypeError(
            f"{name} has dtype {value.dtype.str}, another byte order than this machine's; expected "
            "x.astype(x.dtype.newbyteorder('='))."
        )


def _values(name: str, values: AnyArray | None, low: float, high: float, meaning: str) -> None:
    if values is None or is_traced(values):
        return
    # Two numbers come to the host, not the array.
    smallest, largest = float(values.min()), float(values.max())
    # Negated, because comparisons with NaN are false.
    if not (low <= smallest and largest <= high and largest < math.inf):
        raise ValueError(f"{name} run from {smallest:g} to {largest:g}; expected {meaning}.")


def _kind(value: Any) -> str:
    article = "an" if type(value).__name__[:1] in "aeiouAEIOU" else "a"
    return f"{article} {type(value).__name__}"
