"""Signatures of bytes; keys from files are tested with those of `.hybrid` files in tests/artifact/test_signing.py."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.signatures import KEY_BYTES, SIGNATURE_BYTES, is_signed, private_key, public_key, signature


def test_a_signature_is_of_one_key_and_one_message() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public, signed = signature(private_key(key), b"message")
    assert (len(public), len(signed)) == (KEY_BYTES, SIGNATURE_BYTES)
    assert public_key(key.public_key()) == public_key(public) == public
    assert is_signed(public, signed, b"message")
    assert not is_signed(public, signed, b"massage")
    assert not is_signed(public_key(other.public_key()), signed, b"message")


@pytest.mark.parametrize("key", [b"short", 3, None, "missing.pem"])
def test_what_is_no_key_is_named(key: object) -> None:
    for read in (public_key, private_key):
        with pytest.raises(ArgumentError, match="key"):
            read(key)
