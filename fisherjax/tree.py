"""Name the leaves of pytrees, stack clients, and sum over the client axis."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import _other_libraries
from fisherjax._one_device import on_one_device
from fisherjax.typing import AnyArray, Array

_TOO_WIDE = {"longdouble", "clongdouble", "float96", "float128", "complex192", "complex256"}
ZERO_EXPONENT = -(2**14)
"""The exponent that stands for zero: below that of any float, far inside the range of int32."""


def names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[str, ...]:
    """Return the names of the leaves of a pytree, their paths, in the order of `jax.tree.leaves`.

    Raises:
        ValueError: If two leaves have the same name because a key contains a slash.

    Example:
        >>> names({"dense": {"kernel": 1.0, "bias": 2.0}})
        ('dense/bias', 'dense/kernel')
    """
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    named = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(
            f"Two leaves of the pytree are called '{twice}': a key contains a slash. Rename it."
        )
    return named


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by name.

    Example:
        >>> by_name({"dense": {"kernel": 1.0, "bias": 2.0}})
        {'dense/bias': 2.0, 'dense/kernel': 1.0}
    """
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the leaves by name.

    Example:
        >>> shapes({"w": jnp.ones(3), "b": 1.0})
        {'b': (), 'w': (3,)}
    """
    return dict(zip(names(tree), map(jnp.shape, jax.tree.leaves(tree)), strict=True))


def shape_of(tree: Any, size: int | None = None) -> Any:
    """Return the shapes and dtypes of numbers or arrays in JAX, with `size` rows if given.

    Example:
        >>> import numpy as np
        >>> found = shape_of(np.ones((3, 2)), 5)
        >>> found.shape, found.dtype
        ((5, 2), dtype('float32'))
    """

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape = jnp.shape(x) if size is None else (size, *jnp.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(x))

    return jax.tree.map(one, _other_libraries.as_arrays(tree, "A leaf"))


def as_arrays(tree: Any) -> Any:
    """Return a pytree with arrays in place of Python's floats and of other libraries' arrays.

    Example:
        >>> as_arrays({"scale": 2.0, "w": jnp.ones(2)})["scale"].shape
        ()
    """
    default = jnp.result_type(float)  # else they would be weakly typed, and programs compile again
    tree = _other_libraries.as_arrays(tree, "A leaf")
    return jax.tree.map(lambda x: jnp.asarray(x, default) if type(x) is float else x, tree)


def describe(name: str, tree: Any, *facts: str) -> str:
    """Describe a pytree in one line: facts, numbers of leaves and of entries, and dtypes.

    Leaves may be anything, including tracers and shapes.

    Example:
        >>> describe("Moments", {"w": jnp.ones((1000, 3)), "b": jnp.ones(3)}, "of 2 layers")
        'Moments(of 2 layers, 2 leaves, 3,003 numbers, float32)'
    """
    leaves = jax.tree.leaves(tree)
    size = sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)
    counts = [count(len(leaves), "leaf", "leaves"), count(size, "number")]
    return f"{name}({', '.join([*facts, *counts, *dtypes(leaves)])})"


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 leaf", "2,000 leaves"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def dtypes(leaves: Sequence[Any]) -> list[str]:
    """Return the dtypes of leaves, or the types of leaves without one; at most three of them."""
    found = sorted({str(getattr(x, "dtype", type(x).__name__)) for x in leaves})
    return found if len(found) <= 3 else [*found[:2], f"{len(found) - 2} more dtypes"]


def inner(left: Any, right: Any) -> Array:
    """Compute the inner product <u, v> = sum_leaves sum(u * v) of two pytrees of equal shapes.

    Example:
        >>> print(inner({"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}))
        3.0
    """
    return jnp.asarray(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, left, right))))


def weighted_sum(stacked: Any, weights: Array) -> Any:
    """Sum floating leaves [M, ...] over the clients with weights [M], sum_i w_i x_i.

    Clients of weight zero have no influence if their values are finite. Sums are at least float32,
    because weights in bfloat16 do not add up to one.

    Example:
        >>> print(weighted_sum({"w": jnp.array([[1.0], [3.0]])}, jnp.array([0.5, 0.5]))["w"])
        [2.]
    """

    def leaf(x: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # By default accelerators round the float32 factors of a product.
        return jnp.tensordot(weights.astype(wide), x.astype(wide), 1, precision="highest")

    return jax.tree.map(leaf, stacked)


def is_finite(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Return whether all entries are finite, along `axis` if given.

    Example:
        >>> print(is_finite(jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), axis=1))
        [ True False]
    """
    # Zero times infinity is NaN. XLA compiles a sum ten times as fast as `all`.
    return (x * 0).sum(axis) == 0


def any_nonzero(x: Array) -> Array:
    """Return whether any entry is not zero; NaN counts as not zero.

    Example:
        >>> print(any_nonzero(jnp.array([0.0, jnp.nan])))
        True
    """
    # A maximum compiles faster than `any`, which needs three operations.
    return jnp.abs(x).max(initial=0) != 0


def finite_by_client(stacked: Any) -> Array:
    """Return for every leaf [M, ...] and client whether all entries are finite, [leaves, M].

    Example:
        >>> print(finite_by_client({"w": jnp.array([[1.0], [jnp.nan]])}))
        [[ True False]]
    """
    leaves = jax.tree.leaves(stacked)
    return jnp.stack([is_finite(leaf, tuple(range(1, leaf.ndim))) for leaf in leaves])


def finite_leaves(params: Any) -> Array:
    """Return for every leaf whether all entries are finite, [leaves]."""
    return jnp.stack([is_finite(leaf) for leaf in jax.tree.leaves(params)])


def exponent(x: Array) -> Array:
    """Return the least e with all |entries| below 2^e; `ZERO_EXPONENT` if all are zero.

    Example:
        >>> print(exponent(jnp.array([0.5, -3.0])))
        2
    """
    top = jnp.abs(jax.lax.stop_gradient(x)).max(initial=0)
    return jnp.where(top == 0, ZERO_EXPONENT, jnp.frexp(top)[1])


def power_of_two(x: Array) -> Array:
    """Return the power of two for which the largest |entry| divided by it is between 1 and 2.

    It is 1 if all are zero. Entries divided by it are exact, and their squares do not overflow.
    """
    found = exponent(x)
    return times_power(jnp.ones((), x.dtype), jnp.where(found == ZERO_EXPONENT, 0, found - 1))


def times_power(x: Array, exponent: Array) -> Array:
    """Multiply by 2^exponent, exactly if in range; in two steps, as 2^-127 may be taken for 0."""
    one = jnp.ones((), x.dtype)  # as `ldexp(x, ...)` has no derivative at zero
    return x * jnp.ldexp(one, exponent // 2) * jnp.ldexp(one, exponent - exponent // 2)


def where(chosen: AnyArray, stacked: Any, otherwise: Any = None) -> Any:
    """Return leaves [M, ...] with those of `otherwise`, or zeros, where `chosen` [M] is False.

    Example:
        >>> print(where(jnp.array([True, False]), jnp.array([[1.0], [jnp.nan]])).T)
        [[1. 0.]]
    """
    otherwise = jax.tree.map(jnp.zeros_like, stacked) if otherwise is None else otherwise

    def leaf(x: Array, other: Array) -> Array:
        # `where` is used because zero times NaN is NaN. [M] becomes [M, 1, ..., 1].
        return jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, other)

    return jax.tree.map(leaf, stacked, otherwise)


def to_native(tree: Any, what: str = "the pytree") -> Any:
    """Return arrays in this machine's byte order; check that JAX supports their dtypes.

    Raises:
        TypeError: If a leaf holds text, objects, records, dates, masked entries or longdoubles.

    Example:
        >>> import numpy as np
        >>> to_native({"w": np.ones(1, ">f4")})["w"].dtype
        dtype('float32')
    """

    def one(path: Any, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(dtype, np.dtype):  # such as that of JAX's keys
            return leaf
        is_number = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
        # NumPy counts timedelta64 as an integer.
        masked = " with masked entries" * np.ma.is_masked(leaf)
        if not is_number or dtype.kind == "m" or dtype.name in _TOO_WIDE or masked:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf_of = f"Leaf '{name}' of {what}" if name else what
            raise TypeError(
                f"{leaf_of} has dtype {dtype}{masked}, which JAX does not have; expected numbers "
                "of at most 64 bits: x.astype('float32'), of a masked array x.filled(0), or of "
                "text numpy.unique(x, return_inverse=True)[1]."
            )
        return leaf if dtype.isnative else leaf.astype(dtype.newbyteorder("="))

    return jax.tree_util.tree_map_with_path(one, tree)


def stack(trees: Sequence[Any]) -> Any:
    """Stack M pytrees, one per client, into one with leaves [M, ...], on client 0's device.

    Raises:
        ValueError: If the list is empty, or clients differ in structure, shapes or dtypes.
        TypeError: If a leaf is neither a number nor an array of numbers.

    Example:
        >>> stack([{"w": 1.0}, {"w": 2.0}])["w"].shape
        (2,)
    """
    if not trees:
        raise ValueError("Nothing to stack: got an empty list, expected one pytree per client.")
    trees = [as_arrays(to_native(tree, f"client {client}")) for client, tree in enumerate(trees)]
    # jnp.stack would promote dtypes that differ, and its errors name no client.
    for client, tree in enumerate(trees):
        _check_numbers(tree, client)
        _check_same(trees[0], tree, client)
    return jax.tree.map(lambda *x: jnp.stack([*map(jnp.asarray, x)]), *on_one_device(trees))


def _check_numbers(tree: Any, client: int) -> None:
    for name, leaf in by_name(tree).items():
        # Random keys are arrays too, but NumPy cannot hold them.
        if not (hasattr(leaf, "dtype") or np.asarray(leaf).dtype.kind in "biufc"):
            raise TypeError(
                f"Leaf '{name}' of client {client} is {leaf!r}; expected an array or a number. "
                "Keep anything else out of the pytree (close over it in apply)."
            )


def _check_same(first: Any, tree: Any, client: int) -> None:
    if jax.tree.structure(first) != jax.tree.structure(tree):
        raise ValueError(
            f"Client {client} has another structure than client 0: leaves {list(names(tree))}, "
            f"expected {list(names(first))}. All clients must have trained the same network."
        )
    for name, x, y in zip(names(first), jax.tree.leaves(first), jax.tree.leaves(tree), strict=True):
        # A leaf may be a Python number, which has no attributes shape and dtype.
        expected, given = (jnp.shape(x), jnp.result_type(x)), (jnp.shape(y), jnp.result_type(y))
        if expected != given:
            raise ValueError(
                f"Leaf '{name}' of client {client} has shape {given[0]} and dtype {given[1]}, but "
                f"client 0 has {expected[0]} and {expected[1]}. All clients must train one network."
            )
