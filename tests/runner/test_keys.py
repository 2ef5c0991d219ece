"""Signatures, by the runner: the keys that it is given mean what they mean to `load`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.artifact.exported_for_tests import with_manifest
from tests.artifact.unsigned_for_tests import content, file
from tests.runner.runner_in_python import Runner, RunnerError, run
from torch_hybrid_backend import sign
from torch_hybrid_backend.artifact import signing

__all__ = ["content", "file"]  # the fixtures
pytestmark = pytest.mark.slow


def _rewrite(path: Path, content: bytearray) -> None:
    """Write a file whose header has the right checksum."""
    end = signing.PAGE_BYTES - signing.CHECKSUM_BYTES
    content[end : signing.PAGE_BYTES] = signing.hashlib.sha256(content[:end]).digest()
    path.write_bytes(content)


def _in_pem(key: Ed25519PrivateKey | x25519.X25519PrivateKey, path: Path) -> Path:
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(*form))
    return path


@pytest.mark.fault(
    "a `.hybrid` file that no trusted key signed, in the runner with keys", "an error that says who signed it"
)
def test_one_of_the_keys_must_have_signed(runner: Runner, file: Path) -> None:
    """Without keys nobody looks at signatures."""
    first, second, third = (Ed25519PrivateKey.generate() for _ in range(3))
    stranger = third.public_key().public_bytes_raw()
    with pytest.raises(RunnerError, match=r"model\.hybrid: it is signed by nobody, and by none of the 1 keys"):
        runner.open(file, keys=[stranger])
    trusted = [sign(file, first), sign(file, second)]
    for keys in (None, [trusted[0]], [trusted[1]], [stranger, trusted[1]]):
        runner.open(file, keys=keys).run(np.zeros((1, 3), np.float32))
    with pytest.raises(RunnerError, match="signed by 2 other keys, and by none of the 1 keys"):
        runner.open(file, keys=[stranger])
    with pytest.raises(RunnerError, match="none of the 0 keys"):
        runner.open(file, keys=[])
    with pytest.raises(RunnerError, match="keys is NULL, and key_count is not 0"):
        runner.open(file, key_count=1)


def test_wrong_signatures(runner: Runner, file: Path) -> None:
    """A changed signature, and a signature of another manifest under a trusted key; another right one does not make up for it."""
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = sign(file, key)
    other_public = sign(file, other)
    signed = bytearray(file.read_bytes())
    signature = signing.HEADER.size + 32
    signed[signature] ^= 1
    _rewrite(file, signed)
    for keys in ([public], [public, other_public], [other_public, public]):
        with pytest.raises(RunnerError, match=f"wrong signature for the key {public.hex()}: do not use the file"):
            runner.open(file, keys=keys)
    runner.open(file, keys=[other_public])


def test_a_changed_manifest(runner: Runner, file: Path) -> None:
    """Its checksums are right, its signature is not."""
    public = sign(file, Ed25519PrivateKey.generate())
    with_manifest(file, '"Linear"', '"Lineal"')
    runner.open(file)
    with pytest.raises(RunnerError, match="wrong signature"):
        runner.open(file, keys=[public])


def test_an_unsigned_file_is_not_read(runner: Runner, file: Path) -> None:
    """The signature is verified before anything behind the manifest."""
    stranger = sign(file, Ed25519PrivateKey.generate())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunnerError, match="signed by 1 other keys"):
        runner.open(file, keys=[Ed25519PrivateKey.generate().public_key().public_bytes_raw()])
    with pytest.raises(RunnerError, match="checksum of its segment"):
        runner.open(file, keys=[stranger])


def test_keys_in_files(runner: Runner, installed: Path, file: Path, tmp_path: Path) -> None:
    """PEM, as openssl writes it, of Ed25519 alone; `hybrid-run --key` reads the same files."""
    key = Ed25519PrivateKey.generate()
    public = sign(file, key)
    mine = _in_pem(key, tmp_path / "mine.pem")
    other = _in_pem(Ed25519PrivateKey.generate(), tmp_path / "other.pem")
    assert runner.read_key(mine) == public
    for wrong in (_in_pem(x25519.X25519PrivateKey.generate(), tmp_path / "x25519.pem"), file):
        with pytest.raises(RunnerError, match=f"{wrong}: it holds no public key of Ed25519 in PEM"):
            runner.read_key(wrong)
    with pytest.raises(RunnerError, match="cannot be opened"):
        runner.read_key(tmp_path / "missing.pem")
    program = installed / "bin/hybrid-run"
    assert "output0" in run(program, file, "--key", other, "--key", mine)
    refused = subprocess.run([program, file, "--key", other], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "by none of the 1 keys that were given" in refused.stderr


def test_a_system_without_openssl(installed: Path, file: Path, tmp_path: Path) -> None:
    """The error names the library, and comes only where keys are given."""
    library = tmp_path / "libcrypto.so.3"
    library.write_bytes(b"no library")
    program = installed / "bin/hybrid-run"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    subprocess.run([program, file], env=environment, check=True, capture_output=True)
    mine = _in_pem(Ed25519PrivateKey.generate(), tmp_path / "mine.pem")
    refused = subprocess.run(
        [program, file, "--key", mine], env=environment, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "libcrypto.so.3, is not there" in refused.stderr
