"""Kernels for the runtime's tests, compiled by TVM once per session: no engine takes part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

N = 4096  # elements of every buffer: enough for each thread to have a share


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a library over float32 buffers of N elements.

    double(x, o): o = 2 x. add(a, b, o): o = a + b. scratch(x, o): o = x + 1 by way of a workspace as large as x.
    grow(x, o): o = x, where o has 2 N elements and only its first half is written. starve(x, o): as scratch, with a workspace of 2^60 bytes.
    """
    tvm = pytest.importorskip("tvm")
    from tvm import tirx
    from tvm.tirx import AllocBuffer, BufferLoad, BufferStore, FloatImm, For, ForKind, PrimFunc, SeqStmt, Var

    from torch_hybrid_backend.engines.cpu.tir.pipeline import build_all

    def buffer(name: str, elements: int = N) -> Any:
        return tirx.decl_buffer((elements,), "float32", name, data_alignment=4)

    def loop(body: Callable[[Any], Any], kind: Any = ForKind.PARALLEL) -> Any:
        i = Var("i", "int32")
        return For(i, 0, N, kind, body(i))

    def function(name: str, buffers: list[Any], body: Any) -> Any:
        attributes = {"global_symbol": name, "tirx.noalias": True, "s_tir": True}
        return PrimFunc(buffers, body).with_attr(attributes)

    x, y, out, wide = buffer("x"), buffer("y"), buffer("out"), buffer("wide", 2 * N)
    workspace = tirx.decl_buffer((N,), "float32", "workspace", scope="global")
    endless = tirx.decl_buffer((tirx.IntImm("int64", 1 << 58),), "float32", "endless", scope="global")
    double = loop(lambda i: BufferStore(out, BufferLoad(x, [i]) * FloatImm("float32", 2), [i]))
    add = loop(lambda i: BufferStore(out, BufferLoad(x, [i]) + BufferLoad(y, [i]), [i]))
    one = FloatImm("float32", 1)
    fill = loop(lambda i: BufferStore(workspace, BufferLoad(x, [i]) + one, [i]), ForKind.SERIAL)
    drain = loop(lambda i: BufferStore(out, BufferLoad(workspace, [i]), [i]))
    touch = loop(lambda i: BufferStore(endless, BufferLoad(x, [i]), [i]), ForKind.SERIAL)
    leave = loop(lambda i: BufferStore(out, BufferLoad(endless, [i]), [i]))
    functions = {
        "double": function("double", [x, out], double),
        "add": function("add", [x, y, out], add),
        "scratch": function("scratch", [x, out], SeqStmt([AllocBuffer(workspace), fill, drain])),
        "starve": function("starve", [x, out], SeqStmt([AllocBuffer(endless), touch, leave])),
        "grow": function("grow", [x, wide], loop(lambda i: BufferStore(wide, BufferLoad(x, [i]), [i]))),
    }
    path = Path(tmp_path_factory.mktemp("kernels")) / "kernels.so"
    build_all(functions, tvm.target.Target("llvm")).export_library(str(path))
    return str(path)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    """Runs a test with one and with two of PyTorch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
