"""Keys that two clients agree on, what is derived from them, and boxes that only one can open.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and ChaCha20-Poly1305 (RFC 8439), all of
the package `cryptography`. What a key is for is part of its derivation: keys of another use, round
or direction have nothing in common.
"""

from collections.abc import Callable
from typing import Any

SECRET = 32
"""Bytes of every key and seed."""
_NONCE = 12
_FIELD = 2**255 - 19
_EIGHT = (
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
_LOW_ORDER = {0, 1, _FIELD - 1, *_EIGHT}
"""Coordinates of order 1, 2, 4 and 8: what is agreed on with their owners is zero for everybody."""


def pair(entropy: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Draw a private key, and give its public one too."""
    private = _exchange().X25519PrivateKey.from_private_bytes(entropy(SECRET))
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def public(private: bytes) -> bytes:
    """Compute the public key of a private one."""
    own = _exchange().X25519PrivateKey.from_private_bytes(private)
    return own.public_key().public_bytes_raw()


def check_public(name: str, value: Any) -> None:
    """Refuse what is no public key, or one of several ways to write the same.

    X25519 ignores the highest bit and takes numbers modulo 2^255 - 19: were they accepted, one
    client's key could come back under another's name, and look like another key.

    Raises:
        ValueError: If it is not 32 bytes, no canonical coordinate, or of low order.
    """
    if not isinstance(value, bytes) or len(value) != SECRET:
        raise ValueError(f"{name} is {value!r}; expected the {SECRET} bytes of an X25519 key.")
    coordinate = int.from_bytes(value, "little")
    if coordinate >= _FIELD:
        raise ValueError(
            f"{name} is not canonical: its number is not below 2^255 - 19, which another writing "
            "of the same key is. Expected the bytes that X25519 gives."
        )
    if coordinate in _LOW_ORDER:
        raise ValueError(
            f"{name} is of low order: what anybody agrees on with its owner is zero. Expected a "
            "key that was drawn."
        )


def agreed(private: bytes, public: bytes) -> bytes:
    """Agree with the owner of a public key on a secret, from which keys are to be derived."""
    x25519 = _exchange()
    own = x25519.X25519PrivateKey.from_private_bytes(private)
    return own.exchange(x25519.X25519PublicKey.from_public_bytes(public))


def derived(secret: bytes, session: bytes, use: str) -> bytes:
    """Derive the key of one use in one session from a secret."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # Lengths first, so that no two pairs of session and use read alike.
    info = b"fisherjax secure aggregation" + len(session).to_bytes(4) + session + use.encode()
    return HKDF(algorithm=SHA256(), length=SECRET, salt=None, info=info).derive(secret)


def keystream(key: bytes, size: int) -> bytes:
    """Stretch a key to `size` bytes, which are uniform for whoever does not know it.

    A key is stretched once, so that the nonce may be zero.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return cipher.update(bytes(size))


def seal(key: bytes, text: bytes, header: bytes, entropy: Callable[[int], bytes]) -> bytes:
    """Encrypt and authenticate a text, and authenticate a header that is not sent."""
    nonce = entropy(_NONCE)
    return nonce + _box(key).encrypt(nonce, text, header)


def unseal(key: bytes, box: bytes, header: bytes) -> bytes:
    """Open what `seal` made.

    Raises:
        ValueError: If it was made with another key or header, or changed on its way.
    """
    from cryptography.exceptions import InvalidTag

    try:
        return _box(key).decrypt(box[:_NONCE], box[_NONCE:], header)
    except InvalidTag:
        raise ValueError(
            "a box of shares does not open: it is of another sender, receiver or session, or was "
            "changed on its way."
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
