"""Assembling a region: loop graph -> kernels (plain data) -> a Program once they are compiled.

region -> loops.graph.lower_region -> the backend's operands -> loops.fusion.fuse -> its layouts -> kernels
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from torch_hybrid_backend.codegen.anchors import Anchor, arguments, over
from torch_hybrid_backend.codegen.backend import KernelBackend
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.operands import Packed
from torch_hybrid_backend.codegen.operator_kernel import Operand, OperatorKernel
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import (
    OperatorArgument,
    OperatorCall,
    PackedConstant,
    Program,
    RandomNumbers,
    Step,
    TensorArgument,
)
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.loops.fusion import Group, fuse, inlined, needed_outside, replace_loads
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.index import LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import (
    INDEX_DTYPE,
    Buffer,
    ConvOp,
    Expr,
    FromIndex,
    Load,
    RecurrentOp,
    ReduceOp,
    ScanOp,
    ScatterOp,
    SegmentOp,
    buffers_of_expr,
    compute_dtype,
    rounded,
    unrounded,
)
from torch_hybrid_backend.loops.kernels import (
    Argument,
    Kernel,
    MapKernel,
    RecurrentKernel,
    RowKernel,
    ScatterKernel,
    SegmentKernel,
    Stage,
    Store,
    kernel_counts,
)
from torch_hybrid_backend.loops.layout import Layout, Strided, contiguous
from torch_hybrid_backend.loops.random_numbers import Generator
from torch_hybrid_backend.loops.scales import gathered
from torch_hybrid_backend.sizes.size import Dim, Size


@dataclass(frozen=True, slots=True, eq=False)
class RegionKernels:
    """A region's kernels in execution order, and what they share: buffers, layouts, literals and constants packed ahead.

    `origins`: for each kernel the names of the nodes whose values its operations compute, without values that are inlined.
    `flags`, `relied_on`: as in `LoopGraph`.
    """

    region: Region
    kernels: tuple[Kernel, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    literals: tuple[tuple[Buffer, torch.Tensor], ...]
    packed: tuple[Packed, ...]
    layouts: Mapping[Buffer, Layout]
    backend: KernelBackend
    generator: Generator | None = None
    origins: tuple[frozenset[str], ...] = ()
    flags: tuple[Buffer, ...] = ()
    relied_on: tuple[Size, ...] = ()

    def with_variants(self, chosen: Sequence[Variant]) -> RegionKernels:
        """The region computed by one variant of each kernel."""
        kernels = tuple(kernel for variant in chosen for kernel in variant.kernels)
        own = {a.buffer: a.layout for kernel in kernels for a in (*kernel.reads, *kernel.writes)}
        packed = (*self.packed, *(packed for variant in chosen for packed in variant.packed))
        made = zip(chosen, self.origins, strict=True)
        origins = tuple(names for variant, names in made for _ in variant.kernels)
        return replace(self, kernels=kernels, packed=packed, layouts={**self.layouts, **own}, origins=origins)

    def program(self, compiled: Sequence[Artifact]) -> Program:
        """The program, given what each kernel was compiled to."""
        device = self.region.device
        read = {a.buffer for kernel in self.kernels for a in kernel.reads}
        packed = _shared(p for p in self.packed if p.buffer in read)
        numbers: dict[Buffer, int] = {}
        specs: list[TensorSpec] = []
        output_specs = dict(zip(self.outputs, self.region.outputs, strict=True))

        def number(buffer: Buffer) -> int:
            buffer = packed[buffer].buffer if buffer in packed else buffer
            if buffer not in numbers:
                numbers[buffer] = len(specs)
                spec = output_specs.get(buffer)
                specs.append(spec if spec is not None else _physical(buffer, self.layouts[buffer], device))
            return numbers[buffer]

        def working(size: Dim) -> int:
            specs.append(TensorSpec((size,), "uint8", (1,), device))
            return len(specs) - 1

        def argument(item: Operand | OperatorArgument) -> OperatorArgument:
            if not isinstance(item, Operand):
                return item
            return form(item) if item.strides or not item.shape else TensorArgument(number(item.buffer))

        def form(item: Operand) -> TensorArgument:
            spec = TensorSpec(item.shape, item.buffer.dtype, item.strides, device)
            return TensorArgument(number(item.buffer), spec, item.offset)

        steps: list[Step] = []
        for kernel, artifact in zip(self.kernels, compiled, strict=True):
            if isinstance(kernel, OperatorKernel):
                operands = tuple(map(argument, kernel.arguments))
                results = (form(kernel.result), *[None] * (kernel.results - 1))
                step: Step = OperatorCall(kernel.name, operands, results, kernel.title)
            else:
                numbered = tuple(number(a.buffer) for a in (*kernel.reads, *kernel.writes))
                step = self.backend.step(kernel, artifact, numbered, working)
                written = {number(write.buffer): write for write in kernel.writes}
                for result in step.returned:
                    specs[result] = _logical(written[result], device)
            steps.append(step)
        sources = {b: position for position, b in enumerate(self.inputs)}
        literals = dict(self.literals)
        constants = [
            PackedConstant(number(p.buffer), (sources[p.source],), p.pack)
            if p.source in sources
            else PackedConstant(number(p.buffer), (), partial(p.pack, literals[p.source]))
            for p in dict.fromkeys(packed.values())
        ]
        constants += [
            PackedConstant(number(b), (), partial(_itself, tensor)) for b, tensor in self.literals if b in read
        ]
        inputs = []
        for buffer, region_input in zip(self.inputs, self.region.inputs, strict=True):
            if buffer not in read:
                inputs.append(-1)
                continue
            assert region_input.spec is not None
            own = number(buffer)
            specs[own] = region_input.spec
            inputs.append(own)
        outputs = tuple(number(b) for b in self.outputs)
        random = None
        if self.generator is not None:
            counters = tuple(number(draw.counter) for draw in self.generator.draws)
            taken = tuple(draw.groups for draw in self.generator.draws)
            random = RandomNumbers(number(self.generator.seed), counters, taken)
            for own in (random.seed, *counters):
                specs[own] = TensorSpec((), INDEX_DTYPE, (), CPU)
        signature = tuple(i.spec if i.spec is not None else i.size for i in self.region.inputs)
        return Program(
            tuple(specs),
            tuple(inputs),
            outputs,
            tuple(constants),
            tuple(steps),
            signature,
            device,
            random,
            counts=tuple(dict.fromkeys(c for kernel in self.kernels for c in kernel_counts(kernel))),
            flags=tuple(map(number, self.flags)),
            relied_on=self.relied_on,
            origins=self.origins,
        )


def _shared(packed: Iterable[Packed]) -> dict[Buffer, Packed]:
    """Maps a constant's buffer to the first constant that is made of the same tensor in the same way.

    Each variant packs constants on its own; if a layer is called twice, so does each call.
    """
    first: dict[tuple[object, ...], Packed] = {}
    return {p.buffer: first.setdefault(p.made_of, p) for p in packed}


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _physical(buffer: Buffer, layout: Layout, device: Device) -> TensorSpec:
    return TensorSpec((layout.span(buffer.shape),), buffer.dtype, (1,), device)


def _logical(argument: Argument, device: Device) -> TensorSpec:
    """The form of an operator's result, which is a tensor; kernels write plain memory."""
    assert isinstance(argument.layout, Strided)
    return TensorSpec(argument.buffer.shape, argument.buffer.dtype, argument.layout.strides, device)


