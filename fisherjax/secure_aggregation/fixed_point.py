"""Fixed-point numbers modulo 2^bits, in which sums are exact and masks are uniform.

An entry x of a leaf becomes round(x 2^e). The exponent e is the same for all entries of the leaf
and all clients: the largest for which the sum does not overflow even if every client is at the
leaf's bound. Integers have e = 0. Addition modulo 2^bits is exact in any order.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import checks
from fisherjax.secure_aggregation import keys


class Leaf(NamedTuple):
    """Encoding of one leaf: its name, shape and type, its bound, and the exponent e."""

    name: str
    shape: tuple[int, ...]
    is_integer: bool
    # An integer stays one: floating point has only some of the integers above 2^53.
    bound: int | float
    exponent: int


class Noise(NamedTuple):
    """Integers that each client adds to its encoded numbers before they are masked.

    Attributes:
        draw: Function from a `Leaf` to integers of its shape, drawn anew at every call. One unit of
            them is 2^-exponent of the leaf's values.
        room: Largest absolute value of the noise, in the units of the leaves' values, for which the
            sum has room beside the bound.
    """

    draw: Callable[[Leaf], np.ndarray]
    room: float


class Ring(NamedTuple):
    """The public encoding of a pytree as numbers modulo 2^bits, the same for all clients.

    Attributes:
        bits: Bits of each number, 32 or 64.
        leaves: Encoding of each leaf.
        structure: Structure of the pytree.
        room: Largest absolute value of a client's noise.
    """

    bits: int
    leaves: tuple[Leaf, ...]
    structure: Any
    room: float = 0.0

    @property
    def dtype(self) -> type:
        """Type of unsigned integers that wrap around at 2^bits."""
        return unsigned(self.bits)

    @property
    def length(self) -> int:
        """Count of numbers in one contribution."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)


def unsigned(bits: int) -> type:
    """Return NumPy's type of unsigned integers of 32 or 64 bits."""
    return np.uint32 if bits == 32 else np.uint64


