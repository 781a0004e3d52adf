"""Fixed point in the integers modulo 2^bits, where sums are exact and masks hide everything.

A number x of a leaf becomes round(x 2^e), with e the same for all of the leaf and all clients: the
largest that lets every client be at the leaf's bound without the sum leaving the ring. Integers
have e = 0. Sums wrap around, so that their order does not matter.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import checks


class Leaf(NamedTuple):
    """How one leaf is written: its name, shape and kind, the bound, and the exponent e."""

    name: str
    shape: tuple[int, ...]
    is_integer: bool
    bound: float
    exponent: int


class Ring(NamedTuple):
    """The agreement of all clients on how a pytree becomes numbers modulo 2^bits; public.

    Attributes:
        bits: 32 or 64.
        leaves: One `Leaf` each.
        structure: Of the pytree.
    """

    bits: int
    leaves: tuple[Leaf, ...]
    structure: Any

    @property
    def dtype(self) -> type:
        """Unsigned integers that wrap around at 2^bits."""
        return np.uint32 if self.bits == 32 else np.uint64

    @property
    def length(self) -> int:
        """How many numbers a contribution has."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)


def ring(like: Any, bound: Any, num_clients: int, bits: int = 32) -> Ring:
    """Agree on a ring: e = the largest with num_clients (bound 2^e + 1) < 2^(bits - 1).

    Rounding changes a number of one client by at most 2^-(e + 1), that is by about
    bound num_clients / 2^bits.

    Args:
        like: Pytree of floating or integer arrays, or their shapes, as every client's.
        bound: The largest absolute value that an entry may have, agreed before: one number for
            all leaves, or a pytree of one for each leaf.
        num_clients: How many are added at most.
        bits: 32, or 64 for twice the bytes.

    Raises:
        ValueError: If a bound is not positive, or the integers of a leaf do not fit.
        TypeError: If a leaf is neither floating nor integer.

    Example:
        >>> agreed = ring({"w": np.zeros(2)}, bound=1.0, num_clients=4)
        >>> numbers = encode(agreed, {"w": np.array([0.5, -0.25])})
        >>> print(decode(agreed, numbers + numbers + numbers)["w"])
        [ 1.5  -0.75]
    """
    checks.one_of("bits", bits, (32, 64))
    checks.count("num_clients", num_clients)
    leaves, structure = jax.tree.flatten(like)
    if not leaves:
        raise ValueError("There is nothing to add up: the pytree has no leaves.")
    bounds = _bounds(bound, structure)
    # What one client may hold at most, with one to spare for rounding.
    most = (2 ** (bits - 1) - 1) // num_clients - 1
    written = []
    for name, leaf, own in zip(tree.names(like), leaves, bounds, strict=True):
        checks.positive(f"the bound of leaf '{name}'", own)
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        if not (is_integer or jnp.issubdtype(dtype, jnp.floating)):
            raise TypeError(f"Leaf '{name}' has dtype {dtype}; expected floating or integer.")
        exponent = 0 if is_integer else math.floor(math.log2(max(most, 1)) - math.log2(own))
        if not is_integer and math.ldexp(own, exponent) > most:
            exponent -= 1
        if most < 1 or own > math.ldexp(most, -exponent):
            raise ValueError(
                f"{num_clients} clients with leaf '{name}' up to {own:g} leave the integers of "
                f"{bits} bits; expected a smaller bound, fewer clients, or bits=64."
            )
        written.append(Leaf(name, jnp.shape(leaf), is_integer, float(own), exponent))
    return Ring(bits, tuple(written), structure)


def encode(agreed: Ring, values: Any, who: str = "the contribution") -> np.ndarray:
    """Write a pytree as one vector [length] modulo 2^bits; `who` is named in errors.

    Raises:
        ValueError: If the pytree is another than agreed, or a leaf is not finite or exceeds its
            bound.

    Example: see `ring`.
    """
    leaves, structure = jax.tree.flatten(values)
    shapes = [leaf.shape for leaf in agreed.leaves]
    if structure != agreed.structure or [jnp.shape(x) for x in leaves] != shapes:
        raise ValueError(
            f"{who} has leaves {tree.shapes(values)}; expected those that were agreed on, "
            f"{ {leaf.name: leaf.shape for leaf in agreed.leaves} }."
        )
    parts = [_encoded(leaf, x, who) for leaf, x in zip(agreed.leaves, leaves, strict=True)]
    return np.concatenate(parts).astype(np.uint64).astype(agreed.dtype)


def decode(agreed: Ring, total: np.ndarray) -> Any:
    """Read a sum of vectors [length] as a pytree of float64 and int64, on the host.

    Example: see `ring`.
    """
    signed = total.astype(agreed.dtype).view(np.int32 if agreed.bits == 32 else np.int64)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in agreed.leaves])
    parts = zip(agreed.leaves, np.split(signed, ends[:-1]), strict=True)
    leaves = [_decoded(leaf, part).reshape(leaf.shape) for leaf, part in parts]
    return jax.tree.unflatten(agreed.structure, leaves)


def _bounds(bound: Any, structure: Any) -> list[Any]:
    if jax.tree.structure(bound) == structure:
        return jax.tree.leaves(bound)
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(bound)):
        return [bound] * structure.num_leaves
    raise ValueError(
        f"bound has leaves {list(tree.names(bound))}; expected one number, or one for each leaf of "
        "what is added up."
    )


def _encoded(leaf: Leaf, values: Any, who: str) -> np.ndarray:
    given = np.asarray(values)
    if jnp.issubdtype(given.dtype, jnp.integer) != leaf.is_integer:
        wanted = "integers" if leaf.is_integer else "floating point"
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} has dtype {given.dtype}; {wanted} was agreed on."
        )
    # Of the numbers as they are: huge unsigned integers turn negative below.
    largest = max(abs(float(given.max(initial=0))), abs(float(given.min(initial=0))))
    # NaN is the maximum of whatever has one.
    if not math.isfinite(largest):
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} is not finite: NaN cannot be added up. Leave that client "
            "out, or train it with a smaller learning rate."
        )
    if largest > leaf.bound:
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} has an entry of {largest:.6g}, beyond the agreed bound "
            f"{leaf.bound:.6g}. Agree on a larger bound, or clip."
        )
    if leaf.is_integer:
        return given.astype(np.int64).ravel()
    return np.rint(np.ldexp(given.astype(np.float64), leaf.exponent)).astype(np.int64).ravel()


def _decoded(leaf: Leaf, signed: np.ndarray) -> np.ndarray:
    if leaf.is_integer:
        return signed.astype(np.int64)
    return np.ldexp(signed.astype(np.float64), -leaf.exponent)
