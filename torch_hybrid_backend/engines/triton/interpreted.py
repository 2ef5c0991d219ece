"""Programs for Triton's interpreter, on the CPU (`TRITON_INTERPRET=1`). `host_driver.py` launches them.

The interpreter computes with NumPy. What it lacks has a substitute here, in one table: the functions of NVIDIA's libdevice.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_hybrid_backend.engines.triton.source import function_of
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder

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
    "fast_sinf": np.sin,
    "fast_cosf": np.cos,
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "erfc": lambda x: torch.erfc(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
}
_BINARY: Mapping[str, Callable[..., Any]] = {"fmod": np.fmod, "pow": np.power, "atan2": np.arctan2}
# Reductions by functions of our own, which the interpreter would call for one element after the other.
_REDUCTIONS: Mapping[str, Callable[..., Any]] = {"larger": np.max, "smaller": np.min, "multiply": np.prod}
# In a program's text.
_SUBSTITUTES: Mapping[str, str] = {
    "from triton.language.extra import libdevice": f"from {__name__} import associative_scan, libdevice, reduce",
    "tl.reduce(": "reduce(",
    "tl.associative_scan(": "associative_scan(",
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


def associative_scan(x: Any, axis: int, combine: Any) -> Any:
    """Stands for `tl.associative_scan`, of one block or a tuple of them: in steps that double (Hillis and Steele 1986), where the interpreter
    would call the function for one element after the other."""
    blocks = x if isinstance(x, tuple) else (x,)
    found = [_data(block) for block in blocks]
    shape = found[0].shape
    place = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    step = 1
    while step < shape[axis]:
        before = (_value(np.roll(data, step, axis), block) for data, block in zip(found, blocks, strict=True))
        after = (_value(data, block) for data, block in zip(found, blocks, strict=True))
        combined = combine.fn(*before, *after)
        parts = combined if isinstance(combined, tuple) else (combined,)
        found = [np.where(place < step, old, _data(new)) for old, new in zip(found, parts, strict=True)]
        step *= 2
    results = tuple(_value(data, block) for data, block in zip(found, blocks, strict=True))
    return results if isinstance(x, tuple) else results[0]


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


def interpretable(text: str, name: str) -> Any:
    """A program's function, for Triton's interpreter. Raises HybridError where Triton was imported before it was told to interpret."""
    for own, substitute in _SUBSTITUTES.items():
        text = text.replace(own, substitute)
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.zeros, InterpretedFunction):
        raise HybridError("Triton was imported before TRITON_INTERPRET=1 was set: set it before the process starts")
    _mend()
    return function_of(text, name, Path(tempfile.mkdtemp(dir=_folder().path)))


@functools.cache
def _mend() -> None:
    """Have the interpreter make a block of bool of a comparison of two scalars: it takes that for a number of their type (Triton 3.7,
    `create_splat`), and `&` of a float then fails."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def splat(_: Any, type_: Any, scalar: Any) -> Any:
        return TensorHandle(np.full(type_.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype.scalar)

    InterpreterBuilder.create_splat = splat


@functools.cache
def _folder() -> TemporaryFolder:
    """The folder of programs, which lives as long as the process: the interpreter reads one again when it first runs."""
    return TemporaryFolder()


def parameter(type_: str, address: int) -> Any:
    """A kernel's parameter that lies at an address, as the interpreter holds it. type_: as in the kernel's signature ("*fp32": an address)."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    known = tl.str_to_ty(type_, None)
    dtype = _get_np_dtype(known)
    data = np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype).copy()
    return tl.tensor(TensorHandle(data, known), known)
