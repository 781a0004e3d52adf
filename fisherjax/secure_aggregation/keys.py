"""Key exchange between two clients, key derivation, authenticated encryption and signatures.

The package `cryptography` has all primitives: X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869),
ChaCha20 and ChaCha20-Poly1305 (RFC 8439), Ed25519 (RFC 8032). The use of a key is part of its
derivation, so that keys of different uses, rounds or directions are independent.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fisherjax._core import checks

SECRET = 32
"""Length of every key and seed, in bytes."""
# The lengths of a nonce and of a tag are those of RFC 8439, the prime is that of RFC 7748.
_NONCE = 12
SEAL = _NONCE + 16
"""Length of a box beyond that of its text, in bytes."""
_FIELD = 2**255 - 19
# Any private key does: all are multiples of eight, so that points of low order become zero.
_FIXED = bytes(SECRET)


def digest(*parts: Any) -> bytes:
    """Compute SHA-256 of numbers, texts, bytes, arrays, and sequences and mappings of them."""
    # Python's representation of these types is unique, so that different parts differ in it.
    return hashlib.sha256(repr(_plain(parts)).encode()).digest()


def pair(entropy: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Draw a private key, and return it with its public key."""
    private = entropy(SECRET)
    return private, public(private)


def public(private: bytes) -> bytes:
    """Compute the public key of a private key."""
    own = _exchange().X25519PrivateKey.from_private_bytes(private)
    return own.public_key().public_bytes_raw()


def check_public(name: str, value: Any) -> bytes:
    """Check that a value is a public key in its canonical encoding, and return its point.

    X25519 ignores the highest bit, takes numbers modulo 2^255 - 19 and multiplies by eight, so that
    one key has several encodings and points. If all were accepted, the key of one client could
    return under the name of another client without being recognised.

    Returns:
        A multiple of the point, which is the same for all keys that lead to the same secrets.

    Raises:
        ValueError: If it is not 32 bytes, not a canonical coordinate, or of low order.
    """
    if not isinstance(value, bytes) or len(value) != SECRET:
        raise ValueError(f"{name} is {value!r}; expected the {SECRET} bytes of an X25519 key.")
    # The highest bit is part of the number here, so that a key with this bit set is refused too.
    if int.from_bytes(value, "little") >= _FIELD:
        raise ValueError(
            f"{name} is not canonical: as a number it is not below 2^255 - 19; expected the bytes "
            "that X25519 returns for this key."
        )
    try:
        return _point(value)
    except ValueError:
        # With such a key everybody knows the shared secret, and with it the mask.
        raise ValueError(
            f"{name} is of low order: every key exchange with it results in zero; expected the "
            "public key of a private key that was drawn at random."
        ) from None


# Every client checks the same keys, which are public: in one process once each.
@lru_cache(4096)
def _point(public: bytes) -> bytes:
    return exchange(_FIXED, public)


def exchange(private: bytes, public: bytes) -> bytes:
    """Compute the secret shared with the owner of a public key, from which keys are derived."""
    x25519 = _exchange()
    own = x25519.X25519PrivateKey.from_private_bytes(private)
    return own.exchange(x25519.X25519PublicKey.from_public_bytes(public))


def derive(secret: bytes, view: bytes, use: str) -> bytes:
    """Derive the key of one use from a secret; parties whose views differ derive other keys."""
    # Imported here, because the package is an extra that most users do not install.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # The length goes first, so that no two pairs of view and use have the same bytes.
    info = b"fisherjax secure aggregation" + len(view).to_bytes(4) + view + use.encode()
    return HKDF(algorithm=SHA256(), length=SECRET, salt=None, info=info).derive(secret)


def keystream(key: bytes, size: int) -> bytes:
    """Expand a key to `size` bytes that look uniform to everybody without the key.

    The nonce is zero, which is safe because each key is expanded only once.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    # ChaCha20 is a stream cipher: encrypting zeros returns the stream itself.
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return cipher.update(bytes(size))


def seal(key: bytes, text: bytes, header: bytes, entropy: Callable[[int], bytes]) -> bytes:
    """Encrypt and authenticate a text; also authenticate a header, which is not sent."""
    # The receiver needs the nonce, which is no secret. It leads the box.
    nonce = entropy(_NONCE)
    return nonce + _box(key).encrypt(nonce, text, header)


def unseal(key: bytes, box: bytes, header: bytes) -> bytes:
    """Decrypt a box that `seal` made.

    Raises:
        ValueError: If it was made with another key or header, or was changed.
    """
    from cryptography.exceptions import InvalidTag

    try:
        checks.instance("a box", box, bytes, "bytes")
        # A box whose tag does not match is never decrypted, not even in part.
        return _box(key).decrypt(box[:_NONCE], box[_NONCE:], header)
    except (InvalidTag, ValueError, TypeError):
        raise ValueError(
            "a box of shares does not open: it has another sender, receiver or session, or was "
            "changed in transit; expected the box as its sender made it."
        ) from None


def verifier(signing: Any) -> bytes:
    """Compute the public key that verifies the signatures of a private signing key of 32 bytes."""
    if not isinstance(signing, bytes) or len(signing) != SECRET:
        is_bytes = isinstance(signing, bytes)
        given = f"has {len(signing)} bytes" if is_bytes else f"is {checks.kind_of(signing)}"
        raise ValueError(
            f"A signing key {given}; expected the {SECRET} bytes of a private Ed25519 "
            "key, such as os.urandom(32), whose public key the others know beforehand."
        )
    return (
        _signatures().Ed25519PrivateKey.from_private_bytes(signing).public_key().public_bytes_raw()
    )


def sign(signing: bytes, text: bytes) -> bytes:
    """Sign a text with a private Ed25519 key."""
    return _signatures().Ed25519PrivateKey.from_private_bytes(signing).sign(text)


def is_signed(verifier: bytes, signature: Any, text: bytes) -> bool:
    """Return whether a signature is that of this text by the owner of a public Ed25519 key."""
    from cryptography.exceptions import InvalidSignature

    try:
        _signatures().Ed25519PublicKey.from_public_bytes(verifier).verify(signature, text)
    except (InvalidSignature, TypeError):
        return False
    return True


def _plain(value: Any) -> Any:
    """Return a value as Python's types, with arrays hashed."""
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"), copy=False)
        return little.dtype.str, value.shape, hashlib.sha256(little.tobytes()).digest()
    if isinstance(value, Mapping):
        # Places of another type would not compare; a representation always does.
        return sorted([(_plain(key), _plain(x)) for key, x in value.items()], key=repr)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return int(value) if checks.is_integer(value) else value


def _box(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)


def _signatures() -> Any:
    _exchange()
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519


def _exchange() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Secure aggregation needs the package cryptography: pip install 'fisherjax[secure]'."
        ) from error
    return x25519
