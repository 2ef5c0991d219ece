"""Artifacts come back as they were written; the machine code comes first."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_hybrid_backend.engines.triton.artifact import Header, header_at, read, write
from torch_hybrid_backend.errors import CacheError

_HEADER = Header("def kernel(): ...", "kernel", {"x": "*fp32"}, {"BLOCK": 128}, 128, 4096)


@pytest.mark.parametrize("code", [b"", b"\x7fELF" + bytes(range(256))])
def test_an_artifact_comes_back(code: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.kernel"
    write(path, _HEADER, code)
    assert path.read_bytes().startswith(code)
    assert read(path) == (_HEADER, code)


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[-30:], lambda data: b"x" * 99]
)
def test_damaged_files_are_refused(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Empty, cut off at either end, or something else."""
    path = tmp_path / "a.kernel"
    write(path, _HEADER, b"code")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CacheError, match="no artifact of the Triton engine"):
        read(path)


def test_without_machine_code_an_image_begins_with_the_header(tmp_path: Path) -> None:
    """An image begins with the header for a driver, which is told where an image begins: as far as the first zero."""
    path = tmp_path / "a.kernel"
    write(path, _HEADER)
    assert header_at(path.read_bytes().split(b"\0")[0]) == _HEADER
    for other in (b"", b"\x7fELF", b"[]", b'{"text": "no more"}'):
        with pytest.raises(CacheError, match="no kernel for Triton's interpreter"):
            header_at(other)