def ring(like: Any, bound: Any, num_clients: int, bits: int = 32, room: float = 0.0) -> Ring:
    """Make the encoding of a pytree: the largest e with num_clients (bound 2^e + 1) < 2^(bits - 1).

    Rounding changes an entry of one client by at most 2^-(e + 1), which is about
    bound num_clients / 2^bits. Integers have e = 0 and are not rounded: for them,
    num_clients bound < 2^(bits - 1).

    Args:
        like: Pytree of floating or integer arrays, or of their shapes, like that of each client.
        bound: Largest absolute value that an entry may have, known to all before the sum: one
            number for all leaves, or a pytree with one number for each leaf.
        num_clients: Largest number of contributions in the sum.
        bits: 32 (default), or 64 for uploads of twice the size.
        room: Largest absolute value of a client's noise, added to the bound (default 0).

    Raises:
        ValueError: If a bound is not positive, or the sum of a leaf overflows the integers or, in
            floating point, float64.
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
        raise ValueError("The pytree to add up has no leaves; expected at least one array.")
    bounds = _bounds(bound, structure)
    checks.number("room", room)
    # The largest number of one client.
    share = (2 ** (bits - 1) - 1) // num_clients
    written = []
    for name, leaf, limit in zip(tree.names(like), leaves, bounds, strict=True):
        checks.positive(f"the bound of leaf '{name}'", limit)
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        if not (is_integer or jnp.issubdtype(dtype, jnp.floating)):
            raise TypeError(f"Leaf '{name}' has dtype {dtype}; expected floating or integer.")
        exact = np.asarray(limit).item()
        needed = exact + math.ceil(room) if is_integer else float(exact) + room
        checks.number(f"the bound of leaf '{name}' and the room for noise", needed)
        # One is left for rounding, which integers do not need.
        most = share if is_integer else share - 1
        exponent = 0 if is_integer else _exponent(needed, max(most, 1))
        # An overflow would wrap around silently, and the sum would be wrong without any sign of it.
        if most < 1 or (is_integer and needed > most):
            raise ValueError(
                f"{num_clients} clients with leaf '{name}' up to {exact!r} overflow integers of "
                f"{bits} bits; expected a smaller bound, fewer clients, or bits=64."
            )
        # An entry is rounded by at most half of its last bit, the decoded sum by that of float64.
        most_sum = num_clients * (needed * (1 + 1e-15) + math.ldexp(0.5, -exponent))
        if not is_integer and most_sum == math.inf:
            raise ValueError(
                f"{num_clients} clients with leaf '{name}' up to {exact!r} overflow float64, in "
                "which the sum is returned; expected a smaller bound or fewer clients."
            )
        written.append(Leaf(name, jnp.shape(leaf), is_integer, exact, exponent))
    return Ring(int(bits), tuple(written), structure, float(room))


def digest(agreed: Ring) -> bytes:
    """Compute a hash of an encoding, for `protocol.setting`: clients with another are refused."""
    return keys.digest("ring", agreed.bits, agreed.room, str(agreed.structure), *agreed.leaves)


def encode(
    agreed: Ring,
    values: Any,
    who: str = "the contribution",
    draw: Callable[[Leaf], np.ndarray] | None = None,
) -> np.ndarray:
    """Encode a pytree as one vector [length] modulo 2^bits; `who` is named in errors.

    `draw` is that of a `Noise`, whose integers are added to the encoded numbers.

    Raises:
        ValueError: If the pytree does not fit the ring, a leaf is not finite or exceeds its bound,
            or noise exceeds the ring's room.

    Example: see `ring`.
    """
    leaves, structure = jax.tree.flatten(values)
    shapes = [leaf.shape for leaf in agreed.leaves]
    if structure != agreed.structure or [jnp.shape(x) for x in leaves] != shapes:
        raise ValueError(
            f"{who} has leaves {tree.shapes(values)}; expected those of the agreed ring, "
            f"{ {leaf.name: leaf.shape for leaf in agreed.leaves} }."
        )
    parts = [_encoded(leaf, x, who) for leaf, x in zip(agreed.leaves, leaves, strict=True)]
    if draw is not None:
        noise = [_drawn(leaf, draw(leaf), agreed.room) for leaf in agreed.leaves]
        parts = list(map(np.add, parts, noise))
    # Negative numbers become their complement modulo 2^64, whose low bits are the number modulo
    # 2^32.
    return np.concatenate(parts).astype(np.uint64).astype(agreed.dtype)


def decode(agreed: Ring, total: np.ndarray) -> Any:
    """Decode a sum of vectors [length] to a pytree of float64 and int64, on the host.

    Example: see `ring`.
    """
    # Sums stay below half of 2^bits, so that the upper half stands for negative numbers.
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
        f"bound has leaves {list(tree.names(bound))}; expected one number, or a pytree with one "
        "number for each leaf that is added up."
    )


def _encoded(leaf: Leaf, values: Any, who: str) -> np.ndarray:
    array = np.asarray(values)
    # Floats of an integer leaf would be cut off to integers without a word.
    if jnp.issubdtype(array.dtype, jnp.integer) != leaf.is_integer:
        wanted = "integers" if leaf.is_integer else "floating point"
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} has dtype {array.dtype}; expected {wanted}, as agreed."
        )
    # Before the conversion to int64 below, in which huge unsigned integers turn negative. Python's
    # integers are compared exactly, where floating point would round to the bound.
    exact = int if leaf.is_integer else float
    largest = max(exact(array.max(initial=0)), -exact(array.min(initial=0)))
    # The maximum of an array with NaN is NaN.
    if not math.isfinite(largest):
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} is not finite, and cannot be encoded. Leave this client "
            "out, or train it with a smaller learning rate."
        )
    # One client beyond the bound could overflow the sum of all, which nobody sees under masks.
    if largest > leaf.bound:
        raise ValueError(
            f"Leaf '{leaf.name}' of {who} has an entry of {largest!r}, beyond the agreed bound "
            f"{leaf.bound!r}. Agree on a larger bound, or clip the updates."
        )
    if leaf.is_integer:
        return array.astype(np.int64).ravel()
    return np.rint(np.ldexp(array.astype(np.float64), leaf.exponent)).astype(np.int64).ravel()


def _drawn(leaf: Leaf, noise: Any, room: float) -> np.ndarray:
    noise = np.asarray(noise)
    # Compared with the room alone: an error that depends on the values would tell of them.
    most = math.floor(math.ldexp(room, leaf.exponent))
    is_integer = noise.shape == leaf.shape and np.issubdtype(noise.dtype, np.integer)
    if not is_integer or max(int(noise.max(initial=0)), -int(noise.min(initial=0))) > most:
        raise ValueError(
            f"The noise for leaf '{leaf.name}' has shape {noise.shape} and dtype {noise.dtype}; "
            f"expected integers of shape {leaf.shape} from {-most} to {most}, the ring's room."
        )
    return noise.astype(np.int64).ravel()


def _exponent(limit: float, most: int) -> int:
    """Return the largest e with limit 2^e <= most."""
    # Logarithms are rounded, so that theirs may be one too large or too small.
    exponent = math.floor(math.log2(most) - math.log2(limit)) + 1
    # Exact: the product by a power of two has no rounding, and Python compares it as it is.
    while math.ldexp(limit, exponent) > most:
        exponent -= 1
    return exponent


def _decoded(leaf: Leaf, signed: np.ndarray) -> np.ndarray:
    if leaf.is_integer:
        return signed.astype(np.int64)
    return np.ldexp(signed.astype(np.float64), -leaf.exponent)
