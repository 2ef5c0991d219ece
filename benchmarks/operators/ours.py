"""Our side: one operator through the engine, the kernels and the C++ plan that a model gets, without Dynamo around them.

In a model an operator on images reads what another one wrote, in the engine's own layout. So that it does here, it stands between two
1x1 convolutions while kernels are made; only the kernels between them are compiled and run, on arrays laid out as they ask for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.operators.shapes import Case, Tensor
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.codegen.kernel_cache import compile_kernels
from torch_hybrid_backend.codegen.variants import Variant, variants
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.region import Region, RegionInput
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.loops.layout import Blocked, Layout
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.partition.extract import extract
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.storage.store import Store

aten = torch.ops.aten

# What follows an operator in the same kernel: nothing, an activation, or the other branch of a residual block and an activation.
EPILOGUES = ("none", "relu", "residual")
# Channels of the convolution behind the operator: unlike any number of channels of a model.
_BEHIND = 23
_DEADLINE_S = 120.0
# Variants of a kernel tried, as placement by measurement does, and the seconds spent on each.
_VARIANTS, _SEARCH_S = 4, 0.005


def result_shape(case: Case) -> tuple[int, ...]:
    """The shape of the operator's (first) result."""
    return tuple(_fake_result(case).shape)


def _fake_result(case: Case) -> torch.Tensor:
    with FakeTensorMode():
        arguments, keywords = _with_tensors(case, _empty)
        result = case.target(*arguments, **keywords)
    first: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
    return first


def _empty(tensor: Tensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if tensor.strides:
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype)


