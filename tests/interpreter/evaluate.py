"""Runs kernels of the loops language on whole tensors, by the reference interpreter of expressions (`tests/loops/interpret.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.loops.interpret import Environment, Frame, attend, combine, convolve, torch_dtype
from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.kernels import (
    Argument,
    AttentionKernel,
    ConvKernel,
    Kernel,
    MapKernel,
    MatMulKernel,
    RowKernel,
    Stage,
    Store,
)
from torch_hybrid_backend.loops.layout import Strided


def run(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run a kernel with one result, and write it in the memory its layout asks for. `inputs`: what it reads, as logical tensors."""
    env: Environment = {read.buffer: tensor for read, tensor in zip(kernel.reads, inputs, strict=True)}
    (result,) = kernel.writes
    env[result.buffer] = torch.empty(_known(result.buffer.shape), dtype=torch_dtype(result.buffer.dtype))
    match kernel:
        case MapKernel():
            stores: tuple[Store, ...] = kernel.stores
        case RowKernel():
            _run_row(kernel, env)
            return _laid_out(result, env[result.buffer])
        case MatMulKernel():
            batch, m, n = kernel.domain
            a, b = _over((batch, m, kernel.k), kernel.a, env), _over((batch, kernel.k, n), kernel.b, env)
            env[kernel.accumulator], stores = a @ b, kernel.stores
        case ConvKernel():
            x, w = _over(kernel.x_vars, kernel.x, env), _over(kernel.w_vars, kernel.w, env)
            settings = (kernel.stride, kernel.padding, kernel.dilation, kernel.groups, kernel.transposed)
            convolved = convolve(x, w, _extents(kernel.domain)[2:], *settings)
            env[kernel.accumulator], stores = convolved, kernel.stores
        case AttentionKernel():
            q, k, v = (
                _over(variables, value, env)
                for variables, value in (
                    (kernel.q_vars, kernel.q),
                    (kernel.k_vars, kernel.k),
                    (kernel.v_vars, kernel.v),
                )
            )
            scores = q @ k.transpose(-1, -2) * kernel.scale
            if kernel.score is not None:
                env[kernel.product] = scores.reshape(_known(kernel.product.shape))
                scores = _over(kernel.score_vars, kernel.score, env)
            attended = attend(scores, v, kernel.causal, kernel.nan_rows)
            env[kernel.accumulator], stores = attended.reshape(_known(kernel.accumulator.shape)), kernel.stores
        case _:
            raise TypeError(f"not a kernel of the loops language: {kernel!r}")
    frame = Frame(_extents(kernel.domain), env, kernel.domain)
    for store in stores:
        _store(store, frame, frame.shape)
    return _laid_out(result, env[result.buffer])


def _run_row(kernel: RowKernel, env: Environment) -> None:
    frame = Frame(_extents(kernel.domain), env, kernel.domain)
    # Values for each row have one element along the reduced axes.
    rows = tuple(1 if d in kernel.axes else n for d, n in enumerate(frame.shape))
    kept = tuple(n for d, n in enumerate(frame.shape) if d not in kernel.axes)
    for stage in kernel.stages:
        if stage.store is not None:
            _store(stage.store, frame, frame.shape if stage.kind == "store" else rows)
            continue
        assert stage.local is not None
        env[stage.local] = _local(stage, kernel.axes, frame, rows, kept)


def _local(
    stage: Stage, axes: Sequence[int], frame: Frame, rows: tuple[int, ...], kept: tuple[int, ...]
) -> torch.Tensor:
    value = frame.expr(stage.value, None)
    match stage.kind:
        case "map":
            return value.expand(frame.shape)
        case "scalar":
            return value.expand(rows).reshape(kept)
    return combine(value.expand(frame.shape), axes, stage.combiner)


def _over(variables: Sequence[LoopVar], value: Expr, env: Environment) -> torch.Tensor:
    shape = _extents(variables)
    return Frame(shape, env, variables).expr(value, None).expand(shape)


def _store(store: Store, frame: Frame, shape: tuple[int, ...]) -> None:
    """buffer[index] = value at every point of `shape`, which has one element where the frame's variables do not matter."""
    memory = frame.env[store.buffer]
    value = frame.expr(store.value, None).expand(shape).to(memory.dtype)
    if memory.dim() == 0:
        memory.copy_(value.reshape(()))
        return
    memory[tuple(frame.evaluate_index(index, None).expand(shape) for index in store.index)] = value


def _laid_out(argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its argument's strides; through offsets, for a result may overlap itself (an expanded one)."""
    assert isinstance(argument.layout, Strided)
    strides = _known(argument.layout.strides)
    storage = torch.empty(int(argument.span) if tensor.numel() else 0, dtype=tensor.dtype)
    if tensor.numel():
        offsets = torch.arange(len(storage)).as_strided(tensor.shape, strides)
        storage[offsets.reshape(-1)] = tensor.reshape(-1)
    return storage.as_strided(tensor.shape, strides)


def _extents(variables: Sequence[LoopVar]) -> tuple[int, ...]:
    return tuple(int(variable.extent) for variable in variables)


def _known(sizes: Sequence[object]) -> tuple[int, ...]:
    assert all(isinstance(size, int) for size in sizes)
    return tuple(map(int, sizes))  # type: ignore[call-overload]
