"""Signatures of bytes: Ed25519 (RFC 8032), by the package cryptography, which is imported when it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend.arguments import described
from torch_hybrid_backend.errors import ArgumentError, failures

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Bytes of a public key and of a signature.
KEY_BYTES, SIGNATURE_BYTES = 32, 64


def private_key(key: Any) -> Ed25519PrivateKey:
    """A private key, given as such or as the path of one in PEM without a password. Raises ArgumentError for anything else."""
    serialization, ed25519 = _cryptography("sign")
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key  # type: ignore[no-any-return]
    if not isinstance(key, str | os.PathLike):
        raise ArgumentError(
            f"sign got {described(key)} as its key; it must be an Ed25519PrivateKey or the path of one in PEM"
        )
    try:
        found = serialization.load_pem_private_key(Path(key).read_bytes(), password=None)
    except failures(ValueError, TypeError, OSError) as error:
        raise ArgumentError(f"{key} holds no private key in PEM without a password: {error}") from error
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise ArgumentError(
            f"{key} holds {described(found)}; make a key by `openssl genpkey -algorithm ed25519 -out key.pem`"
        )
    return found  # type: ignore[no-any-return]


def public_key(key: Any) -> bytes:
    """The 32 bytes of a public key, given as an Ed25519PublicKey, as these bytes, or as the path of one in PEM. Raises ArgumentError for
    anything else."""
    serialization, ed25519 = _cryptography("check signatures")
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key.public_bytes_raw()  # type: ignore[no-any-return]
    if isinstance(key, bytes) and len(key) == KEY_BYTES:
        return key
    if isinstance(key, str | os.PathLike):
        try:
            found = serialization.load_pem_public_key(Path(key).read_bytes())
        except failures(ValueError, OSError) as error:
            raise ArgumentError(
                f"{key} holds no public key in PEM: {error}; `openssl pkey -in key.pem -pubout` makes one"
            ) from error
        if isinstance(found, ed25519.Ed25519PublicKey):
            return found.public_bytes_raw()  # type: ignore[no-any-return]
    raise ArgumentError(
        f"keys has {described(key)}; each must be an Ed25519PublicKey, its 32 bytes, or the path of one in PEM"
    )


def signature(key: Ed25519PrivateKey, message: bytes) -> tuple[bytes, bytes]:
    """The public key of a private one, and its signature of a message."""
    return key.public_key().public_bytes_raw(), key.sign(message)


def is_signed(key: bytes, signed: bytes, message: bytes) -> bool:
    """True if `signed` is a signature of the message by the private key of a public one."""
    _, ed25519 = _cryptography("check signatures")
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signed, message)
    except InvalidSignature:
        return False
    return True


def _cryptography(what: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise ArgumentError(f"to {what}, install the package cryptography: pip install cryptography") from error
    return serialization, ed25519
