"""Pytree algebra: names of leaves, stacking clients, weighted sums over the client axis."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax.typing import AnyArray, Array

_TOO_WIDE = {"longdouble", "clongdouble", "float96", "float128", "complex192", "complex256"}
NOTHING = -(2**14)
"""The exponent of zero: below that of any float, and far from the range of integers."""


def names(tree: Any) -> tuple[str, ...]:
    """Name the leaves of a pytree by their paths, in the order of `jax.tree.leaves`.

    Raises:
        ValueError: If two leaves have one name, because a key holds a slash.

    Example:
        >>> names({"dense": {"kernel": 1.0, "bias": 2.0}})
        ('dense/bias', 'dense/kernel')
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)
    if len(set(named)) < len(named):
        twice = next(name for name in named if named.count(name) > 1)
        raise ValueError(
            f"Two leaves of the pytree are called '{twice}': a key holds a slash. Rename that key."
        )
    return named


def by_name(tree: Any) -> dict[str, Any]:
    """Give the leaves of a pytree by name.

    Example:
        >>> by_name({"dense": {"kernel": 1.0, "bias": 2.0}})
        {'dense/bias': 2.0, 'dense/kernel': 1.0}
    """
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Give the shapes of the leaves by name.

    Example:
        >>> shapes({"w": jnp.ones(3), "b": 1.0})
        {'b': (), 'w': (3,)}
    """
    return dict(zip(names(tree), map(jnp.shape, jax.tree.leaves(tree)), strict=True))


def shape_of(x: Any, size: int | None = None) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that JAX gives a number or an array; of `size` rows, if given.

    Example:
        >>> import numpy as np
        >>> found = shape_of(np.ones((3, 2)), 5)
        >>> found.shape, found.dtype
        ((5, 2), dtype('float32'))
    """
    shape = jnp.shape(x) if size is None else (size, *jnp.shape(x)[1:])
    return jax.ShapeDtypeStruct(shape, jnp.result_type(x))


def as_arrays(tree: Any) -> Any:
    """Give arrays of shape () for Python's floats; other leaves stay as they are.

    Example:
        >>> as_arrays({"scale": 2.0, "w": jnp.ones(2)})["scale"].shape
        ()
    """
    # With a dtype, or they would be weakly typed: another program than that of an array.
    default = jnp.result_type(float)
    return jax.tree.map(
        lambda x: jnp.asarray(x, default) if type(x) is float else x,
        tree,
    )


def line(name: str, tree: Any, *facts: str) -> str:
    """Describe a pytree in one line: facts, how many leaves and numbers it has, of which dtypes.

    Leaves may be anything, tracers and bare shapes included.

    Example:
        >>> line("Moments", {"w": jnp.ones((1000, 3)), "b": jnp.ones(3)}, "of 2 layers")
        'Moments(of 2 layers, 2 leaves, 3,003 numbers, float32)'
    """
    leaves = jax.tree.leaves(tree)
    size = sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)
    counts = [count(len(leaves), "leaf", "leaves"), count(size, "number")]
    return f"{name}({', '.join([*facts, *counts, *dtypes(leaves)])})"


