"""Assembling a region: loop graph -> kernels (plain data) -> a Program once they are compiled.

region -> loops.graph.lower_region -> prepare (packed operands) -> loops.fusion.fuse -> layouts -> kernels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.program import Kernel as KernelCall
from torch_hybrid_backend.core.program import OperatorArgument, OperatorCall, PackedConstant, Program, TensorArgument
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tvm.cpu.convolution_fusion import join_chains
from torch_hybrid_backend.engines.tvm.cpu.layouts import assign_layouts
from torch_hybrid_backend.engines.tvm.onednn import Operand, OperatorKernel
from torch_hybrid_backend.engines.tvm.prepare import Packed, Prepared, prepare
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.variants import Variant
from torch_hybrid_backend.loops.fusion import Group, fuse, inlined, needed_outside, replace_loads
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import (
    AttentionOp,
    Buffer,
    ConvOp,
    Expr,
    Load,
    MatMulOp,
    ReduceOp,
    Value,
    buffers_of_expr,
    compute_dtype,
)
from torch_hybrid_backend.loops.kernels import (
    Argument,
    AttentionKernel,
    ConvKernel,
    Kernel,
    MapKernel,
    MatMulKernel,
    PlainMatMulKernel,
    RowKernel,
    Stage,
    Store,
    kernel_sizes,
)
from torch_hybrid_backend.loops.layout import Layout, Strided, contiguous
from torch_hybrid_backend.sizes.size import known
from torch_hybrid_backend.sizes.size import symbol as size_symbol


@dataclass(frozen=True, slots=True, eq=False)
class RegionKernels:
    """A region's kernels in execution order, and what they share: buffers, layouts, literals and constants packed ahead."""

    region: Region
    kernels: tuple[Kernel, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    literals: tuple[tuple[Buffer, torch.Tensor], ...]
    packed: tuple[Packed, ...]
    layouts: dict[int, Layout]

    def with_variants(self, chosen: Sequence[Variant]) -> RegionKernels:
        """The region computed by one variant of each kernel."""
        kernels = tuple(kernel for variant in chosen for kernel in variant.kernels)
        # Last: buffers that no kernel uses are gone, and a variant's own may have their identities.
        own = {id(a.buffer): a.layout for kernel in kernels for a in (*kernel.reads, *kernel.writes)}
        packed = (*self.packed, *(packed for variant in chosen for packed in variant.packed))
        return replace(self, kernels=kernels, packed=packed, layouts={**self.layouts, **own})

    def program(self, compiled: Sequence[tuple[str, str]]) -> Program:
        """The program, given each kernel's (library path, symbol)."""
        device = self.region.device
        numbers: dict[int, int] = {}
        specs: list[TensorSpec] = []
        output_specs = {id(b): s for b, s in zip(self.outputs, self.region.outputs, strict=True)}

        def number(buffer: Buffer) -> int:
            if id(buffer) not in numbers:
                numbers[id(buffer)] = len(specs)
                spec = output_specs.get(id(buffer))
                specs.append(spec if spec is not None else _physical(buffer, self.layouts[id(buffer)], device))
            return numbers[id(buffer)]

        def argument(item: Operand | OperatorArgument) -> OperatorArgument:
            if not isinstance(item, Operand):
                return item
            spec = TensorSpec(item.shape, item.buffer.dtype, item.strides, device) if item.strides else None
            return TensorArgument(number(item.buffer), spec)

        calls: list[KernelCall | OperatorCall] = []
        for kernel, (library, symbol) in zip(self.kernels, compiled, strict=True):
            if isinstance(kernel, OperatorKernel):
                result = number(kernel.result.buffer)
                specs[result] = TensorSpec(
                    kernel.result.shape, kernel.result.buffer.dtype, kernel.result.strides, device
                )
                calls.append(OperatorCall(kernel.name, tuple(map(argument, kernel.arguments)), result, kernel.title))
                continue
            arguments = tuple(number(a.buffer) for a in (*kernel.reads, *kernel.writes))
            sizes = tuple(size_symbol(s.name, s.hint) for s in kernel_sizes(kernel))
            calls.append(KernelCall(library, symbol, arguments, len(kernel.writes), sizes))
        read = {id(a.buffer) for kernel in self.kernels for a in kernel.reads}
        sources = {id(b): position for position, b in enumerate(self.inputs)}
        literals = {id(b): tensor for b, tensor in self.literals}
        constants = [
            PackedConstant(number(p.buffer), (sources[id(p.source)],), p.pack)
            if id(p.source) in sources
            else PackedConstant(number(p.buffer), (), partial(p.pack, literals[id(p.source)]))
            for p in self.packed
            if id(p.buffer) in read
        ]
        constants += [
            PackedConstant(number(b), (), partial(_itself, tensor)) for b, tensor in self.literals if id(b) in read
        ]
        inputs = []
        for buffer, region_input in zip(self.inputs, self.region.inputs, strict=True):
            if id(buffer) not in read:
                inputs.append(-1)
                continue
            assert region_input.spec is not None
            position = number(buffer)
            specs[position] = region_input.spec
            inputs.append(position)
        outputs = tuple(number(b) for b in self.outputs)
        signature = tuple(i.spec if i.spec is not None else i.size for i in self.region.inputs)
        return Program(tuple(specs), tuple(inputs), outputs, tuple(constants), tuple(calls), signature)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _physical(buffer: Buffer, layout: Layout, device: Device) -> TensorSpec:
    return TensorSpec((layout.span(buffer.shape),), buffer.dtype, (1,), device)


def assemble(region: Region, target: Target) -> RegionKernels:
    """The kernels of a region; raises loops.lowering.Refuse where an operator is not taken."""
    lowered = lower_region(region)
    fixed: dict[int, Layout] = {}
    for buffer, region_input in zip(lowered.inputs, region.inputs, strict=True):
        if region_input.spec is None:
            continue  # a size
        fixed[id(buffer)] = Strided(region_input.spec.strides)
    for buffer, spec in zip(lowered.outputs, region.outputs, strict=True):
        assert spec is not None
        fixed[id(buffer)] = Strided(spec.strides)
    for buffer, _ in lowered.literals:
        fixed[id(buffer)] = contiguous(buffer.shape)
    prepared = prepare(lowered, target, fixed)
    groups = fuse(prepared.graph)
    for op in prepared.graph.ops:
        if id(op) in prepared.plain:
            continue
        operand = op.b if isinstance(op, MatMulOp) else op.w if isinstance(op, ConvOp) else None
        if isinstance(operand, Buffer):
            fixed[id(operand)] = contiguous(operand.shape)
    layouts = assign_layouts(groups, fixed, prepared.tiles, target)
    needed = needed_outside(groups, lowered.outputs)
    kernels = join_chains([_kernel(group, needed, layouts, prepared) for group in groups], lowered.outputs, target)
    return RegionKernels(
        region, kernels, lowered.inputs, lowered.outputs, prepared.graph.literals, tuple(prepared.packed), layouts
    )


def _kernel(group: Group, needed: set[int], layouts: dict[int, Layout], prepared: Prepared) -> Kernel:
    writes = tuple(Argument(m.op.out, layouts[id(m.op.out)]) for m in group.members if id(m.op.out) in needed)
    if group.kind == "row":
        stages = _stages(group, needed)
        reads = _arguments([s.value for s in stages], [], group, layouts)
        return RowKernel(reads, writes, group.variables, group.axes, stages)
    values = inlined(group)
    stores = tuple(Store(m.op.out, m.index, values[id(m.op.out)]) for m in group.members if id(m.op.out) in needed)
    exprs = [s.value for s in stores]
    if group.kind == "map":
        return MapKernel(_arguments(exprs, [], group, layouts), writes, group.variables, stores)
    accumulator = group.accumulator
    assert accumulator is not None
    op = group.members[0].op
    match op:
        case MatMulOp():
            k = LoopVar("k", op.a.shape[2])
            b, m, _ = group.point
            a = op.a.at((b, m, index_of(k)))
            if (view := prepared.plain.get(id(op))) is not None:
                reads = _arguments([a, *exprs], [view.buffer], group, layouts)
                _, k_stride, n_stride = map(known, view.strides)
                weight, offset = view.buffer, known(view.offset)
                return PlainMatMulKernel(
                    reads, writes, group.variables, k, a, weight, offset, n_stride, k_stride, accumulator, stores
                )
            assert isinstance(op.b, Buffer)
            reads = _arguments([a, *exprs], [op.b], group, layouts)
            batched = op.b.shape[0] != 1
            tile = prepared.tiles[id(op)]
            return MatMulKernel(reads, writes, group.variables, k, a, op.b, tile, batched, accumulator, stores)
        case ConvOp():
            x_vars, x = _over(op.x, "x")
            assert isinstance(op.w, Buffer)
            reads = _arguments([x, *exprs], [op.w], group, layouts)
            return ConvKernel(
                reads,
                writes,
                group.variables,
                x_vars,
                x,
                op.w,
                op.stride,
                op.padding,
                op.dilation,
                op.groups,
                prepared.kernel_sizes[id(op)],
                prepared.tiles[id(op)],
                accumulator,
                stores,
            )
        case AttentionOp():
            (q_vars, q), (k_vars, k_expr), (v_vars, v) = _over(op.q, "q"), _over(op.k, "k"), _over(op.v, "v")
            mask_vars, mask = _over(op.mask, "z") if op.mask is not None else ((), None)
            operands = [q, k_expr, v] + ([mask] if mask is not None else [])
            reads = _arguments([*operands, *exprs], [], group, layouts)
            return AttentionKernel(
                reads,
                writes,
                group.variables,
                q,
                q_vars,
                k_expr,
                k_vars,
                v,
                v_vars,
                mask,
                mask_vars,
                op.scale,
                op.causal,
                accumulator,
                stores,
            )
    raise TypeError(f"a group of kind {group.kind} has no kernel")


def _over(value: Value, prefix: str) -> tuple[tuple[LoopVar, ...], Expr]:
    variables = tuple(LoopVar(f"{prefix}{d}", n) for d, n in enumerate(value.shape))
    return variables, value.at(tuple(map(index_of, variables)))


def _arguments(
    exprs: Sequence[Expr], operands: Sequence[Buffer], group: Group, layouts: dict[int, Layout]
) -> tuple[Argument, ...]:
    """The buffers a kernel reads from outside itself."""
    own = {id(m.op.out) for m in group.members} | {id(group.accumulator)}
    found: dict[int, Buffer] = {id(b): b for b in operands}
    for expr in exprs:
        for buffer in buffers_of_expr(expr):
            if id(buffer) not in own and id(buffer) in layouts:
                found[id(buffer)] = buffer
    return tuple(Argument(b, layouts[id(b)]) for b in found.values())


def _stages(group: Group, needed: set[int]) -> tuple[Stage, ...]:
    """A row group's members as stages; results that later members read get a local of their own."""
    locals_: dict[int, Buffer] = {}

    def rewritten(expr: Expr) -> Expr:
        def local_load(load: Load) -> Expr | None:
            local = locals_.get(id(load.buffer))
            if local is None:
                return None
            return local.at(group.point if local.shape == group.shape and id(local) in full else group.kept_point)

        return replace_loads(expr, local_load)

    full: set[int] = set()
    stages: list[Stage] = []
    for position, member in enumerate(group.members):
        out = member.op.out
        read_later = any(id(out) in {id(b) for b in buffers_of_expr(m.expr)} for m in group.members[position + 1 :])
        value = rewritten(member.expr)
        stored = id(out) in needed
        if member.role == "reduce" or read_later:
            shape = group.shape if member.role == "full" else group.kept_shape
            local = Buffer(
                shape,
                compute_dtype(out.dtype) if member.role != "reduce" else _result_dtype(member.op, value),
                out.name,
            )
            kind = {"full": "map", "scalar": "scalar", "reduce": "reduce"}[member.role]
            combiner = member.op.combiner if isinstance(member.op, ReduceOp) else ""
            stages.append(Stage(kind, local, value, combiner))
            locals_[id(out)] = local
            if member.role == "full":
                full.add(id(local))
            value = local.at(group.point if member.role == "full" else group.kept_point)
        if stored:
            kind = "store" if member.role == "full" else "store_scalar"
            stages.append(Stage(kind, None, value, store=Store(out, member.index, value)))
    return tuple(stages)


def _result_dtype(op: object, value: Expr) -> str:
    """The dtype a reduction's result has inside the kernel."""
    if isinstance(op, ReduceOp) and op.combiner in ("argmax", "argmin"):
        return "int64"
    return value.dtype
