"""Files are laid out as docs/hybrid_format.md says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_hybrid_backend.artifact import writer
from torch_hybrid_backend.artifact.manifest import Manifest, Segment
from torch_hybrid_backend.artifact.writer import HEADER, MAGIC, PAGE_BYTES, Writer
from torch_hybrid_backend.errors import HybridError


def _manifests(made: Writer, model: str = "Net") -> Callable[[tuple[Segment, ...]], list[Manifest]]:
    def manifests(segments: tuple[Segment, ...]) -> list[Manifest]:
        return [Manifest("0", "0", model, segments, (), (), made.constants, (), (), (), "report")]

    return manifests


def _written(made: Writer, folder: Path) -> tuple[bytes, Manifest]:
    size = made.write(folder / "a.hybrid", _manifests(made))
    content = (folder / "a.hybrid").read_bytes()
    assert len(content) == size
    magic, version, signatures, length, checksum, end = HEADER.unpack_from(content)
    assert (magic, version, signatures, end) == (MAGIC, 1, 0, size)
    text = content[PAGE_BYTES : PAGE_BYTES + length]
    assert hashlib.sha256(text).digest() == checksum
    assert hashlib.sha256(content[: PAGE_BYTES - 32]).digest() == content[PAGE_BYTES - 32 : PAGE_BYTES]
    return content, Manifest.from_json(text.decode())


def test_segments_lie_on_pages(tmp_path: Path) -> None:
    """Each begins at the first page behind what is before it, and has its checksum."""
    made = Writer()
    made.add_segment("report", "report", b"{}")
    made.add_segment("plan", "plan", b"x" * 5000)
    made.add_tensor(torch.arange(8))
    content, manifest = _written(made, tmp_path)
    end = PAGE_BYTES + len(manifest.to_json().encode())
    for segment in manifest.segments:
        assert segment.offset == end + -end % PAGE_BYTES
        end = segment.offset + segment.size
        assert hashlib.sha256(content[segment.offset : end]).hexdigest() == segment.sha256
    assert end == len(content)


def test_equal_tensors_are_kept_once(tmp_path: Path) -> None:
    """Equal bytes have one copy, whatever form reads them; a tensor's span is kept, not its storage."""
    made = Writer()
    whole = torch.arange(32, dtype=torch.float32)
    numbers = [
        made.add_tensor(each) for each in (whole, whole.clone(), whole.view(4, 8), whole[4:8], whole.view(4, 8).t())
    ]
    assert numbers == [0, 0, 1, 2, 3]
    _, manifest = _written(made, tmp_path)
    assert [constant.offset for constant in manifest.constants] == [0, 0, 128, 0]
    assert manifest.constants[3].strides == (1, 8)
    assert manifest.segments[0].size == 128 + 16


def test_large_tensors_have_segments_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the work of checksums by segments."""
    monkeypatch.setattr(writer, "_WEIGHTS_BYTES", 1 << 10)
    made = Writer()
    for number in range(4):
        made.add_tensor(torch.full((128,), float(number)))
    _, manifest = _written(made, tmp_path)
    assert [segment.name for segment in manifest.segments] == ["weights.0", "weights.1", "weights.2", "weights.3"]


def test_a_new_segment(tmp_path: Path) -> None:
    """Tensors that were added before stay where they are; others lie apart."""
    made = Writer()
    first, second = torch.arange(16), torch.arange(8)
    made.add_tensor(first)
    made.begin_segment()
    assert [made.add_tensor(each) for each in (first, second)] == [0, 1]
    _, manifest = _written(made, tmp_path)
    assert [constant.segment for constant in manifest.constants] == ["weights.0", "weights.1"]


def test_a_manifest_that_no_reader_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(HybridError, match="at most 100"):
        Writer().write(tmp_path / "a.hybrid", _manifests(Writer()))
    assert not list(tmp_path.iterdir())