def assemble(region: Region, backend: KernelBackend) -> RegionKernels:
    """The kernels of a region; raises loops.lowering.Refuse if a lowering refuses an operator."""
    lowered = lower_region(region, backend.policy)
    fixed: dict[Buffer, Layout] = {}
    for buffer, region_input in zip(lowered.inputs, region.inputs, strict=True):
        if region_input.spec is None:
            continue  # a size
        fixed[buffer] = Strided(region_input.spec.strides)
    for buffer, spec in zip(lowered.outputs, region.outputs, strict=True):
        assert spec is not None
        fixed[buffer] = Strided(spec.strides)
    for buffer, _ in lowered.literals:
        fixed[buffer] = contiguous(buffer.shape)
    if lowered.generator is not None:
        fixed.update(dict.fromkeys(lowered.generator.buffers, contiguous(())))
    prepared = backend.operands(lowered, fixed)
    groups = fuse(prepared.graph, backend.policy)
    fixed.update((buffer, contiguous(buffer.shape)) for buffer in prepared.row_major)
    layouts = backend.layouts(groups, fixed)
    needed = needed_outside(groups, lowered.needed)
    found: dict[Kernel, frozenset[str]] = {}
    for group in groups:
        made = _kernels(group, needed, layouts, backend)
        names = frozenset(lowered.origins[m.op.out] for m in group.members if m.op.out in lowered.origins)
        found.update(dict.fromkeys(made, names))
    kernels = backend.join(list(found), lowered.needed)
    return RegionKernels(
        region,
        tuple(kernels),
        lowered.inputs,
        lowered.outputs,
        lowered.literals,
        prepared.packed,
        layouts,
        backend,
        lowered.generator,
        _joined(found, kernels),
        lowered.flags,
        lowered.relied_on,
    )


