"""Writes `.hybrid` files: header, manifest, segments. Equal contents give equal bytes."""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torch_hybrid_backend.artifact.coding import coded
from torch_hybrid_backend.artifact.manifest import FORMAT, Constant, Manifest, Segment
from torch_hybrid_backend.errors import HybridError

MAGIC = b"\x89HYBRID\n"
PAGE_BYTES = 4096
CHECKSUM_BYTES = 32
MAX_MANIFEST_BYTES = 16 << 20
HEADER = struct.Struct("<8sIIQ32sQ")  # magic, format, signatures, manifest's size and SHA-256, file's size
_TENSOR_ALIGNMENT = 64
# Segments of weights are checked by several threads: a larger segment than that has one tensor.
_WEIGHTS_BYTES = 8 << 20
# Tensors of so many bytes are coded apart from others, whose values would be in their way.
_CUT_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A segment before its place in the file is known. `decoded`: how many bytes it has decoded; None if it is not coded."""

    name: str
    kind: str
    content: bytes
    decoded: int | None = None


@dataclass(slots=True, eq=False)
class _Weights:
    """A segment of weights that grows. `cuts`: where large tensors begin and end."""

    name: str
    content: bytearray
    cuts: dict[int, None]

    def add(self, memory: bytes) -> int:
        """The offset of a tensor that is added."""
        self.content.extend(b"\0" * (-len(self.content) % _TENSOR_ALIGNMENT))
        begin = len(self.content)
        self.content.extend(memory)
        if len(memory) >= _CUT_BYTES:
            self.cuts.update({begin: None, len(self.content): None})
        return begin

    def part(self) -> _Part:
        """The segment, coded where that makes it smaller by much."""
        content = bytes(self.content)
        short = coded(content, [cut for cut in self.cuts if 0 < cut < len(content)])
        if short is None:
            return _Part(self.name, "weights", content)
        return _Part(self.name, "weights", short, len(content))


class Writer:
    """Collects segments and tensors, then writes the file. Tensors with equal bytes are kept once."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._weights: list[_Weights] = []
        self._blobs: dict[tuple[int, bytes], tuple[str, int]] = {}  # (size, SHA-256) -> segment, offset
        self._constants: dict[Constant, int] = {}
        self._begins_segment = True

    def add_segment(self, kind: str, name: str, content: bytes) -> str:
        """Add a segment that is no weights; return its name."""
        self._parts.append(_Part(name, kind, content))
        return name

    def begin_segment(self) -> None:
        """Put the tensors that are added from now on, and were not added before, into other segments than those before."""
        self._begins_segment = True

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """Add a strided tensor on the CPU, with its sizes and strides; return its number among the constants."""
        memory = _memory(tensor)
        segment, offset = self._place(memory)
        dtype = str(tensor.dtype).removeprefix("torch.")
        constant = Constant(segment, offset, dtype, tuple(tensor.shape), tensor.stride())
        return self._constants.setdefault(constant, len(self._constants))

    @property
    def constants(self) -> tuple[Constant, ...]:
        """The tensors that were added, by number."""
        return tuple(self._constants)

    def write(self, path: Path, manifests: Callable[[tuple[Segment, ...]], Sequence[Manifest]]) -> int:
        """Write the file in one step, replacing one that is there; return its size in bytes.

        `manifests` makes those of all variants, in the order in which a reader looks at them, of the segments. Raises OSError where the file
        cannot be written, HybridError for a manifest that is too large.
        """
        parts = [*self._parts, *(weights.part() for weights in self._weights)]
        segments = [
            Segment(
                name=part.name,
                kind=part.kind,
                offset=0,
                size=len(part.content),
                sha256=hashlib.sha256(part.content).hexdigest(),
                encoding="none" if part.decoded is None else "huffman",
                decoded=part.decoded,
            )
            for part in parts
        ]
        text, segments, end = _laid_out(segments, manifests)
        if len(text) > MAX_MANIFEST_BYTES:
            raise HybridError(
                f"the manifest of {path} would have {len(text)} bytes; at most {MAX_MANIFEST_BYTES} are allowed: "
                "export fewer entries to one file"
            )
        header = HEADER.pack(MAGIC, FORMAT, 0, len(text), hashlib.sha256(text).digest(), end)
        header = header.ljust(PAGE_BYTES - CHECKSUM_BYTES, b"\0")
        header += hashlib.sha256(header).digest()
        pieces = [(0, header), (PAGE_BYTES, text)]
        pieces += [(segment.offset, part.content) for segment, part in zip(segments, parts, strict=True)]
        replace_file(path, pieces)
        return end

    def _place(self, memory: bytes) -> tuple[str, int]:
        key = (len(memory), hashlib.sha256(memory).digest())
        if key not in self._blobs:
            filled = len(self._weights[-1].content) if self._weights else 0
            if self._begins_segment or filled + len(memory) + _TENSOR_ALIGNMENT > _WEIGHTS_BYTES:
                self._begins_segment = False
                self._weights.append(_Weights(f"weights.{len(self._weights)}", bytearray(), {}))
            self._blobs[key] = self._weights[-1].name, self._weights[-1].add(memory)
        return self._blobs[key]


def _laid_out(
    segments: Sequence[Segment], manifests: Callable[[tuple[Segment, ...]], Sequence[Manifest]]
) -> tuple[bytes, list[Segment], int]:
    """The manifest's text, the segments in their places, and where the file ends. Places decide the length of the text, and it decides them."""
    length = 0
    while True:
        end = PAGE_BYTES + length
        placed = []
        for segment in segments:
            begin = end + -end % PAGE_BYTES
            placed.append(replace(segment, offset=begin))
            end = begin + segment.size
        *before, last = manifests(tuple(placed))
        text = last.to_json(before).encode()
        if len(text) == length:
            return text, placed, end
        length = len(text)


def _memory(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor from its first element to its last."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    flat = tensor.detach().as_strided((span,), (1,)) if span else tensor.detach().reshape(-1)
    return flat.contiguous().view(torch.uint8).numpy().tobytes() if span else b""


def replace_file(path: Path, pieces: Sequence[tuple[int, bytes]]) -> None:
    """Write pieces at their offsets to a file, in one step, with zeros between them. Raises OSError where that cannot be."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with temporary.open("xb") as file:
            for offset, content in pieces:
                file.write(b"\0" * (offset - file.tell()))
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
