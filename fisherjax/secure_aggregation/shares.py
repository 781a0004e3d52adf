"""Shamir's secret sharing of short secrets, over the integers modulo the prime 2^521 - 1.

Shamir, How to share a secret, Communications of the ACM 1979. Python's integers are not constant
in time: this does not protect against an attacker that can time a client's computation precisely.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fisherjax._core import checks
from fisherjax._core.secrecy import checked_entropy

# A Mersenne prime above 2^512, so that every secret of 64 bytes is a number of the field.
PRIME = 2**521 - 1
SIZE = 66
"""Length of a share, in bytes."""
_LONGEST = 64


def split(
    secret: bytes, threshold: int, places: Sequence[int], entropy: Callable[[int], bytes]
) -> dict[int, bytes]:
    """Split a secret so that any `threshold` shares recover it, and fewer reveal nothing.

        share_u = s + c_1 (u + 1) + ... + c_{threshold - 1} (u + 1)^{threshold - 1}  mod 2^521 - 1.

    Args:
        secret: At most 64 bytes.
        threshold: Number of shares that recover the secret.
        places: Places of the receivers: different integers, zero or more.
        entropy: Function from a number of bytes to random bytes, such as `os.urandom`.

    Returns:
        Shares of `SIZE` bytes by place.

    Raises:
        ValueError: If the secret is too long, there are fewer places than the threshold, or a place
            is negative, not an integer, or occurs twice.

    Example:
        >>> import os
        >>> shares = split(b"secret", 2, [0, 1, 5], os.urandom)
        >>> combine({place: shares[place] for place in (5, 1)}, size=6)
        b'secret'
    """
    places = _checked(places)
    if not isinstance(secret, bytes) or len(secret) > _LONGEST:
        raise ValueError(f"A secret has {len(secret)} bytes; expected at most {_LONGEST}.")
    if checks.count("threshold", threshold) > len(places):
        raise ValueError(
            f"threshold is {threshold} for {len(places)} places; expected at most "
            f"{len(places)}, as otherwise nobody could recover the secret."
        )
    entropy = checked_entropy(entropy)
    # With 128 bits more than the field, the remainder is uniform up to 2^-128.
    drawn = [int.from_bytes(entropy(SIZE + 16)) % PRIME for _ in range(threshold - 1)]
    # The secret is the value at zero; all other coefficients are uniform, so that fewer shares than
    # the threshold are independent of it.
    coefficients = [int.from_bytes(secret), *drawn]
    shares = {}
    for place in places:
        # Horner's rule, at place + 1: the value at zero is the secret.
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (place + 1) + coefficient) % PRIME
        shares[place] = value.to_bytes(SIZE)
    return shares


def combine(
    shares: Mapping[int, bytes], size: int, coefficients: Mapping[int, int] | None = None
) -> bytes:
    """Recover a secret of `size` bytes from its shares.

    `coefficients` are those of `interpolation`, for a caller that recovers several secrets.

    Raises:
        ValueError: If there are fewer shares than the threshold, or they do not belong together.
            Then the result is a number that is too large, except with probability 2^-265 for 32
            bytes.

    Example: see `split`.
    """
    coefficients = interpolation(list(shares)) if coefficients is None else coefficients
    if coefficients.keys() != shares.keys():
        raise ValueError(
            f"Coefficients are of places {sorted(coefficients)} for shares of {sorted(shares)}; "
            "expected interpolation(places) of the same places."
        )
    read = {place: number(place, share) for place, share in shares.items()}
    value = sum(coefficients[place] * x for place, x in read.items()) % PRIME
    # Wrong shares give a number that is uniform in the field, and almost never this short.
    if value >= 256**size:
        raise ValueError(
            f"{len(shares)} shares do not recover a secret of {size} bytes: they are too few, or "
            "one of them is of another secret."
        )
    return value.to_bytes(size)


def interpolation(places: Sequence[int]) -> dict[int, int]:
    """Compute Lagrange's coefficients at zero, prod_v (v + 1) / (v - u) over the other places v.

    Raises:
        ValueError: If a place is negative, not an integer, or occurs twice.

    Example:
        >>> interpolation([0, 1]) == {0: 2, 1: PRIME - 1}
        True
    """
    places = _checked(places)
    found = {}
    for place in places:
        # Products are reduced once at the end, as Python's integers do not overflow.
        others = [other for other in places if other != place]
        above = math.prod(other + 1 for other in others) % PRIME
        below = math.prod(other - place for other in others) % PRIME
        # Every number but zero has an inverse modulo a prime, and different places never give zero.
        found[place] = above * pow(below, -1, PRIME) % PRIME
    return found


def _checked(places: Iterable[int]) -> list[int]:
    """Return places as Python's integers; raise for place -1, whose share is the secret."""
    places = list(places)
    for place in places:
        if not checks.is_integer(place) or not 0 <= place < PRIME - 1:
            raise ValueError(
                f"A place is {place!r}; expected an integer, zero or more: the share of place -1 "
                "would be the secret itself."
            )
    if len(set(places)) < len(places):
        raise ValueError(f"Places are {places}; expected each only once.")
    # NumPy's integers would overflow in the products.
    return [int(place) for place in places]


def number(place: int, share: Any) -> int:
    """Read the share of a place; raise ValueError if `split` never makes such a share."""
    if not isinstance(share, bytes) or len(share) != SIZE or int.from_bytes(share) >= PRIME:
        raise ValueError(
            f"The share of place {place} is not a number of {SIZE} bytes below 2^521 - 1: it was "
            "damaged; expected a share as shares.split makes it."
        )
    return int.from_bytes(share)
