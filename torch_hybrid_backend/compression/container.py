"""Lossless files of tensors in the format of docs/compressed_format.md.

Compression removes zeros and codes the bytes of exponents, which have much in common. Indices of clusters (`shared_weights`) gain most. Nothing
is unpickled. A file's checksum is verified first. Sizes in the file are then checked against the size of the file: reading takes
at most 1,024 times as much memory as the file.
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
from torch_hybrid_backend.compression.code_lengths import code_lengths
from torch_hybrid_backend.compression.shared_weights import restore_form, weight_name
from torch_hybrid_backend.errors import ArgumentError, CompressedFileError, HybridError, failures
from torch_hybrid_backend.runtime.native.ops import huffman_decode, huffman_encode

Bytes = NDArray[np.uint8]

_MAGIC = b"hybridw\n"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_CHECKSUM_BYTES = 32  # SHA-256
# A file holds the position of a dtype in this tuple: append new dtypes at the end.
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
# Forms of a tensor.
_DENSE, _SPARSE, _SAME = range(3)
# Methods of a stream.
_STORED, _CODED = range(2)
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 58
_LENGTHS_BYTES = 128  # 256 code lengths, two in a byte
# A stream is coded only if it becomes smaller than this share: otherwise decoding is not worth the time.
_WORTHWHILE = 0.97


def save_compressed(what: nn.Module | Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Write a module's `state_dict()`, or any tensors by name, to a file. An existing file is replaced atomically.

    Tensors may have any shape, strides and device, and the dtypes of docs/compressed_format.md. Tied weights are written once.

    Raises ArgumentError if `path` is a folder, or its folder does not exist; HybridError for a value that is no tensor, or has another dtype;
    OSError if the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise ArgumentError(f"cannot write {path}: it is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}; make the folder first")
    if not isinstance(what, nn.Module | Mapping):
        raise ArgumentError(f"save_compressed got {described(what)}; it must be a model or a dict of tensors by name")
    tensors = what.state_dict() if isinstance(what, nn.Module) else what
    writer = _Writer()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    _replace(path, writer.finished())


def load_compressed(path: str | os.PathLike[str], into: nn.Module | None = None) -> dict[str, torch.Tensor]:
    """Read the tensors that `save_compressed` wrote, by name, on the CPU.

    into: a model like the saved one. Weights that are compressed in the file become compressed in the model; then the model loads the tensors,
    which must be those of its `state_dict()`.

    Raises CompressedFileError if the file is damaged, or was not written by `save_compressed`; OSError if it cannot be read; ArgumentError if
    the file is of another model than `into`, which then is unchanged; HybridError if the values of a weight do not fit, after which `into` must
    not be used.
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
    # The table and indices of a shared weight count as one weight.
    in_file, in_model = ({weight_name(name) for name in names} for names in (tensors, own))
    shapes = [
        f"{name!r} is {tuple(tensors[name].shape)} in the file and {tuple(own[name].shape)} in the model"
        for name in tensors.keys() & own.keys()
        if weight_name(name) == name and tensors[name].shape != own[name].shape
    ]
    faults = [
        f"the file lacks {_some(in_model - in_file)}" if in_model - in_file else "",
        f"the model lacks {_some(in_file - in_model)}" if in_file - in_model else "",
        min(shapes, default=""),
    ]
    if any(faults):
        raise ArgumentError(
            f"{path} holds the weights of another model than this {type(model).__name__}: {', and '.join(filter(None, faults))}; "
            "pass a model like the saved one, or no model to get the tensors alone"
        )


def _some(names: set[str]) -> str:
    """For example "'weight', 'bias' and 3 more"."""
    shown = ", ".join(map(repr, sorted(names)[:2]))
    return f"{shown} and {len(names) - 2} more" if len(names) > 2 else shown


class _Writer:
    """Builder of a file's bytes, tensor by tensor."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0
        # Memory of a tensor -> the first tensor that has it, and its number. Held, so that no later tensor gets the same memory.
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
        """The parts of the file, the checksum last."""
        parts = [_HEAD.pack(_MAGIC, _VERSION, self._count), *self._parts]
        checksum = hashlib.sha256()
        for part in parts:
            checksum.update(part)
        return [*parts, checksum.digest()]


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Bytes of a file, and the code lengths to code them with; None to store them. `size`: their size in the file."""

    symbols: Bytes
    lengths: Bytes | None
    size: int

    @staticmethod
    def of(symbols: Bytes) -> _Stream:
        symbols = np.ascontiguousarray(symbols)
        counts = torch.bincount(torch.from_numpy(symbols), minlength=256).numpy()
        shares = counts[counts > 0] / max(len(symbols), 1)
        # The entropy is a lower bound of the coded size, cheaper than the code lengths.
        if _LENGTHS_BYTES - float(shares @ np.log2(shares)) * len(symbols) / 8 < _WORTHWHILE * len(symbols):
            lengths = np.array(code_lengths(counts.tolist()), dtype=np.uint8)
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
    """Bytes of an element in files, where a complex number counts as two elements."""
    return dtype.itemsize // (2 if dtype.is_complex else 1)


