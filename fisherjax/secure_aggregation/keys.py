"""Key exchange between two clients, key derivation, and authenticated encryption.

The package `cryptography` has all primitives: X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869),
ChaCha20 and ChaCha20-Poly1305 (RFC 8439). The use of a key is part of its derivation, so that keys
of different uses, rounds or directions are independent.
"""

from collections.abc import Callable
from typing import Any

SECRET = 32
"""Length of every key and seed, in bytes."""
# The length of a nonce is that of RFC 8439, the prime that of RFC 7748.
_NONCE = 12
_FIELD = 2**255 - 19
_EIGHT = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
_LOW_ORDER = {0, 1, _FIELD - 1, *_EIGHT}
"""Coordinates of order 1, 2, 4 and 8: a key exchange with them always results in zero."""


def pair(entropy: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Draw a private key, and return it with its public key."""
    private = entropy(SECRET)
    return private, public(private)


def public(private: bytes) -> bytes:
    """Compute the public key of a private key."""
    own = _exchange().X25519PrivateKey.from_private_bytes(private)
    return own.public_key().public_bytes_raw()


def check_public(name: str, value: Any) -> None:
    """Check that a value is a public key in its canonical encoding.

    X25519 ignores the highest bit and takes numbers modulo 2^255 - 19, so that one key has several
    encodings. If all were accepted, the key of one client could return under the name of another
    client without being recognised.

    Raises:
        ValueError: If it is not 32 bytes, not a canonical coordinate, or of low order.
    """
    if not isinstance(value, bytes) or len(value) != SECRET:
        raise ValueError(f"{name} is {value!r}; expected the {SECRET} bytes of an X25519 key.")
    coordinate = int.from_bytes(value, "little")
    # The highest bit is part of the number here, so that a key with this bit set is refused too.
    if coordinate >= _FIELD:
        raise ValueError(
            f"{name} is not canonical: as a number it is not below 2^255 - 19; expected the bytes "
            "that X25519 returns for this key."
        )
    # With such a key everybody knows the shared secret, and with it the mask.
    if coordinate in _LOW_ORDER:
        raise ValueError(
            f"{name} is of low order: every key exchange with it results in zero; expected the "
            "public key of a private key that was drawn at random."
        )


def exchange(private: bytes, public: bytes) -> bytes:
    """Compute the secret shared with the owner of a public key, from which keys are derived."""
    x25519 = _exchange()
    own = x25519.X25519PrivateKey.from_private_bytes(private)
    return own.exchange(x25519.X25519PublicKey.from_public_bytes(public))


def derive(secret: bytes, session: bytes, use: str) -> bytes:
    """Derive the key of one use in one session from a secret."""
    # Imported here, because the package is an extra that most users do not install.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # The length goes first, so that no two pairs of session and use have the same bytes.
    info = b"fisherjax secure aggregation" + len(session).to_bytes(4) + session + use.encode()
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
        # A box whose tag does not match is never decrypted, not even in part.
        return _box(key).decrypt(box[:_NONCE], box[_NONCE:], header)
    except InvalidTag:
        raise ValueError(
            "a box of shares does not open: it has another sender, receiver or session, or was "
            "changed in transit; expected the box as its sender made it."
        ) from None


def _box(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)


def _exchange() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Secure aggregation needs the package cryptography: pip install 'fisherjax[secure]'."
        ) from error
    return x25519
