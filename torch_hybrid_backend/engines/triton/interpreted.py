"""Kernels run by Triton's interpreter, on the CPU: the same programs, plan and memory as on a GPU, slowly (`TRITON_INTERPRET=1`).

The interpreter computes with NumPy. What it lacks has a substitute here, in one table: the functions of NVIDIA's libdevice.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_hybrid_backend.core.program import DeviceLaunch
from torch_hybrid_backend.engines.triton import artifact
from torch_hybrid_backend.engines.triton.source import function_of
from torch_hybrid_backend.errors import HybridError

_log = logging.getLogger(__name__)
_FAILED = 1
# See csrc/src/steps/external_call.cc.
_EXTERNAL = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int32, ctypes.c_void_p
)


# libdevice's functions by name, on NumPy arrays.
_UNARY: Mapping[str, Callable[..., Any]] = {
    "nearbyint": np.rint,
    "trunc": np.trunc,
    "expm1": np.expm1,
    "log10": np.log10,
    "log1p": np.log1p,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "erfc": lambda x: torch.erfc(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
}
_BINARY: Mapping[str, Callable[..., Any]] = {"fmod": np.fmod, "pow": np.power, "atan2": np.arctan2}
# Reductions by functions of our own, which the interpreter would call for one element after the other.
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"larger": np.max, "smaller": np.min, "multiply": np.prod}
# In a program's text.
_SUBSTITUTES: Mapping[str, str] = {
    "from triton.language.extra import libdevice": f"from {__name__} import libdevice, reduce",
    "tl.reduce(": "reduce(",
}


class Libdevice:
    """Stands for `triton.language.extra.libdevice` in interpreted programs."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _UNARY.get(name) or _BINARY.get(name)
        if function is None:
            raise HybridError(
                f"Triton's interpreter has no substitute for libdevice.{name} (engines/triton/interpreted.py)"
            )
        return functools.partial(_apply, function)


libdevice = Libdevice()


def _apply(function: Callable[..., Any], *operands: Any) -> Any:
    """A NumPy function of the interpreter's values, and numbers; the result has the first one's type."""
    arrays = np.broadcast_arrays(*map(_data, operands))
    return _value(function(*arrays), operands[0])


def reduce(x: Any, axis: int, combine: Any, keep_dims: bool = False) -> Any:
    """Stands for `tl.reduce`."""
    return _value(_REDUCTIONS[combine.fn.__name__](_data(x), axis=axis, keepdims=keep_dims), x)


def _data(value: Any) -> Any:
    return value.handle.data if hasattr(value, "handle") else value


def _value(data: Any, like: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    scalar = like.type.scalar
    data = np.asarray(data).astype(_data(like).dtype)
    # The interpreter holds a scalar as an array of one element; beside a block it becomes one.
    is_block = like.type.is_block() or data.size > 1
    type_ = tl.block_type(scalar, list(data.shape)) if is_block else scalar
    return tl.tensor(TensorHandle(data, scalar), type_)


@functools.cache
def _function(path: str) -> tuple[Any, artifact.Header]:
    """The function of an artifact's program, and what launching it takes."""
    header, _ = artifact.read(Path(path))
    return interpretable(header.text, header.symbol), header


def interpretable(text: str, name: str) -> Any:
    """A program's function, for Triton's interpreter. Raises HybridError where Triton was imported before it was told to interpret."""
    for own, substitute in _SUBSTITUTES.items():
        text = text.replace(own, substitute)
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.zeros, InterpretedFunction):
        raise HybridError("Triton was imported before TRITON_INTERPRET=1 was set: set it before the process starts")
    _mend()
    return function_of(text, name, Path(tempfile.mkdtemp(dir=_folder().name)))


@functools.cache
def _mend() -> None:
    """Have the interpreter make a block of bool of a comparison of two scalars: it takes that for a number of their type (Triton 3.7,
    `create_splat`), and `&` of a float then fails."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def splat(_: Any, type_: Any, scalar: Any) -> Any:
        return TensorHandle(np.full(type_.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype.scalar)

    InterpreterBuilder.create_splat = splat


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where programs lie, as long as the process lives: the interpreter reads one again when it first runs."""
    return tempfile.TemporaryDirectory(prefix="torch-hybrid-backend-triton-")


@dataclass(frozen=True, slots=True)
class InterpretedLaunch(DeviceLaunch):
    """A launch that Triton's interpreter makes on the CPU's memory; what the plan does around it is as for one on a GPU."""

    def describe(self) -> dict[str, Any]:
        address = ctypes.cast(_launcher(self), ctypes.c_void_p).value
        title = f"{self.symbol}, interpreted"
        return {"kind": "external", "function": address, "context": 0, "title": title, "arguments": self.arguments}


@functools.cache
def _launcher(launch: InterpretedLaunch) -> Any:
    """A C function that makes the launch. Kept for the life of the process: plans know its address."""

    def run(_context: int | None, addresses: Any, count: int, _stream: int | None) -> int:
        text = ""
        try:
            function, header = _function(launch.module)
            text = header.text
            tensors = [_pointer(addresses[i], header.dtypes[i]) for i in range(count)]
            if 0 not in launch.grid:
                with np.errstate(all="ignore"):
                    function[launch.grid](*tensors, *(scalar.value for scalar in launch.scalars), **header.constants)
        except BaseException:  # it must not go through C++
            _log.exception("the kernel %s cannot be interpreted:\n%s", launch.symbol, text)
            return _FAILED
        return 0

    return _EXTERNAL(run)


def _pointer(address: int, dtype: str) -> torch.Tensor:
    """A tensor that begins at an address. It has one element; kernels go beyond it by themselves."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer((ctypes.c_char * torch_dtype.itemsize).from_address(address), dtype=torch_dtype)
