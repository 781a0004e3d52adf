"""Shamir's secret sharing of short secrets, over the integers modulo the prime 2^521 - 1.

Shamir, How to share a secret, Communications of the ACM 1979. In Python's integers, whose speed
depends on the numbers: nothing here is in constant time, so that whoever can time a client's
computation precisely is outside what this protects against.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence

from fisherjax._core import checks

PRIME = 2**521 - 1
SIZE = 66
"""Bytes of a share."""
_LONGEST = 64


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

    Raises:
        ValueError: If the secret is longer, there are fewer places than the threshold, or a place
            is negative, no integer or there twice.

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
            f"threshold is {threshold} for {len(places)} places: nobody could put the secret "
            "together. Expected no more than the places."
        )
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
    if coefficients.keys() != shares.keys():
        raise ValueError(
            f"Coefficients are of places {sorted(coefficients)} for shares of {sorted(shares)}; "
            "expected those of the same places."
        )
    value = sum(coefficients[place] * _number(place, x) for place, x in shares.items()) % PRIME
    if value >= 256**size:
        raise ValueError(
            f"{len(shares)} shares do not give a secret of {size} bytes: they are too few, or one "
            "of them is of another secret."
        )
    return value.to_bytes(size)


def interpolation(places: Sequence[int]) -> dict[int, int]:
    """Compute Lagrange's coefficients at zero, prod_v (v + 1) / (v - u) over the other places.

    Raises:
        ValueError: If a place is negative, no integer or there twice.

    Example:
        >>> interpolation([0, 1]) == {0: 2, 1: PRIME - 1}
        True
    """
    places = _checked(places)
    found = {}
    for own in places:
        others = [place for place in places if place != own]
        above = math.prod(place + 1 for place in others) % PRIME
        below = math.prod(place - own for place in others) % PRIME
        found[own] = above * pow(below, -1, PRIME) % PRIME
    return found


def _checked(places: Iterable[int]) -> list[int]:
    """Refuse the place whose share is the secret, and places that share a share."""
    places = list(places)
    for place in places:
        is_integer = isinstance(place, numbers.Integral) and not isinstance(place, bool)
        if not is_integer or not 0 <= place < PRIME - 1:
            raise ValueError(
                f"A place is {place!r}; expected an integer, zero or more: the share of place -1 "
                "would be the secret itself."
            )
    if len(set(places)) < len(places):
        raise ValueError(f"Places are {places}; expected each only once.")
    # NumPy's would overflow below.
    return [int(place) for place in places]


def _number(place: int, share: bytes) -> int:
    if not isinstance(share, bytes) or len(share) != SIZE or int.from_bytes(share) >= PRIME:
        raise ValueError(
            f"The share of place {place} is no number of {SIZE} bytes below 2^521 - 1: it was "
            "damaged, or is something else."
        )
    return int.from_bytes(share)
