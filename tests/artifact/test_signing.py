"""Signatures establish who made a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.artifact.unsigned_for_tests import content, file
from torch_hybrid_backend import load, sign
from torch_hybrid_backend.artifact import signing
from torch_hybrid_backend.errors import ArgumentError, ArtifactError

__all__ = ["content", "file"]  # the fixtures


@pytest.mark.fault(
    "a `.hybrid` file that no trusted key signed, and keys are given",
    "ArtifactError",
)
def test_one_of_the_keys_must_have_signed(file: Path) -> None:
    """Keys are given as objects or bytes; without keys nobody looks at signatures."""
    first, second, third = (Ed25519PrivateKey.generate() for _ in range(3))
    with pytest.raises(ArtifactError, match="signed by nobody"):
        load(file, keys=[first.public_key()])
    public = sign(file, first)
    sign(file, second)
    load(file)
    load(file, keys=[public])
    load(file, keys=[third.public_key(), second.public_key()])
    with pytest.raises(ArtifactError, match=r"signed by 2 other keys.* none of the 1 keys"):
        load(file, keys=[third.public_key()])
    with pytest.raises(ArtifactError, match="none of the 0 keys"):
        load(file, keys=[])


def test_an_unsigned_file_is_not_read(file: Path) -> None:
    """The signature is verified before anything behind the manifest."""
    stranger = sign(file, Ed25519PrivateKey.generate())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="signed by 1 other keys"):
        load(file, keys=[Ed25519PrivateKey.generate().public_key()])
    with pytest.raises(ArtifactError, match="checksum of its segment"):
        load(file, keys=[stranger])


def test_keys_in_files(file: Path, tmp_path: Path) -> None:
    """PEM, as openssl writes it."""
    key = Ed25519PrivateKey.generate()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*form))
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    sign(file, tmp_path / "key.pem")
    load(file, keys=[tmp_path / "public.pem"])


def test_a_wrong_signature_is_refused(file: Path, content: bytes) -> None:
    """A signature of another manifest under a trusted key."""
    key = Ed25519PrivateKey.generate()
    sign(file, key)
    signed = file.read_bytes()
    other = Ed25519PrivateKey.generate()
    file.write_bytes(content)
    sign(file, other)
    planted = bytearray(file.read_bytes())
    begin = signing.HEADER.size
    planted[begin : begin + 32] = signed[begin : begin + 32]
    end = signing.PAGE_BYTES - signing.CHECKSUM_BYTES
    planted[end : end + 32] = signing.hashlib.sha256(planted[:end]).digest()
    file.write_bytes(planted)
    with pytest.raises(ArtifactError, match="wrong signature"):
        load(file, keys=[key.public_key()])


def test_there_is_room_for_41(file: Path) -> None:
    """A key that signed before needs no room."""
    keys = [Ed25519PrivateKey.generate() for _ in range(signing.MAX_SIGNATURES)]
    for key in keys:
        sign(file, key)
    sign(file, keys[0])
    load(file, keys=[keys[0].public_key()])
    with pytest.raises(ArtifactError, match="no room"):
        sign(file, Ed25519PrivateKey.generate())


@pytest.mark.parametrize("key", [b"short", 3, None, "missing.pem"])
def test_what_is_no_key_is_refused(key: object, file: Path) -> None:
    with pytest.raises(ArgumentError, match="key"):
        load(file, keys=[key])
    with pytest.raises(ArgumentError, match="key"):
        sign(file, key)  # type: ignore[arg-type]


def test_a_key_of_another_kind_is_refused(file: Path, tmp_path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "rsa.pem").write_bytes(key.private_bytes(*form))
    with pytest.raises(ArgumentError, match="ed25519"):
        sign(file, tmp_path / "rsa.pem")