def _with_tensors(case: Case, made: Callable[[Tensor], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return made(value)
        return [replaced(item) for item in value] if isinstance(value, tuple) else value

    return tuple(map(replaced, case.arguments)), {k: replaced(v) for k, v in case.keywords}


@dataclass(slots=True, eq=False)
class Problem:
    """A case with data. `tensors`: its arguments, in order; `residual`: what is added to the result, or None."""

    case: Case
    epilogue: str
    tensors: list[torch.Tensor]
    residual: torch.Tensor | None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The operator's arguments."""
        given = iter(self.tensors)
        return _with_tensors(self.case, lambda _: next(given))

    def eager(self) -> Callable[[], torch.Tensor]:
        """The operator and its epilogue as ATen calls."""
        arguments, keywords = self.arguments()
        target, residual, epilogue = self.case.target, self.residual, self.epilogue

        def call() -> torch.Tensor:
            result = target(*arguments, **keywords)
            first: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
            if residual is not None:
                first = first + residual
            return first if epilogue == "none" else torch.relu(first)

        return call


def problem(case: Case, epilogue: str, seed: int = 0) -> Problem:
    """Random data for a case."""
    generator = torch.Generator().manual_seed(seed)
    # Rows of a table that are asked for: any of them; elsewhere what is an index anywhere.
    below = case.tensors[0].shape[0] if case.op.startswith("aten.embedding") else 1 if case.kind == "embedding" else 2
    tensors = [tensor.make(generator, below) for tensor in case.tensors]
    residual = torch.randn(result_shape(case), generator=generator) if epilogue == "residual" else None
    return Problem(case, epilogue, tensors, residual)


@dataclass(slots=True, eq=False)
class _Graph:
    """A graph being built; every value carries `meta["val"]`."""

    graph: torch.fx.Graph
    fakes: FakeTensorMode
    constants: set[str]
    count: int = 0

    def input(self, tensor: Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{self.count}")
        self.count += 1
        with self.fakes:
            node.meta["val"] = _empty(tensor)
        if tensor.constant:
            node.meta["constant"] = True
            self.constants.add(node.name)
        return node

    def call(self, target: Any, *arguments: Any, **keywords: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, arguments, keywords)
        values = torch.utils._pytree.tree_map(
            lambda value: value.meta["val"] if isinstance(value, torch.fx.Node) else value, (arguments, keywords)
        )
        with self.fakes:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def pointwise(self, x: torch.fx.Node, channels: int) -> torch.fx.Node:
        """A 1x1 convolution of x to `channels`."""
        weight = self.input(Tensor((channels, x.meta["val"].shape[1], 1, 1), "float32", constant=True))
        return self.call(aten.convolution.default, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def region_of(case: Case, epilogue: str, *, inside: bool) -> Region:
    """The operator and its epilogue as a region; `inside`: between two 1x1 convolutions.

    Its inputs: then the convolutions' in between, in no order to rely on; else the case's tensors and the residual.
    """
    g = _Graph(torch.fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True), set())

    def given(tensor: Tensor) -> torch.fx.Node:
        if not inside or tensor.constant or len(tensor.shape) != 4:
            return g.input(tensor)
        n, channels, *spatial = tensor.shape
        return g.pointwise(g.input(Tensor((n, 1, *spatial), "float32")), channels)

    # The other branch comes first, or the addition would join the convolution that stands for it.
    residual = given(Tensor(result_shape(case), "float32")) if epilogue == "residual" and inside else None
    arguments, keywords = _with_tensors(case, given)
    result = g.call(case.target, *arguments, **keywords)
    if isinstance(result.meta["val"], tuple | list):
        result = g.call(operator.getitem, result, 0)
    if epilogue == "residual":
        residual = residual or given(Tensor(result_shape(case), "float32"))
        result = g.call(aten.add.Tensor, result, residual)
    if epilogue != "none":
        result = g.call(aten.relu.default, result)
    if inside:
        result = g.pointwise(result, _BEHIND)
    # Placeholders come first in a graph.
    first = next(node for node in g.graph.nodes if node.op != "placeholder")
    for node in [node for node in g.graph.nodes if node.op == "placeholder"]:
        first.prepend(node)
    g.graph.output((result,))
    module = torch.fx.GraphModule(torch.nn.Module(), g.graph)
    operators = [node for node in g.graph.nodes if node.op == "call_function"]
    return extract("r0", operators, "tvm", CPU, module, frozenset(g.constants)).region


def stands_inside(case: Case) -> bool:
    """True if the operator is of those that convolutional networks run on images between convolutions."""
    if case.kind not in ("conv", "grouped", "depthwise", "pool", "reduction"):
        return False
    x = case.tensors[0]
    if case.op.startswith("aten.convolution") and case.arguments[6]:
        return False  # a transposed one becomes a plain one on an image with gaps
    # Three channels are the model's own input, which lies as the user says.
    images = len(x.shape) == 4 and len(result_shape(case)) == 4
    return images and x.shape[1] > 3 and x.dtype == "float32" and not x.strides


@dataclass(slots=True, eq=False)
class Ours:
    """Compiled kernels and what they run on. `run` returns the arrays they write; `result` the logical result of a run."""

    kernels: tuple[Kernel, ...]
    run: Callable[[], list[torch.Tensor]]
    result: Callable[[], torch.Tensor]


class Bench:
    """Compiles operators. Owns the compiler processes and names the cache that libraries go to."""

    def __init__(self, store: Store) -> None:
        self.backend = TvmBackend()
        self._store, self._compiler = store, KernelCompiler(self.backend.compiler, torch.get_num_threads())

    def kernels(self, problem: Problem) -> RegionKernels:
        """The kernels that one operator becomes, its neighbours' left out."""
        case = problem.case
        if not stands_inside(case):
            return assemble(region_of(case, problem.epilogue, inside=False), self.backend)
        whole = assemble(region_of(case, problem.epilogue, inside=True), self.backend)
        residual = problem.epilogue == "residual"
        return _between(whole, case.tensors[0].shape, result_shape(case), residual=residual)

    def compile(self, assembled: Sequence[RegionKernels]) -> None:
        """Compile the kernels of several problems together, into the cache."""
        kernels = [k for a in assembled for way in self.alternatives(a) for k in way.kernels]
        compile_kernels(kernels, self.backend.target, self._compiler, self._store, _DEADLINE_S)

    def alternatives(self, assembled: RegionKernels) -> list[RegionKernels]:
        """The ways that a model's first call tries: every variant of the kernel with most work."""
        constants = {packed.buffer: packed for packed in assembled.packed}
        plain = [Variant("", (kernel,)) for kernel in assembled.kernels]
        heaviest = max(range(len(plain)), key=lambda i: assembled.kernels[i].multiply_adds)
        kernel = assembled.kernels[heaviest]
        tried = variants(kernel, self.backend.alternatives(kernel, constants))[:_VARIANTS]
        return [assembled.with_variants([*plain[:heaviest], variant, *plain[heaviest + 1 :]]) for variant in tried]

    def ours(self, problem: Problem, assembled: RegionKernels) -> Ours:
        """Prepare our kernels, and return the function that runs them the fastest way. Raises HybridError where one does not compile."""
        first, *others = self.alternatives(assembled)
        ways = [self._way(problem, first)]
        for other in others:
            with contextlib.suppress(HybridError):  # a schedule says while compiling that it has no such variant
                ways.append(self._way(problem, other))
        if len(ways) == 1:
            return ways[0]
        times = measure([way.run for way in ways], _SEARCH_S * len(ways))
        return min(zip(times, ways, strict=True), key=lambda item: item[0].median_us)[1]

    def _way(self, problem: Problem, assembled: RegionKernels) -> Ours:
        compiled = compile_kernels(assembled.kernels, self.backend.target, self._compiler, self._store, _DEADLINE_S)
        for made in compiled:
            if isinstance(made, Exception):
                raise HybridError(str(made)) from made
        program = assembled.program([made for made in compiled if not isinstance(made, Exception)])
        runner = ProgramRunner(
            program, [i.spec for i in assembled.region.inputs], [s for s in assembled.region.outputs if s is not None]
        )
        inside = stands_inside(problem.case)
        inputs = _arrays(problem, assembled) if inside else _plain_inputs(problem)
        output = assembled.outputs[0]

        def result() -> torch.Tensor:
            (made,) = runner(inputs)
            return _from_memory(made, output, assembled.layouts[output]) if inside else made

        return Ours(assembled.kernels, lambda: runner(inputs), result)


def _plain_inputs(problem: Problem) -> list[torch.Tensor]:
    return [*problem.tensors, *([] if problem.residual is None else [problem.residual])]


def _between(
    whole: RegionKernels, x_shape: tuple[int, ...], out_shape: tuple[int, ...], *, residual: bool
) -> RegionKernels:
    """The kernels from the first buffer of the operator's input shape to the last of its result's shape.

    The first kernels of the region write the operands; the last ones, the convolution behind the operator, write no such buffer.
    """
    kernels = whole.kernels
    last = max(i for i, k in enumerate(kernels) if any(a.buffer.shape == out_shape for a in k.writes))
    # The residual, of the result's shape, is written first; where the operator keeps the shape, the operand is the second such buffer.
    operands = [a.buffer for k in kernels for a in k.writes if a.buffer.shape == x_shape]
    reached = {operands[1 if residual and x_shape == out_shape else 0]}
    first = set(reached)
    chosen = []
    for kernel in kernels[: last + 1]:
        if any(a.buffer in reached for a in kernel.reads):
            chosen.append(kernel)
            reached.update(a.buffer for a in kernel.writes)
    written = {a.buffer for k in chosen for a in k.writes}
    packed = {p.buffer for p in whole.packed} | set(whole.inputs) | {b for b, _ in whole.literals}
    outside = dict.fromkeys(
        a.buffer for k in chosen for a in k.reads if a.buffer not in written and a.buffer not in packed
    )
    operands = sorted(outside, key=lambda buffer: buffer not in first)
    (output,) = (a.buffer for a in chosen[-1].writes if a.buffer.shape == out_shape)
    region = whole.region
    activations = tuple(RegionInput(f"a{i}", _array(b, whole)) for i, b in enumerate(operands))
    region = dataclasses.replace(
        region, inputs=(*activations, *region.inputs), outputs=(_array(output, whole),), key=f"{region.key} inner"
    )
    inputs = (*operands, *whole.inputs)
    origins = tuple(names for kernel, names in zip(kernels, whole.origins, strict=True) if kernel in chosen)
    return dataclasses.replace(
        whole, region=region, kernels=tuple(chosen), inputs=inputs, outputs=(output,), origins=origins
    )


def _array(buffer: Buffer, assembled: RegionKernels) -> TensorSpec:
    span = assembled.layouts[buffer].span(buffer.shape)
    return TensorSpec((int(span),), buffer.dtype, (1,), CPU)


def _arrays(problem: Problem, assembled: RegionKernels) -> list[torch.Tensor]:
    """The inputs of the kernels in between: activations in memory order, constants as they are, zeros for the neighbours' own."""
    activations = iter(_activations(problem))
    constants = iter([t for t, form in zip(problem.tensors, problem.case.tensors, strict=True) if form.constant])
    wanted = [t.shape for t in problem.case.tensors if t.constant]
    found = []
    for buffer, region_input in zip(assembled.inputs, assembled.region.inputs, strict=True):
        spec = region_input.spec
        assert spec is not None
        if region_input.name.startswith("a"):
            found.append(_to_memory(next(activations), assembled.layouts[buffer]))
        elif wanted and region_input.is_constant and tuple(spec.shape) == tuple(wanted[0]):
            found.append(next(constants))
            wanted.pop(0)
        else:
            found.append(torch.zeros(tuple(map(int, spec.shape)), dtype=spec.torch_dtype))
    return found


def _activations(problem: Problem) -> list[torch.Tensor]:
    own = [t for t, form in zip(problem.tensors, problem.case.tensors, strict=True) if not form.constant]
    return [*own, *([] if problem.residual is None else [problem.residual])]


def _offsets(shape: tuple[int, ...], layout: Layout) -> torch.Tensor:
    """The offset of each element, (shape) int64."""
    if not isinstance(layout, Blocked):
        total = torch.zeros(shape, dtype=torch.int64)
        for dim, stride in enumerate(layout.strides):
            total += (torch.arange(shape[dim]) * int(stride)).view(-1, *[1] * (len(shape) - dim - 1))
        return total
    physical = tuple(map(int, layout.physical_shape(shape)))
    places = torch.arange(int(torch.Size(physical).numel())).view(physical).movedim(-1, 2)
    return places.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]


def _to_memory(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape = tuple(tensor.shape)
    memory = torch.zeros(int(layout.span(shape)), dtype=tensor.dtype)
    memory[_offsets(shape, layout)] = tensor
    return memory


def _from_memory(memory: torch.Tensor, buffer: Buffer, layout: Layout) -> torch.Tensor:
    return memory[_offsets(tuple(map(int, buffer.shape)), layout)]
