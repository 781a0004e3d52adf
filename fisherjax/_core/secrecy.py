"""Check sources of randomness that must stay secret: keys of noise, and random bytes."""

import warnings
from collections.abc import Callable

import jax
import numpy as np

from fisherjax._core import checks
from fisherjax.typing import Key

_COMPARED = 8


def secret_key(value: Key) -> None:
    """Check a key of noise that must stay secret, and warn of one that a number made."""
    checks.key(value)
    if checks.is_traced(value):
        return
    # jax.random.key puts a number of 32 bits into every second word; the others are zero.
    if not np.asarray(jax.random.key_data(value))[::2].any():
        warnings.warn(
            "This key was made from a number, as jax.random.key(5) is, and has its 32 bits only: "
            "whoever tries all numbers finds the noise that should protect the clients. Use "
            "fisherjax.privacy.system_key(), or ignore this warning in a simulation.",
            stacklevel=4,
        )


def checked_entropy(entropy: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Check all that a source of random bytes returns, for the sources that are broken plainly.

    The result raises ValueError if the source returns anything but as many bytes as were asked for,
    if all of them are equal, or if they begin as those of the call before.

    Example:
        >>> import os
        >>> len(checked_entropy(os.urandom)(32))
        32
    """
    checks.function("entropy", entropy, "os.urandom")
    last = b""

    def draw(size: int) -> bytes:
        nonlocal last
        found = entropy(size)
        if not isinstance(found, bytes) or len(found) != size:
            given = f"{len(found)} bytes" if isinstance(found, bytes) else checks.kind_of(found)
            raise ValueError(f"entropy returned {given}; expected {size} random bytes.")
        compared = min(size, len(last))
        is_repeated = compared >= _COMPARED and found[:compared] == last[:compared]
        # Everybody could repeat the draws of such a source, and with them all keys and masks.
        if is_repeated or (size >= _COMPARED and len(set(found)) == 1):
            how = "the same bytes twice" if is_repeated else f"{size} equal bytes"
            raise ValueError(
                f"entropy returned {how}; expected a cryptographic source of random bytes, such as "
                "os.urandom."
            )
        last = found
        return found

    return draw