def _joined(origins: dict[Kernel, frozenset[str]], kernels: Sequence[Kernel]) -> tuple[frozenset[str], ...]:
    """The origins of `kernels`, given those of the kernels that were joined to them."""
    place = {write.buffer: position for position, kernel in enumerate(kernels) for write in kernel.writes}
    found: list[frozenset[str]] = [frozenset()] * len(kernels)
    for kernel, names in reversed(origins.items()):
        # One that is part of another writes what that one's next part reads.
        position = next((place[write.buffer] for write in kernel.writes if write.buffer in place), None)
        if position is None:
            continue
        found[position] |= names
        for read in kernel.reads:
            place.setdefault(read.buffer, position)
    # What a backend adds, as a copy of an operand for a product, is for the kernel that reads it.
    for position in reversed(range(len(kernels))):
        if not found[position]:
            written = {write.buffer for write in kernels[position].writes}
            readers = (k for k, kernel in enumerate(kernels) if any(read.buffer in written for read in kernel.reads))
            found[position] = next((found[reader] for reader in readers), frozenset())
    return tuple(found)


def _kernels(
    group: Group, needed: set[Buffer], layouts: Mapping[Buffer, Layout], backend: KernelBackend
) -> list[Kernel]:
    """A group's kernels: one, or two for a scatter, of which the first writes the base to the buffer and the second combines."""
    if group.kind == "recurrent":
        return [_recurrent(group, layouts)]
    if group.kind == "segment":
        return [_segments(group, layouts)]
    if group.kind != "scatter":
        return [_kernel(group, needed, layouts, backend)]
    (member,) = group.members
    op = member.op
    assert isinstance(op, ScatterOp)
    writes = (Argument(op.out, layouts[op.out]),)
    variables, base = over(op.base, "b")
    places = [FromIndex(INDEX_DTYPE, index) for index in member.index]
    none: frozenset[Buffer] = frozenset()
    first = MapKernel(
        arguments([base], [], none, layouts),
        writes,
        variables,
        (Store(op.out, tuple(map(index_of, variables)), base),),
    )
    scatter = ScatterKernel(
        arguments([*places, member.expr], [], none, layouts),
        writes,
        group.variables,
        Store(op.out, member.index, unrounded(member.expr, op.out.dtype)),
        op.combiner,
    )
    return [first, scatter]


def _segments(group: Group, layouts: Mapping[Buffer, Layout]) -> Kernel:
    (member,) = group.members
    op = member.op
    assert isinstance(op, SegmentOp)
    segment, *rest = group.point
    point = LoopVar("point", op.points)
    first, end = op.bounds(segment)
    value = op.body((index_of(point), *rest))
    return SegmentKernel(
        arguments([first, end, value], [], frozenset(), layouts),
        (Argument(op.out, layouts[op.out]),),
        group.variables,
        out=op.out,
        point=point,
        first=first,
        end=end,
        value=value,
    )