def count(number: int, one: str, many: str | None = None) -> str:
    """Write a number of things in words: "1 leaf", "2,000 leaves"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def dtypes(leaves: Sequence[Any]) -> list[str]:
    """List the dtypes of leaves, of what is no array its type, at most three of them."""
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

    Clients of weight zero have no influence, whatever finite values they hold. The sums are in at
    least float32: weights rounded to bfloat16 no longer add up to one, nor do their terms.

    Example:
        >>> print(weighted_sum({"w": jnp.array([[1.0], [3.0]])}, jnp.array([0.5, 0.5]))["w"])
        [2.]
    """

    def leaf(x: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # Unless they are told otherwise, accelerators round float32 factors of a product.
        return jnp.tensordot(weights.astype(wide), x.astype(wide), 1, precision="highest")

    return jax.tree.map(leaf, stacked)


def is_finite(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Say whether all entries are finite.

    Example:
        >>> print(is_finite(jnp.array([[1.0, 2.0], [jnp.inf, jnp.nan]]), axis=1))
        [ True False]
    """
    # Zero times infinity is NaN. XLA takes ten times as long to compile `all` as a sum.
    return (x * 0).sum(axis) == 0


def any_nonzero(x: Array) -> Array:
    """Say whether any entry is not zero; NaN is not.

    Example:
        >>> print(any_nonzero(jnp.array([0.0, jnp.nan])))
        True
    """
    # Likewise by a number: of `any` three operations are compiled, which takes longer.
    return jnp.abs(x).max(initial=0) != 0


def finite(stacked: Any) -> Array:
    """Say of every leaf [M, ...] and client whether all entries are finite, [leaves, M].

    Example:
        >>> print(finite({"w": jnp.array([[1.0], [jnp.nan]])}))
        [[ True False]]
    """
    leaves = jax.tree.leaves(stacked)
    return jnp.stack([is_finite(leaf, tuple(range(1, leaf.ndim))) for leaf in leaves])


def finite_leaves(params: Any) -> Array:
    """Say of every leaf whether all entries are finite, [leaves]."""
    return jnp.stack([is_finite(leaf) for leaf in jax.tree.leaves(params)])


def exponent(x: Array) -> Array:
    """Give the least e with all |entries| below 2^e; `NOTHING` for zeros.

    Example:
        >>> print(exponent(jnp.array([0.5, -3.0])))
        2
    """
    top = jnp.abs(jax.lax.stop_gradient(x)).max(initial=0)
    return jnp.where(top == 0, NOTHING, jnp.frexp(top)[1])


def unit(x: Array) -> Array:
    """Give the power of two in whose units the largest entry is between 1 and 2; 1 for zeros.

    Squares stay in range then, and dividing by it changes no bit of what is computed.
    """
    found = exponent(x)
    return times_power(jnp.ones((), x.dtype), jnp.where(found == NOTHING, 0, found - 1))


def times_power(x: Array, exponent: Array) -> Array:
    """Multiply by 2^exponent, exactly wherever that power is in the range of the dtype."""
    # The power by itself: `ldexp(x, ...)` has no derivative at zero.
    return x * jnp.ldexp(jnp.ones((), x.dtype), exponent)


def keep(kept: AnyArray, stacked: Any, otherwise: Any = None) -> Any:
    """Replace leaves [M, ...] where `kept` [M] is False by those of `otherwise`, or by zeros.

    Example:
        >>> print(keep(jnp.array([True, False]), jnp.array([[1.0], [jnp.nan]])).T)
        [[1. 0.]]
    """
    otherwise = jax.tree.map(jnp.zeros_like, stacked) if otherwise is None else otherwise

    def leaf(x: Array, other: Array) -> Array:
        # Selected, not multiplied, as zero times NaN is NaN; [M] becomes [M, 1, ..., 1].
        return jnp.where(kept.reshape(-1, *(1,) * (x.ndim - 1)), x, other)

    return jax.tree.map(leaf, stacked, otherwise)


def native(tree: Any, what: str = "the pytree") -> Any:
    """Return arrays in this machine's byte order; refuse NumPy's types that JAX does not hold.

    Raises:
        TypeError: For text, objects, records, dates and floats of more than 64 bits; it names them.

    Example:
        >>> import numpy as np
        >>> native({"w": np.ones(1, ">f4")})["w"].dtype
        dtype('float32')
    """

    def one(path: Any, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        # JAX's keys have a type of another kind.
        if not isinstance(dtype, np.dtype):
            return leaf
        is_number = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
        # NumPy counts spans of time among the integers.
        if not is_number or dtype.kind == "m" or dtype.name in _TOO_WIDE:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            leaf_of = f"Leaf '{name}' of {what}" if name else what
            raise TypeError(
                f"{leaf_of} has dtype {dtype}, which JAX does not hold; expected numbers of at "
                "most 64 bits. Convert it, for instance by x.astype('float32')."
            )
        return leaf if dtype.isnative else leaf.astype(dtype.newbyteorder("="))

    return jax.tree_util.tree_map_with_path(one, tree)


def stack(trees: Sequence[Any]) -> Any:
    """Stack M pytrees, one a client, into a single pytree with leaves [M, ...].

    Raises:
        ValueError: If the list is empty, or clients differ in structure, a shape or a dtype.
        TypeError: If a leaf is no number and no array of numbers.

    Example:
        >>> stack([{"w": 1.0}, {"w": 2.0}])["w"].shape
        (2,)
    """
    if not trees:
        raise ValueError("Nothing to stack: got an empty list, expected one pytree a client.")
    trees = [native(tree, f"client {client}") for client, tree in enumerate(trees)]
    # Checked first, because jnp.stack would promote other dtypes and name no client.
    trees = [as_arrays(tree) for tree in trees]
    for client, tree in enumerate(trees):
        _check_numbers(tree, client)
        _check_same(trees[0], tree, client)
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *trees)


def _check_numbers(tree: Any, client: int) -> None:
    for name, leaf in by_name(tree).items():
        # Keys of random numbers are arrays too, which NumPy does not know.
        if not (hasattr(leaf, "dtype") or np.asarray(leaf).dtype.kind in "biufc"):
            raise TypeError(
                f"Leaf '{name}' of client {client} is {leaf!r}; expected an array or a number. "
                "Keep anything else out of the pytree (close over it in apply)."
            )


def _check_same(first: Any, tree: Any, client: int) -> None:
    if jax.tree.structure(first) != jax.tree.structure(tree):
        raise ValueError(
            f"Client {client} holds another tree than client 0: leaves {list(names(tree))}, "
            f"expected {list(names(first))}. All clients must have trained the same network."
        )
    for name, x, y in zip(names(first), jax.tree.leaves(first), jax.tree.leaves(tree), strict=True):
        # By functions, as a leaf may be a Python number.
        expected, given = (jnp.shape(x), jnp.result_type(x)), (jnp.shape(y), jnp.result_type(y))
        if expected != given:
            raise ValueError(
                f"Leaf '{name}' of client {client} has shape {given[0]} and dtype {given[1]}, but "
                f"client 0 has {expected[0]} and {expected[1]}. Bring all clients to one network."
            )
