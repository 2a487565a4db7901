"""Keys of one round: agreements of two clients, and encryption from one to another.

X25519 gives two clients a common secret. HKDF makes keys of it, each bound to its purpose, to the
two clients and to the transcript of the round. Shares travel encrypted and authenticated.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedquilt.errors import ProtocolError

KEY_BYTES = 32
NONCE = bytes(12)  # constant, as every key encrypts one message only
TAG_BYTES = 16


def make_private_key() -> bytes:
    """A new private key of X25519."""
    return secrets.token_bytes(KEY_BYTES)


def get_public_key(private: bytes) -> bytes:
    """The public key that belongs to a private one."""
    return load_key(private).public_key().public_bytes_raw()


def load_key(private: bytes) -> X25519PrivateKey:
    """A private key, ready for agreements with many others."""
    return X25519PrivateKey.from_private_bytes(private)


def agree(own: X25519PrivateKey, public: bytes) -> bytes:
    """The common secret of one's private key and another's public key.

    Raises:
        ProtocolError: The public key is one of the few that give everyone the same secret.
    """
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as problem:
        raise ProtocolError(f"a public key is not one of X25519 ({problem})") from problem


def derive_key(secret: bytes, transcript: bytes, purpose: str, *numbers: int) -> bytes:
    """A key for one purpose.

    Args:
        secret: What it is derived from.
        transcript: A digest of the round.
        purpose: What the key is for.
        numbers: Clients and rings that the key is for.
    """
    info = b"fedquilt " + purpose.encode() + b"".join(n.to_bytes(8, "big") for n in numbers)
    return HKDF(SHA256(), KEY_BYTES, salt=transcript, info=info).derive(secret)


def encrypt(key: bytes, message: bytes, about: bytes) -> bytes:
    """Encrypts the only message of a key; ``about`` is authenticated with it."""
    return ChaCha20Poly1305(key).encrypt(NONCE, message, about)


def decrypt(key: bytes, data: bytes, about: bytes) -> bytes:
    """Decrypts a message.

    Raises:
        ProtocolError: It was changed, or made for another round or client.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(NONCE, data, about)
    except InvalidTag:
        raise ProtocolError("encrypted shares were changed, or are of another round") from None