def _recurrent(group: Group, layouts: Mapping[Buffer, Layout]) -> Kernel:
    (member,) = group.members
    op = member.op
    assert isinstance(op, RecurrentOp)
    assert isinstance(op.weight, Buffer)
    step, *at = group.point
    here = tuple(at)
    products = tuple(Buffer(group.shape[1:], op.out.dtype, f"product{gate}") for gate in range(op.gates))
    cell = None if op.last_cell is None else op.last_cell.at(here)
    state, new_cell = op.unit(tuple(p.at(here) for p in products), group.point, op.out.at(group.point), cell)
    begin = [Store(op.out, (as_index(0), *here), op.state.at(here))]
    stores = [Store(op.out, (step + 1, *here), state)]
    if op.last_cell is not None and op.cell is not None and new_cell is not None:
        begin.append(Store(op.last_cell, here, op.cell.at(here)))
        stores.append(Store(op.last_cell, here, new_cell))
    values = [store.value for store in (*begin, *stores)]
    return RecurrentKernel(
        arguments(values, [op.weight], frozenset((*products, *op.outs)), layouts),
        tuple(Argument(out, layouts[out]) for out in op.outs),
        group.variables,
        begin=tuple(begin),
        states=op.out,
        weight=op.weight,
        products=products,
        stores=tuple(stores),
    )


def _kernel(group: Group, needed: set[Buffer], layouts: Mapping[Buffer, Layout], backend: KernelBackend) -> Kernel:
    written = (*(m.op.out for m in group.members), *group.besides)
    writes = tuple(Argument(out, layouts[out]) for out in written if out in needed)
    own = {m.op.out for m in group.members}
    inside = frozenset(own if group.accumulator is None else own | {group.accumulator})
    if group.kind == "row":
        stages = _stages(group, needed)
        reads = arguments([s.value for s in stages], [], inside, layouts)
        return RowKernel(reads, writes, group.variables, group.axes, stages)
    values = inlined(group)
    stores = tuple(
        Store(m.op.out, m.index, unrounded(values[m.op.out], m.op.out.dtype))
        for m in group.members
        if m.op.out in needed
    )
    if group.accumulator is None:
        reads = arguments([s.value for s in stores], [], inside, layouts)
        return MapKernel(reads, writes, group.variables, stores)
    op = group.members[0].op
    stores = gathered(stores, group.accumulator, group.variables[1 if isinstance(op, ConvOp) else -1])
    return backend.anchor(Anchor(op, group.variables, group.accumulator, writes, stores, layouts, inside))


def _stages(group: Group, needed: set[Buffer]) -> tuple[Stage, ...]:
    """A row group's members as stages. A result that a later member reads is kept in a local buffer."""
    locals_: dict[Buffer, Buffer] = {}

    def rewritten(expr: Expr) -> Expr:
        def local_load(load: Load) -> Expr | None:
            local = locals_.get(load.buffer)
            if local is None:
                return None
            return local.at(group.point if local.shape == group.shape and local in full else group.kept_point)

        return replace_loads(expr, local_load)

    full: set[Buffer] = set()
    stages: list[Stage] = []
    for position, member in enumerate(group.members):
        out = member.op.out
        read_later = any(out in buffers_of_expr(m.expr) for m in group.members[position + 1 :])
        value = rewritten(member.expr)
        stored = out in needed
        combines = isinstance(member.op, ReduceOp | ScanOp)
        if combines or read_later:
            dtype = _result_dtype(member.op, value) if combines else compute_dtype(out.dtype)
            local = Buffer(group.shape if member.is_full else group.kept_shape, dtype, out.name)
            kind = "map" if member.role == "full" else member.role
            combiner = member.op.combiner if isinstance(member.op, ReduceOp | ScanOp) else ""
            if not combines:
                value = rounded(value, out.dtype)
            stages.append(Stage(kind, local, value, combiner))
            if member.is_full:
                full.add(local)
            value = local.at(group.point if member.is_full else group.kept_point)
            if combines and read_later and (result := rounded(value, out.dtype)) is not value:
                # What has been combined is in the compute dtype; its readers get what memory would hold.
                local = Buffer(local.shape, local.dtype, out.name)
                stages.append(Stage("map" if member.is_full else "scalar", local, result))
                if member.is_full:
                    full.add(local)
            locals_[out] = local
        if stored:
            kind = "store" if member.is_full else "store_scalar"
            value = unrounded(value, out.dtype)
            stages.append(Stage(kind, None, value, store=Store(out, member.index, value)))
    return tuple(stages)


def _result_dtype(op: object, value: Expr) -> str:
    """The dtype of a reduction's or a scan's result inside the kernel."""
    if isinstance(op, ReduceOp | ScanOp) and op.combiner in ("argmax", "argmin"):
        return "int64"
    return value.dtype