def _elements(tensor: torch.Tensor) -> NDArray[Any]:
    """The bits of a tensor's elements in order, as unsigned integers (n,) of `_width` bytes."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return plain.numpy().view(f"<u{_width(tensor.dtype)}")


def _smallest(elements: NDArray[Any]) -> tuple[int, list[_Stream]]:
    """The smaller form of the elements, and its streams."""
    dense = _planes(elements)
    nonzero = elements != 0
    if np.count_nonzero(nonzero) * 16 > len(elements) * 15:
        return _DENSE, dense
    sparse = [_Stream.of(np.packbits(nonzero, bitorder="little")), *_planes(elements[nonzero])]
    if sum(stream.size for stream in sparse) < sum(stream.size for stream in dense):
        return _SPARSE, sparse
    return _DENSE, dense


def _planes(elements: NDArray[Any]) -> list[_Stream]:
    """Streams of the first bytes of all elements, of the second, and so on. Bytes of exponents have much in common, low bytes nothing."""
    width = elements.dtype.itemsize
    return [_Stream.of(plane) for plane in elements.view(np.uint8).reshape(-1, width).T]


def _replace(path: Path, parts: list[bytes]) -> None:
    """Replace the file atomically: readers see either the old file or all of the new one."""
    new = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with new.open("xb") as file:
            file.writelines(parts)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class _Reader:
    """Reader of a file's tensors. Sizes in the file are checked against its length before memory is allocated."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._data: Bytes = np.fromfile(path, dtype=np.uint8)
        self._at = 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        end = len(self._data) - _CHECKSUM_BYTES
        if end < _HEAD.size or self._data[: len(_MAGIC)].tobytes() != _MAGIC:
            raise self._error("it was not written by `save_compressed`")
        _, version, count = self._unpack(_HEAD.format)
        if version != _VERSION:
            raise self._error(f"it has version {version} of the format; this package reads version {_VERSION}")
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
            raise self._error("it has bytes behind its last tensor")

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
            raise self._error("a name is not UTF-8") from None

    def _tensor(self, earlier: list[torch.Tensor]) -> torch.Tensor:
        (form,) = self._unpack("<B")
        if form == _SAME:
            (number,) = self._unpack("<I")
            if number >= len(earlier):
                raise self._error("a tensor is the same as one that does not come before it")
            return earlier[int(number)]
        if form not in (_DENSE, _SPARSE):
            raise self._error(f"a tensor has the form {form}; it must be {_DENSE}, {_SPARSE} or {_SAME}")
        number, dimensions = self._unpack("<BB")
        if number >= len(_DTYPES):
            raise self._error(f"there is no dtype {number}")
        if dimensions > _MOST_DIMENSIONS:
            raise self._error(f"a tensor has {dimensions} dimensions; it can have {_MOST_DIMENSIONS} at most")
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
            raise self._error("a boolean is neither true nor false")
        tensor: torch.Tensor = torch.from_numpy(elements.view(np.uint8)).view(dtype).view(sizes)
        return tensor

    def _planes(self, count: int, width: int) -> list[Bytes]:
        return [self._stream(count) for _ in range(width)]

    def _mask(self, count: int) -> NDArray[np.bool_]:
        packed = self._stream((count + 7) // 8)
        if count % 8 and packed[-1] >> count % 8:
            raise self._error("a mask marks elements that do not exist")
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
        if count > 8 * size:  # a code word has at least one bit
            raise self._error(f"{size} bytes cannot stand for {count}")
        symbols = torch.empty(count, dtype=torch.uint8)
        try:
            huffman_decode(torch.from_numpy(coded), torch.from_numpy(lengths), symbols)
        except HybridError as error:
            raise self._error(str(error)) from error
        return symbols.numpy()


def _joined(planes: list[Bytes]) -> NDArray[Any]:
    """The elements of their planes, the inverse of `_planes`."""
    width = len(planes)
    joined = np.empty((len(planes[0]), width), dtype=np.uint8)
    for k, plane in enumerate(planes):
        joined[:, k] = plane
    return joined.view(f"<u{width}").ravel()
