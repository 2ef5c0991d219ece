"""Tensors in a small file, bit for bit: docs/compressed_format.md says what lies where.

Floating-point weights lose their zeros and what is predictable of their exponents; indices of clusters (`shared_weights`) are where it
gains most. Nothing is unpickled. A file's checksum is looked at before the rest; what one with a right checksum says is believed only as
far as its size allows, so that no file makes this module use more memory than 1,024 times its size.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torch_hybrid_backend.arguments import check_module, described
from torch_hybrid_backend.compression.shared_weights import restore_form, weight_name
from torch_hybrid_backend.compression.word_lengths import word_lengths
from torch_hybrid_backend.errors import ArgumentError, CompressedFileError, HybridError, failures
from torch_hybrid_backend.runtime.native.ops import huffman_decode, huffman_encode

Bytes = NDArray[np.uint8]

_MAGIC = b"hybridw\n"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 32  # SHA-256
# The number of a dtype in a file is its position here: new ones are added at the end.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
# How a tensor is kept.
_DENSE, _SPARSE, _SAME = range(3)
# How bytes are kept.
_STORED, _CODED = range(2)
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 58
_LENGTHS_BYTES = 128  # 256 lengths of words, two in a byte
# A coded stream that is so little smaller is not worth the time to decode it.
_WORTHWHILE = 0.97


def save_compressed(what: nn.Module | Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Writes a module's `state_dict()`, or any tensors by name, to a file; a file that is there is replaced in one step.

    Tensors of any shape, strides and device, of the dtypes of docs/compressed_format.md. Tensors that read the same memory alike (tied
    weights) are kept once. Raises HybridError for what is no tensor or none of these dtypes, ArgumentError for a folder that does not exist,
    OSError where the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ArgumentError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not isinstance(what, nn.Module | Mapping):
        raise ArgumentError(f"save_compressed got {described(what)}; it must be a model or a dict of tensors by name")
    tensors = what.state_dict() if isinstance(what, nn.Module) else what
    writer = _Writer()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    _replace(path, writer.finished())


def load_compressed(path: str | os.PathLike[str], into: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """The tensors that `save_compressed` wrote, by name, on the CPU.

    into: a model like the one that was compressed. Its weights are given the compressed form where the saved one's have it, and then all
    of the file's tensors, which must be those of its `state_dict()`.

    Raises CompressedFileError for a file that is damaged or none of ours, OSError where it cannot be read, ArgumentError where it is no file
    of a model like `into`, which is left as it is, and HybridError where single weights do not fit it, which then is not to be used.
    """
    if into is not None:
        check_module(into, "load_compressed")
    tensors = dict(_Reader(path).tensors())
    if into is not None:
        _check_fits(tensors, into, os.fspath(path))
        restore_form(into, tensors)
        try:
            into.load_state_dict(tensors)
        except failures(RuntimeError) as error:
            raise HybridError(f"{os.fspath(path)} is no file of this model: {error}") from error
    return tensors


def _check_fits(tensors: Mapping[str, torch.Tensor], model: nn.Module, path: str) -> None:
    """Raise ArgumentError unless the tensors are those of `model.state_dict()`, compressed or not."""
    own = model.state_dict()
    # The parts of a shared weight count as the weight that it stands for.
    in_file, in_model = ({weight_name(name) for name in names} for names in (tensors, own))
    shapes = [
        f"{name!r} is {tuple(tensors[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in tensors.keys() & own.keys()
        if weight_name(name) == name and tensors[name].shape != own[name].shape
    ]
    faults = [
        f"it lacks {_some(in_model - in_file)}" if in_model - in_file else "",
        f"it has {_some(in_file - in_model)}, which the model has not" if in_file - in_model else "",
        min(shapes, default=""),
    ]
    if any(faults):
        raise ArgumentError(
            f"{path} holds the weights of another model than this {type(model).__name__}: {', and '.join(filter(None, faults))}; "
            "pass a model like the one that was saved, or none to get the tensors alone"
        )


def _some(names: set[str]) -> str:
    """For example "'weight', 'bias' and 3 more"."""
    shown = ", ".join(map(repr, sorted(names)[:2]))
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


class _Writer:
    """The bytes of a file, tensor by tensor."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0
        # By the memory that tensors have: which came first. They are held, or another one might get the memory.
        self._first: dict[object, tuple[int, torch.Tensor]] = {}

    def add(self, name: str, tensor: object) -> None:
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.is_meta
            or tensor.dtype not in _DTYPES
            or tensor.layout != torch.strided
        ):
            kind = (
                f"{tensor.layout} {tensor.dtype} on {tensor.device}"
                if isinstance(tensor, torch.Tensor)
                else str(type(tensor))
            )
            legal = ", ".join(str(dtype) for dtype in _DTYPES)
            raise HybridError(
                f"{name!r} cannot be saved: it is {kind}; it must be a strided tensor with data, of one of {legal}"
            )
        encoded = name.encode()
        if len(encoded) > 0xFFFF:
            raise HybridError(f"{name[:40]!r}... is too long: a name has at most 65,535 bytes")
        self._parts += [struct.pack("<H", len(encoded)), encoded]
        # The same memory may be read conjugated or negated.
        bits = (tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)
        number, _ = self._first.setdefault(memory, (self._count, tensor))
        if number != self._count:
            self._parts.append(struct.pack("<BI", _SAME, number))
        else:
            form, streams = _smallest(_elements(tensor))
            self._parts.append(struct.pack("<BBB", form, _DTYPES.index(tensor.dtype), tensor.dim()))
            self._parts.append(struct.pack(f"<{tensor.dim()}Q", *tensor.shape))
            for stream in streams:
                self._parts += stream.parts()
        self._count += 1

    def finished(self) -> list[bytes]:
        """All of it, in parts, the checksum last."""
        parts = [_HEAD.pack(_MAGIC, _VERSION, self._count), *self._parts]
        checksum = hashlib.sha256()
        for part in parts:
            checksum.update(part)
        return [*parts, checksum.digest()]


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Bytes, and the lengths of the words that they are to be coded by; None where they are to be stored."""

    symbols: Bytes
    lengths: Bytes | None
    size: int

    @staticmethod
    def of(symbols: Bytes) -> _Stream:
        symbols = np.ascontiguousarray(symbols)
        counts = torch.bincount(torch.from_numpy(symbols), minlength=256).numpy()
        shares = counts[counts > 0] / max(len(symbols), 1)
        # What no code can do better than, before one is made.
        if _LENGTHS_BYTES - float(shares @ np.log2(shares)) * len(symbols) / 8 < _WORTHWHILE * len(symbols):
            lengths = np.array(word_lengths(counts.tolist()), dtype=np.uint8)
            size = (int(counts @ lengths) + 7) // 8
            if _LENGTHS_BYTES + size < _WORTHWHILE * len(symbols):
                return _Stream(symbols, lengths, size)
        return _Stream(symbols, None, len(symbols))

    def parts(self) -> list[bytes]:
        if self.lengths is None:
            return [struct.pack("<BQ", _STORED, self.size), self.symbols.tobytes()]
        coded = torch.empty(self.size, dtype=torch.uint8)
        huffman_encode(torch.from_numpy(self.symbols), torch.from_numpy(self.lengths), coded)
        head = struct.pack("<BQ", _CODED, self.size)
        return [head, (self.lengths[::2] | self.lengths[1::2] << 4).tobytes(), coded.numpy().tobytes()]


def _width(dtype: torch.dtype) -> int:
    """Bytes of an element as files count them: a complex number is two."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def _elements(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's elements in order, (n,) unsigned, of `_width` bytes; bits as they are."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return plain.numpy().view(f"<u{_width(tensor.dtype)}")


