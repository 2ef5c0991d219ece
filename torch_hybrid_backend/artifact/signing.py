"""Signatures of `.hybrid` files: Ed25519 (RFC 8032), by the package cryptography, over the manifest, which has the SHA-256 of each segment."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend.artifact.writer import CHECKSUM_BYTES, HEADER, PAGE_BYTES, replace_file
from torch_hybrid_backend.errors import ArtifactError
from torch_hybrid_backend.signatures import KEY_BYTES, SIGNATURE_BYTES, is_signed, private_key, public_key, signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_SIGNATURES = 41
_PAIR_BYTES = KEY_BYTES + SIGNATURE_BYTES
_COUNT_OFFSET = 12


def sign(path: str | os.PathLike[str], key: Ed25519PrivateKey | str | os.PathLike[str]) -> bytes:
    """Add a signature to a file that `export` wrote, in one step; return the public key, 32 bytes. A key has one signature in a file.

    key: a private key of Ed25519, or the path of one in PEM without a password (`openssl genpkey -algorithm ed25519 -out key.pem`). Raises
    ArtifactError for a file that is damaged or has no room for another signature, ArgumentError for a key that is none.
    """
    from torch_hybrid_backend.runtime.native.ops import Artifact

    path = Path(path)
    private = private_key(key)
    artifact = Artifact(path, share=False, runs=False)  # every check but whether this machine can run it
    content = bytearray(path.read_bytes())
    _, _, count, size, _, _ = HEADER.unpack_from(content)
    manifest = bytes(content[PAGE_BYTES : PAGE_BYTES + size])
    public, signed = signature(private, manifest)
    place = next((number for number, (key_of, _) in enumerate(artifact.signatures) if key_of == public), count)
    if place >= MAX_SIGNATURES:
        raise ArtifactError(f"{path} has {count} signatures, and there is no room for more: export it again")
    struct.pack_into("<I", content, _COUNT_OFFSET, max(count, place + 1))
    begin = HEADER.size + place * _PAIR_BYTES
    content[begin : begin + _PAIR_BYTES] = public + signed
    end = PAGE_BYTES - CHECKSUM_BYTES
    content[end:PAGE_BYTES] = hashlib.sha256(content[:end]).digest()
    replace_file(path, [(0, bytes(content))])
    return public


def check_signed(path: Path, keys: Sequence[Any], manifest: bytes, signatures: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ArtifactError unless one of the keys, and no key of them wrongly, signed the manifest."""
    trusted = {public_key(key) for key in keys}
    by_trusted = [(key, signed) for key, signed in signatures if key in trusted]
    if not by_trusted:
        by = f"by {len(signatures)} other keys" if signatures else "by nobody"
        raise ArtifactError(
            f"{path} is signed {by}, and by none of the {len(trusted)} keys that were given: use a file that one of them signed, "
            "or pass the key that you trust"
        )
    for key, signed in by_trusted:
        if not is_signed(key, signed, manifest):
            raise ArtifactError(f"{path} has a wrong signature for the key {key.hex()}: do not use the file")
