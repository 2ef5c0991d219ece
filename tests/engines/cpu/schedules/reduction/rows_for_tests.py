"""Row kernels put together stage by stage, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.engines.cpu.schedule_runner import HOST, run_kernel
from torch_hybrid_backend.engines.cpu.schedules.reduction import rows
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load
from torch_hybrid_backend.loops.kernels import Argument, RowKernel, Stage, Store
from torch_hybrid_backend.loops.layout import Layout, contiguous


class Rows:
    """A row kernel being put together: `x` is its input over the whole domain."""

    def __init__(self, shape: Sequence[int], axes: Sequence[int], dtype: str = "float32", layout: Layout | None = None):
        self.shape, self.axes = tuple(shape), tuple(axes)
        self.domain = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
        self.index = tuple(index_of(v) for v in self.domain)
        self.kept = tuple(i for d, i in enumerate(self.index) if d not in axes)
        self.kept_shape = tuple(n for d, n in enumerate(shape) if d not in axes)
        self.input = Buffer(self.shape, dtype, "x")
        self.reads = [Argument(self.input, layout or contiguous(self.shape))]
        self.writes: list[Argument] = []
        self.stages: list[Stage] = []
        self.x: Expr = self.input.at(self.index)

    def reduce(self, combiner: str, value: Expr, dtype: str | None = None) -> Expr:
        local = Buffer(self.kept_shape, dtype or value.dtype)
        self.stages.append(Stage("reduce", local, value, combiner))
        return Load(local.dtype, local, self.kept)

    def scalar(self, value: Expr) -> Expr:
        local = Buffer(self.kept_shape, value.dtype)
        self.stages.append(Stage("scalar", local, value))
        return Load(local.dtype, local, self.kept)

    def map(self, value: Expr) -> Expr:
        local = Buffer(self.shape, value.dtype)
        self.stages.append(Stage("map", local, value))
        return Load(local.dtype, local, self.index)

    def store(self, value: Expr, dtype: str = "float32", layout: Layout | None = None) -> None:
        self._store("store", self.shape, self.index, value, dtype, layout)

    def store_scalar(self, value: Expr, dtype: str = "float32", layout: Layout | None = None) -> None:
        self._store("store_scalar", self.kept_shape, self.kept, value, dtype, layout)

    def _store(
        self,
        kind: str,
        shape: tuple[int, ...],
        index: tuple[Index, ...],
        value: Expr,
        dtype: str,
        layout: Layout | None,
    ) -> None:
        out = Buffer(shape, dtype, "out")
        self.writes.append(Argument(out, layout or contiguous(shape)))
        self.stages.append(Stage(kind, None, value, store=Store(out, index, value)))

    def run(self, x: torch.Tensor, target: Target = HOST) -> list[torch.Tensor]:
        kernel = RowKernel(
            tuple(self.reads), tuple(self.writes), self.domain, axes=self.axes, stages=tuple(self.stages)
        )
        return run_kernel(kernel, rows.emit, {self.input: x}, target)


def emitted(rows: Rows, target: Target) -> str:
    """The kernel as TIR text."""
    kernel = RowKernel(tuple(rows.reads), tuple(rows.writes), rows.domain, axes=rows.axes, stages=tuple(rows.stages))
    return str(emit_kernel(kernel, "kernel", target))


def number(value: float) -> Expr:
    return ops.const(value, "float32")


def product(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis)
    return x


COMBINERS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "prod": product,
    "max": torch.amax,
    "min": torch.amin,
}
