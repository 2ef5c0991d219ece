"""Signatures of `.hybrid` files: Ed25519 (RFC 8032), by the package cryptography, over the manifest, which has the SHA-256 of each segment."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend.arguments import described
from torch_hybrid_backend.artifact.writer import CHECKSUM_BYTES, HEADER, PAGE_BYTES, replace_file
from torch_hybrid_backend.errors import ArgumentError, ArtifactError, failures

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_SIGNATURES = 41
_PAIR_BYTES = 96  # a public key and a signature
_COUNT_OFFSET = 12


def sign(path: str | os.PathLike[str], key: Ed25519PrivateKey | str | os.PathLike[str]) -> bytes:
    """Add a signature to a file that `export` wrote, in one step; return the public key, 32 bytes.

    key: a private key of Ed25519, or the path of one in PEM without a password (`openssl genpkey -algorithm ed25519 -out key.pem`). Raises
    ArtifactError for a file that is damaged or has no room for another signature, ArgumentError for a key that is none.
    """
    from torch_hybrid_backend.runtime.native.ops import Artifact

    path = Path(path)
    private = _private(key)
    Artifact(path, share=False)  # what is signed has passed every check
    content = bytearray(path.read_bytes())
    _, _, count, size, _, _ = HEADER.unpack_from(content)
    if count >= MAX_SIGNATURES:
        raise ArtifactError(f"{path} has {count} signatures, and there is no room for more: export it again")
    manifest = bytes(content[PAGE_BYTES : PAGE_BYTES + size])
    public = private.public_key().public_bytes_raw()
    pair = public + private.sign(manifest)
    struct.pack_into("<I", content, _COUNT_OFFSET, count + 1)
    begin = HEADER.size + count * _PAIR_BYTES
    content[begin : begin + _PAIR_BYTES] = pair
    end = PAGE_BYTES - CHECKSUM_BYTES
    content[end:PAGE_BYTES] = hashlib.sha256(content[:end]).digest()
    replace_file(path, [(0, bytes(content))])
    return public


def check_signed(path: Path, manifest: bytes, signatures: Sequence[tuple[bytes, bytes]], keys: Sequence[Any]) -> None:
    """Raise ArtifactError unless one of the keys, and no key of them wrongly, signed the manifest."""
    trusted = {_public(key) for key in keys}
    by_trusted = [(key, signature) for key, signature in signatures if key in trusted]
    if not by_trusted:
        signed = f"by {len(signatures)} other keys" if signatures else "by nobody"
        raise ArtifactError(
            f"{path} is signed {signed}, and by none of the {len(trusted)} keys that were given: use a file that one of them signed, "
            "or pass the key that you trust"
        )
    from cryptography.exceptions import InvalidSignature

    _, ed25519 = _cryptography("load with keys")
    for key, signature in by_trusted:
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, manifest)
        except failures(InvalidSignature) as error:
            raise ArtifactError(f"{path} has a wrong signature for the key {key.hex()}: do not use the file") from error


def _private(key: Any) -> Ed25519PrivateKey:
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


def _public(key: Any) -> bytes:
    """The 32 bytes of a public key."""
    serialization, ed25519 = _cryptography("load with keys")
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key.public_bytes_raw()  # type: ignore[no-any-return]
    if isinstance(key, bytes) and len(key) == 32:
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


def _cryptography(what: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as error:
        raise ArgumentError(f"to {what}, install the package cryptography: pip install cryptography") from error
    return serialization, ed25519
