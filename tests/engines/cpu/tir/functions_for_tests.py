"""A scalar function of `arithmetic` over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir import arithmetic, pipeline
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, argument, prim_func
from torch_hybrid_backend.engines.cpu.tir.let_bindings import StatementBindings
from torch_hybrid_backend.engines.cpu.tir.storage import narrow, storage_dtype, widen
from torch_hybrid_backend.loops.index import Index

LANES = 16


def build(op: str, operands: Sequence[str], n: int, dtype: str = "float32") -> tuple[Callable[..., None], str]:
    """A vectorised kernel out[i] = op(*inputs[i]) over n elements, and its assembly; `operands`: the inputs' dtypes, `dtype`: the result's."""
    b = Builder()
    arrays = [argument(n, storage_dtype(each), f"a{k}") for k, each in enumerate((*operands, dtype))]

    def vector(base: Index) -> Any:
        allocations: list[Any] = []

        def element(lane: Index) -> Any:
            bindings = StatementBindings(b, lane, LANES, allocations)
            loads = [widen(b.load(a, base + lane), each) for a, each in zip(arrays, operands, strict=False)]
            values = tuple(bindings.let(load, each) for load, each in zip(loads, operands, strict=True))
            result = arithmetic.emit(op, dtype, values, operands[0], bindings.let)
            return bindings.before(b.store(arrays[-1], base + lane, narrow(result, dtype)))

        loop = b.loop(LANES, element, "vectorized")
        return b.seq(*allocations, loop)

    body = b.loop(n // LANES, lambda i: vector(i * LANES))
    built = pipeline.build("k", prim_func("k", arrays, body), tvm_target(Target.host()))
    return built["k"], built.inspect_source("asm")


def run(op: str, *inputs: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """op of tensors of one length; the result has their dtype, or `dtype`."""
    n, results = inputs[0].numel(), dtype or inputs[0].dtype
    padded = -(-n // LANES) * LANES
    kernel, _ = build(op, [_name(each.dtype) for each in inputs], padded, _name(results))
    arguments = [torch.ones(padded, dtype=each) for each in (*(each.dtype for each in inputs), results)]
    for argument_, given in zip(arguments, inputs, strict=False):
        argument_[:n] = given
    kernel(*arguments)
    return arguments[-1][:n]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 200.0, -200.0, 3.4e38, -3.4e38, 0.5, -103.5]
)
