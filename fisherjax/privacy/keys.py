"""Secret keys of noise, and fingerprints by which a second use of one is noticed."""

import math
import secrets

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.typing import Array, Key

KEPT = 1024
"""Number of releases whose fingerprints are kept."""
# No algorithm folds or splits its key by this number.
_FINGERPRINT = 0x66707274


def system_key() -> Key:
    """Draw a random key whose bits all come from the operating system, for noise that is secret.

    Keys of JAX's default generator, threefry, have 64 bits, and those of rbg 128. A key that
    `jax.random.key` makes from a number has only the 32 bits of that number: the noise is found by
    trying all, in days on one core. JAX's generators are not made for cryptography; nobody is known
    to compute a key from its numbers.

    Returns:
        A typed key of the generator that `jax_default_prng_impl` names. Use it for one release, or
        for one run of rounds, and do not keep it.

    Example:
        >>> system_key().shape, bool(system_key() == system_key())
        ((), False)
    """
    # Shapes alone: nothing is computed from the number.
    shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    words = np.frombuffer(secrets.token_bytes(4 * math.prod(shape)), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words.reshape(shape)))


def no_fingerprints() -> Array:
    """Return the fingerprints before the first release."""
    return jnp.zeros((KEPT, 2), jnp.uint32)


def record(key: Key, fingerprints: Array, number: Array) -> Array:
    """Add a key's fingerprint to those of the releases before.

    Args:
        key: Key of this release.
        fingerprints: [1024, 2] those before. Only the latest ones are kept.
        number: Number of releases before.

    Raises:
        ValueError: If the key is among those before. Under tracing this cannot be known; then
            `epsilon` refuses the ledger.
    """
    repeated, kept = _recorded(key, fingerprints, number)
    if not checks.is_traced(repeated) and repeated:
        raise ValueError(
            "This key has made the noise of an earlier release in this state already, and the "
            "difference of two releases with the same noise reveals what changed between them; "
            "expected another key for each release, such as privacy.system_key()."
        )
    return kept


@jit
def _recorded(key: Key, fingerprints: Array, number: Array) -> tuple[Array, Array]:
    # Bits of a key that is itself drawn from the key: they are a hash of it, and no noise.
    own = jax.random.bits(jax.random.fold_in(key, _FINGERPRINT), (2,), jnp.uint32)
    return (fingerprints == own).all(1).any(), fingerprints.at[number % KEPT].set(own)
