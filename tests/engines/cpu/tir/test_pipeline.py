"""Functions through TVM's passes to machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import tirx

from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.pipeline import build, build_all


def _times(factor: float, name: str, kind: str = "vectorized") -> Any:
    builder = Builder()
    x, out = argument(16, "float32", "x"), argument(16, "float32", "out")
    body = builder.loop(16, lambda i: builder.store(out, i, builder.load(x, i) * factor), kind)
    return prim_func(name, [x, out], body)


def test_several_functions_in_one_module() -> None:
    """Each under its name."""
    module = build_all({"two": _times(2.0, "two"), "five": _times(5.0, "five")}, tvm_target(Target.host()))
    x, out = torch.randn(16), torch.empty(16)
    for name, factor in (("two", 2.0), ("five", 5.0)):
        module[name](x, out)
        torch.testing.assert_close(out, x * factor)


def test_arithmetic_is_that_of_floats() -> None:
    """No simplifier takes them for reals: x - x is NaN for an infinite x, and (x + y) - y rounds."""
    builder = Builder()
    x, out = argument(2, "float32", "x"), argument(2, "float32", "out")
    load = builder.load(x, 0)
    big = tirx.FloatImm("float32", 2.0**24)
    bound = tirx.Var("v", "float32")
    body = builder.seq(
        tirx.stmt.Bind(bound, builder.load(x, 1) + big),
        builder.store(out, 0, load - builder.load(x, 0)),
        builder.store(out, 1, bound - big),
    )
    module = build("k", prim_func("k", [x, out], body), tvm_target(Target.host()))
    result = torch.empty(2)
    module["k"](torch.tensor([float("inf"), 0.75]), result)
    assert result[0].isnan()
    assert result[1] == (torch.tensor(0.75) + 2**24) - 2**24


def test_a_kernel_has_one_entrance_and_no_checks_of_its_arguments() -> None:
    """No second copy called main, and no message about a wrong argument: its caller makes them from the same description."""
    assembly = build("lonely", _times(2.0, "lonely"), tvm_target(Target.host())).inspect_source("asm")
    assert "__tvm_ffi_lonely:" in assembly
    assert "__tvm_ffi_main" not in assembly
    assert "expected" not in assembly.lower()


def test_what_cannot_be_compiled_is_an_error() -> None:
    """TVM's own: a variable that nothing defines."""
    out = argument(4, "float32", "out")
    body = Builder().store(out, 0, tirx.Var("nowhere", "float32"))
    with pytest.raises(Exception, match="nowhere"):
        build("k", prim_func("k", [out], body), tvm_target(Target.host()))
