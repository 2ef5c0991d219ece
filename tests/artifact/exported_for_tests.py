"""Models exported to a file and opened again, for tests."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.artifact.manifest import Manifest
from torch_hybrid_backend.artifact.model import LoadedModel, load
from torch_hybrid_backend.artifact.writer import CHECKSUM_BYTES, HEADER, PAGE_BYTES
from torch_hybrid_backend.driver.export import ExportReport, export

FAST = {"placement": "estimate", "strict": True}


def exported(
    model: torch.nn.Module, args: Sequence[Any], folder: Path, **given: Any
) -> tuple[ExportReport, LoadedModel]:
    """The report of an export, and the model opened from its file, whose sample call has been made."""
    options: Mapping[str, object] = {**FAST, **given.pop("options", {})}
    report = export(model, tuple(args), folder / "model.hybrid", options=options, **given)
    return report, load(report.path)


def manifest_of(path: Path) -> Manifest:
    """The manifest of a file, unchecked."""
    content = path.read_bytes()
    size = HEADER.unpack_from(content)[3]
    return Manifest.from_json(content[PAGE_BYTES : PAGE_BYTES + size].decode())


def forged(path: Path, number: int, values: torch.Tensor) -> None:
    """Write other values into a constant of a file, with checksums that are right."""
    constant = manifest_of(path).constants[number]
    _with_bytes(path, constant.segment, constant.offset, values.numpy().tobytes())


def with_plan(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the plan of a file's first entry, which becomes no longer, with checksums that are right."""
    manifest = manifest_of(path)
    segment = next(each for each in manifest.segments if each.name == manifest.entries[0].plan)
    plan = json.loads(path.read_bytes()[segment.offset : segment.offset + segment.size])
    edit(plan)
    text = json.dumps(plan, separators=(",", ":"), ensure_ascii=False).encode()
    _with_bytes(path, segment.name, 0, text.ljust(segment.size))


def _with_bytes(path: Path, name: str, offset: int, new: bytes) -> None:
    segment = next(each for each in manifest_of(path).segments if each.name == name)
    assert offset + len(new) <= segment.size
    content = bytearray(path.read_bytes())
    begin = segment.offset + offset
    content[begin : begin + len(new)] = new
    digest = hashlib.sha256(content[segment.offset : segment.offset + segment.size]).hexdigest()
    path.write_bytes(content)
    with_manifest(path, segment.sha256, digest)


def with_manifest(path: Path, old: str, new: str) -> None:
    """Write a text of equal length in place of another into the manifest of a file, with checksums that are right."""
    content = bytearray(path.read_bytes())
    size = HEADER.unpack_from(content)[3]
    text = bytes(content[PAGE_BYTES : PAGE_BYTES + size]).replace(old.encode(), new.encode())
    assert len(text) == size
    assert text != content[PAGE_BYTES : PAGE_BYTES + size]
    content[PAGE_BYTES : PAGE_BYTES + size] = text
    struct.pack_into("<32s", content, 24, hashlib.sha256(text).digest())
    end = PAGE_BYTES - CHECKSUM_BYTES
    content[end:PAGE_BYTES] = hashlib.sha256(content[:end]).digest()
    path.write_bytes(content)