def _smallest(elements: NDArray[Any]) -> tuple[int, list[_Stream]]:
    """The form that takes less, and its streams."""
    dense = _planes(elements)
    nonzero = elements != 0
    if np.count_nonzero(nonzero) * 16 > len(elements) * 15:
        return _DENSE, dense
    sparse = [_Stream.of(np.packbits(nonzero, bitorder="little")), *_planes(elements[nonzero])]
    if sum(stream.size for stream in sparse) < sum(stream.size for stream in dense):
        return _SPARSE, sparse
    return _DENSE, dense


def _planes(elements: NDArray[Any]) -> list[_Stream]:
    """The first bytes of all elements, then the second, and so on: exponents have much in common, low digits nothing."""
    width = elements.dtype.itemsize
    return [_Stream.of(plane) for plane in elements.view(np.uint8).reshape(-1, width).T]


def _replace(path: Path, parts: list[bytes]) -> None:
    """Readers see the old file or all of the new one."""
    new = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with new.open("xb") as file:
            file.writelines(parts)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class _Reader:
    """A file's tensors. What it says of sizes is compared with what is there before memory is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._data: Bytes = np.fromfile(path, dtype=np.uint8)
        self._at = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        end = len(self._data) - _CHECKSUM_BYTES
        if end < _HEAD.size or self._data[: len(_MAGIC)].tobytes() != _MAGIC:
            raise self._error("it is none that `save_compressed` wrote")
        _, version, count = self._unpack(_HEAD.format)
        if version != _VERSION:
            raise self._error(f"it has version {version} of the format, this package reads version {_VERSION}")
        if hashlib.sha256(self._data[:end].data).digest() != self._data[end:].tobytes():
            raise self._error("its checksum is wrong: it was damaged or is not complete")
        self._data = self._data[:end]
        names: set[str] = set()
        found: list[torch.Tensor] = []
        for _ in range(count):
            name = self._name()
            if name in names:
                raise self._error(f"it has two tensors of the name {name!r}")
            names.add(name)
            found.append(self._tensor(found))
            yield name, found[-1]
        if self._at != end:
            raise self._error("there is more behind its last tensor")

    def _error(self, what: str) -> CompressedFileError:
        return CompressedFileError(f"{self._path} cannot be read as a compressed file: {what}")

    def _take(self, size: int) -> Bytes:
        if size > len(self._data) - self._at:
            raise self._error("it ends too early")
        self._at += size
        return self._data[self._at - size : self._at]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)).data)

    def _name(self) -> str:
        try:
            return self._take(self._unpack("<H")[0]).tobytes().decode()
        except UnicodeDecodeError:
            raise self._error("a name is no UTF-8") from None

    def _tensor(self, earlier: list[torch.Tensor]) -> torch.Tensor:
        (form,) = self._unpack("<B")
        if form == _SAME:
            (number,) = self._unpack("<I")
            if number >= len(earlier):
                raise self._error("a tensor is to be the same as one that does not come before it")
            return earlier[int(number)]
        if form not in (_DENSE, _SPARSE):
            raise self._error(f"there is no form {form} of tensors")
        number, dimensions = self._unpack("<BB")
        if number >= len(_DTYPES) or dimensions > _MOST_DIMENSIONS:
            raise self._error(f"there is no dtype {number}, or none has {dimensions} dimensions")
        dtype, sizes = _DTYPES[number], self._unpack(f"<{dimensions}Q")
        if math.prod(max(size, 1) for size in sizes) > _MOST_ELEMENTS:
            raise self._error("a tensor is larger than any memory")
        count, width = math.prod(sizes) * (2 if dtype.is_complex else 1), _width(dtype)
        if form == _DENSE:
            elements = _joined(self._planes(count, width))
        else:
            mask = self._mask(count)
            planes = self._planes(int(np.count_nonzero(mask)), width)
            elements = np.zeros(count, dtype=f"<u{width}")
            elements[mask] = _joined(planes)
        if dtype == torch.bool and (elements > 1).any():
            raise self._error("what should be true or false is neither")
        tensor: torch.Tensor = torch.from_numpy(elements.view(np.uint8)).view(dtype).view(sizes)
        return tensor

    def _planes(self, count: int, width: int) -> list[Bytes]:
        return [self._stream(count) for _ in range(width)]

    def _mask(self, count: int) -> NDArray[np.bool_]:
        packed = self._stream((count + 7) // 8)
        if count % 8 and packed[-1] >> count % 8:
            raise self._error("it says of elements that do not exist that they are not zero")
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def _stream(self, count: int) -> Bytes:
        method, size = self._unpack("<BQ")
        if method == _STORED and size == count:
            return self._take(size)
        if method != _CODED:
            raise self._error(f"{size} bytes stand for {count} by method {method}")
        packed = self._take(_LENGTHS_BYTES)
        lengths = np.stack((packed & 15, packed >> 4), axis=1).ravel()
        coded = self._take(size)
        if count > 8 * size:  # a word has a bit at least
            raise self._error(f"{size} bytes cannot stand for {count}")
        symbols = torch.empty(count, dtype=torch.uint8)
        try:
            huffman_decode(torch.from_numpy(coded), torch.from_numpy(lengths), symbols)
        except HybridError as error:
            raise self._error(str(error)) from error
        return symbols.numpy()


def _joined(planes: list[Bytes]) -> NDArray[Any]:
    """The elements whose first bytes, second bytes and so on the planes are."""
    width = len(planes)
    joined = np.empty((len(planes[0]), width), dtype=np.uint8)
    for k, plane in enumerate(planes):
        joined[:, k] = plane
    return joined.view(f"<u{width}").ravel()
