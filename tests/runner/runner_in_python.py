"""hybrid_runner.h by ctypes, on NumPy's arrays, for tests."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_LETTERS = {code: letter for letter, code in _CODES.items()}


class DLTensor(ctypes.Structure):
    """DLPack's struct."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Managed._fields_ = [
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("manager", ctypes.c_void_p),
    ("deleter", ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
]


class _Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("threads", ctypes.c_int32),
        ("share", ctypes.c_int32),
        ("skip_sample", ctypes.c_int32),
        ("keys", ctypes.c_void_p),
        ("key_count", ctypes.c_size_t),
        ("torch_folder", ctypes.c_char_p),
    ]


def run(*command: object) -> str:
    """Run a command, which must succeed; return what it prints."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


class RunnerError(Exception):
    """The text of hybrid_error."""


class Runner:
    """The library. `open` opens a file."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.hybrid_error.restype = ctypes.c_char_p
        self.c.hybrid_open.restype = ctypes.c_void_p
        self.c.hybrid_open.argtypes = [ctypes.c_char_p, ctypes.POINTER(_Options)]
        self.c.hybrid_read_key.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self.c.hybrid_close.argtypes = [ctypes.c_void_p]
        self.c.hybrid_reset.argtypes = [ctypes.c_void_p]
        self.c.hybrid_describe.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.c.hybrid_entry_count.restype = ctypes.c_size_t
        self.c.hybrid_entry_count.argtypes = [ctypes.c_void_p]
        self.c.hybrid_entry_name.restype = ctypes.c_char_p
        self.c.hybrid_entry_name.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.c.hybrid_manifest.restype = ctypes.c_char_p
        self.c.hybrid_manifest.argtypes = [ctypes.c_void_p]
        self.c.hybrid_library.restype = ctypes.c_char_p
        self.c.hybrid_library.argtypes = [ctypes.c_void_p]
        self.c.hybrid_run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.POINTER(DLTensor)),
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.POINTER(_Managed)),
            ctypes.c_size_t,
        ]

    def error(self) -> RunnerError:
        """The error of the calling thread's last failure."""
        return RunnerError(self.c.hybrid_error().decode())

    def open(self, path: Path, *, keys: Sequence[bytes] | None = None, **options: int) -> Model:
        """Open a file; raises RunnerError. `keys`: of 32 bytes each; `options`: other fields of HybridOptions."""
        given = _Options(**{"struct_size": ctypes.sizeof(_Options), "share": 1, **options})
        if keys is not None:
            given.keys = ctypes.cast(ctypes.create_string_buffer(b"".join(keys)), ctypes.c_void_p)
            given.key_count = len(keys)
        handle = self.c.hybrid_open(str(path).encode(), ctypes.byref(given))
        if handle is None:
            raise self.error()
        return Model(self, handle)

    def read_key(self, path: Path) -> bytes:
        """The public key in a file; raises RunnerError."""
        key = ctypes.create_string_buffer(32)
        if self.c.hybrid_read_key(str(path).encode(), key) != 0:
            raise self.error()
        return key.raw


class Model:
    """An opened file; it is closed with the object."""

    def __init__(self, runner: Runner, handle: int) -> None:
        self._runner = runner
        self.handle = handle

    def __del__(self) -> None:
        self._runner.c.hybrid_close(self.handle)

    def reset(self) -> None:
        """Set the states to what they were."""
        if self._runner.c.hybrid_reset(self.handle) != 0:
            raise self._runner.error()

    def run(self, *inputs: np.ndarray[Any, Any], outputs: int = 1, entry: str | None = None) -> list[Any]:
        """Run an entry; raises RunnerError."""
        return self.run_tensors(*map(dlpack, inputs), outputs=outputs, entry=entry)

    def run_tensors(self, *inputs: DLTensor | None, outputs: int = 1, entry: str | None = None) -> list[Any]:
        """Run an entry on DLPack's tensors, of which None is a NULL; raises RunnerError."""
        null = ctypes.POINTER(DLTensor)()
        pointers = (ctypes.POINTER(DLTensor) * len(inputs))(
            *(null if each is None else ctypes.pointer(each) for each in inputs)
        )
        results = (ctypes.POINTER(_Managed) * outputs)()
        name = None if entry is None else entry.encode()
        if self._runner.c.hybrid_run(self.handle, name, pointers, len(inputs), results, outputs) != 0:
            assert not any(results)
            raise self._runner.error()
        arrays = [_array(result.contents.tensor) for result in results]
        for result in results:
            result.contents.deleter(result)
        return arrays


def _integers(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def dlpack(array: np.ndarray[Any, Any], **members: Any) -> DLTensor:
    """The array as DLPack's struct, which borrows its memory. `members`: others than the array's; None: a NULL."""
    own = {
        "data": array.ctypes.data,
        "device_type": 1,
        "ndim": array.ndim,
        "code": _CODES[array.dtype.kind],
        "bits": 8 * array.itemsize,
        "lanes": 1,
        "shape": _integers(array.shape),
        "strides": _integers([stride // array.itemsize for stride in array.strides]),
    }
    return DLTensor(**{name: each for name, each in (own | members).items() if each is not None})


def _array(given: DLTensor) -> np.ndarray[Any, Any]:
    dtype = np.dtype(f"{_LETTERS[given.code]}{given.bits // 8}") if given.code != 6 else np.dtype(bool)
    sizes = given.shape[: given.ndim]
    strides = [stride * dtype.itemsize for stride in given.strides[: given.ndim]]
    if 0 in sizes:
        return np.empty(sizes, dtype)
    span = dtype.itemsize + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * span).from_address(given.data + given.byte_offset)
    return np.ndarray(sizes, dtype, memory, 0, strides).copy("K")
