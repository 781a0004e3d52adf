"""Shamir's secret sharing of short secrets, over the integers modulo the prime 2^521 - 1.

Shamir, How to share a secret, Communications of the ACM 1979. In Python's integers, whose speed
depends on the numbers: nothing here is in constant time, so that whoever can time a client's
computation precisely is outside what this protects against.
"""

import math
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**521 - 1
SIZE = 66
"""Bytes of a share."""


def split(
    secret: bytes, threshold: int, places: Sequence[int], entropy: Callable[[int], bytes]
) -> dict[int, bytes]:
    """Split a secret so that any `threshold` shares give it back, and fewer say nothing.

        share_u = s + c_1 (u + 1) + ... + c_{threshold - 1} (u + 1)^{threshold - 1}  mod 2^521 - 1.

    Args:
        secret: At most 64 bytes.
        threshold: How many shares are needed.
        places: Who gets one: different numbers, zero or more.
        entropy: Number of bytes -> random bytes, such as `os.urandom`.

    Returns:
        Shares of `SIZE` bytes by place.

    Example:
        >>> import os
        >>> shares = split(b"secret", 2, [0, 1, 5], os.urandom)
        >>> combine({place: shares[place] for place in (5, 1)}, size=6)
        b'secret'
    """
    # 128 bits more than the field has: what is over after the division is uniform but for 2^-128.
    drawn = [int.from_bytes(entropy(SIZE + 16)) % PRIME for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret), *drawn]
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (place + 1) + coefficient) % PRIME
        shares[place] = value.to_bytes(SIZE)
    return shares


def combine(
    shares: Mapping[int, bytes], size: int, coefficients: Mapping[int, int] | None = None
) -> bytes:
    """Give back a secret of `size` bytes from its shares; the coefficients can be computed before.

    Raises:
        ValueError: If the shares are fewer than the threshold was, or do not belong together; both
            show, but for one chance in 2^265 at 32 bytes, as a number that is too large.

    Example: see `split`.
    """
    coefficients = interpolation(list(shares)) if coefficients is None else coefficients
    terms = (coefficients[place] * int.from_bytes(share) for place, share in shares.items())
    value = sum(terms) % PRIME
    if value >= 256**size:
        raise ValueError(
            f"{len(shares)} shares do not give a secret of {size} bytes: they are too few, or one "
            "of them is of another secret."
        )
    return value.to_bytes(size)


def interpolation(places: Sequence[int]) -> dict[int, int]:
    """Compute Lagrange's coefficients at zero, prod_v (v + 1) / (v - u) over the other places.

    Example:
        >>> interpolation([0, 1]) == {0: 2, 1: PRIME - 1}
        True
    """
    found = {}
    for own in places:
        others = [place for place in places if place != own]
        above = math.prod(place + 1 for place in others) % PRIME
        below = math.prod(place - own for place in others) % PRIME
        found[own] = above * pow(below, -1, PRIME) % PRIME
    return found
