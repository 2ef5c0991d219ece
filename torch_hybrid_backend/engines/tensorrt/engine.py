"""The TensorRT engine: regions as engines that NVIDIA's builder makes, each in a process of its own. Nothing here imports TensorRT at once.

It takes part where the setting `engines` names it. No GPU has run its engines yet.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from torch_hybrid_backend.builds.builds import Builds
from torch_hybrid_backend.builds.pending import BuildingRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import (
    CompiledRegion,
    CompiledRegionBase,
    EngineBase,
    KernelText,
    PendingRegion,
    ProgramCall,
)
from torch_hybrid_backend.core.program import ExternalCall, Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tensorrt import capability
from torch_hybrid_backend.engines.tensorrt.build import (
    Engine,
    Layout,
    Range,
    Request,
    contiguous,
    extreme,
    memory_order,
)
from torch_hybrid_backend.engines.tensorrt.installed import NO_GPU, described, installation
from torch_hybrid_backend.engines.tensorrt.kernels import KeptKernels
from torch_hybrid_backend.engines.tensorrt.runtime import (
    CudaStreams,
    EngineRunner,
    LoadedEngine,
    Streams,
    scratch_buffer_bytes,
)
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.machine import fingerprint, float32_precision
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.sizes.size import Dim, Symbol, symbols
from torch_hybrid_backend.sources import sources_version

BUILD = "torch_hybrid_backend.engines.tensorrt.build:build"
_KIND = "tensorrt"
# What the bytes of an engine are made by, beside TensorRT.
SOURCES = ("core", "sizes", "graph/graph_json.py", "engines/tensorrt")
# An engine serves sizes of up to so many times the power of two above the first one, where the size's own range goes as far; beyond that
# PyTorch's operators run. A wider range costs memory and speed; how much was not measured, for want of a GPU.
MAX_GROWTH = 8

# Operators that an engine with the flag for TF32 would compute as products, by name; PyTorch has a setting for them, and one for convolutions.
_PRODUCTS = frozenset(
    "mm bmm addmm baddbmm addbmm linear matmul mv addmv dot vdot inner _cdist_forward _pdist_forward".split()
)
_ATTENTION = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention")
_CONVOLUTIONS = frozenset("convolution cudnn_convolution conv1d conv2d conv3d".split())


def ranges_of(region: Region) -> dict[str, Range]:
    """The range of each size symbol of the region's inputs that its engine is built for: the symbol's own as far as it is known, ended at
    `MAX_GROWTH` times the power of two above its example."""
    found: dict[str, Range] = {}
    for each in _symbols(region):
        low, high = _known_range(region, each.name)
        most = min(high, MAX_GROWTH * (1 << max(0, each.hint - 1).bit_length()))
        found[each.name] = Range(max(1, low), min(max(each.hint, low, 1), most), most)
    return found


def allows_tf32(region: Region) -> bool:
    """Whether PyTorch lets every operator of the region round to TF32 that an engine with the flag would: it has but one for all."""
    of_products, of_convolutions = (precision == "tf32" for precision in float32_precision("cuda"))
    called = [node.target for node in region.graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = {target._schema.name.partition("::")[2] for target in called}
    products = any(name in _PRODUCTS or name.startswith(_ATTENTION) for name in names)
    convolutions = bool(names & _CONVOLUTIONS)
    return (products or convolutions) and (of_products or not products) and (of_convolutions or not convolutions)


class TensorRTEngine(EngineBase):
    """Compiles regions to TensorRT engines for the GPUs of this process. Weights are inputs of engines: held once, and live.

    `load` makes an engine of its bytes on a device, `entry` is what builds it, `streams` are a device's, `machine` tells the device and its
    driver: tests give their own.
    """

    name: str = "tensorrt"
    devices: frozenset[str] = frozenset({"cuda"})
    keeps_deadline: bool = True

    def __init__(
        self,
        config: Config,
        services: Services,
        *,
        entry: str = BUILD,
        load: Callable[[bytes, Device], LoadedEngine] | None = None,
        streams: Callable[[Device], Streams] = CudaStreams,
        machine: Callable[[Device], str] = fingerprint,
    ) -> None:
        self._services = services
        self._entry = entry
        self._load = load or _load
        self._streams = streams
        self._machine = machine
        self._builds = Builds(services.store, _KIND)

    def available(self) -> Verdict:
        found = installation()
        if isinstance(found, Refused):
            return found
        return Supported() if torch.cuda.is_available() else NO_GPU

    def version(self, device: Device) -> str:
        return f"{installation()} {sources_version(*SOURCES)}"

    def describe(self) -> Sequence[tuple[str, str]]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return described([torch.cuda.get_device_name(index) for index in range(count)])

    def supports(self, node: torch.fx.Node) -> Verdict:
        return capability.supports(node)

    def accepts(self, region: Region) -> Verdict:
        """It needs tensors of one device, whose sizes tell every other size."""
        if region.numbers:
            return Refused(Reason.DEVICE, f"{region.name} reads numbers that are tensors on the host")
        specs = [each.spec for each in region.inputs]
        told = {str(size) for spec in specs if spec is not None for size in spec.shape}
        untold = [each.name for each in _symbols(region) if each.name not in told]
        if untold:
            return Refused(Reason.SYMBOLIC_SHAPE, f"no dimension of an input of {region.name} is the size {untold[0]}")
        return Supported()

    def reads(self, spec: TensorSpec) -> TensorSpec:
        """Dense memory, in any order of dimensions."""
        return spec if memory_order(spec) is not None else contiguous(spec)

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        """Builds run one after another, in processes, each for at most the deadline's limit; equal regions share one. Nothing waits for them:
        what was built before is loaded, the rest is pending."""
        return [self._compiled(region, deadline) for region in regions]

    def _compiled(self, region: Region, deadline: Deadline) -> CompiledRegion | PendingRegion | Exception:
        try:
            request = Request.of(region, ranges_of(region), tf32=allows_tf32(region))
            data, key = request.to_bytes(), engine_key(region, request, self._machine(region.device))
            load = functools.partial(self._region, region, request, KeptKernels(self._services.store, key))
            build = self._builds.start(key, self._entry, data, deadline.limit_s)
            if build.done:
                try:
                    return load(build.result(0))
                except _UnreadableError:  # what was kept is cut short, or of a TensorRT whose version does not tell
                    build = self._builds.start(key, self._entry, data, deadline.limit_s, rebuild=True)
            return BuildingRegion(build, load)
        except CompileError as error:
            return error

    def _region(self, region: Region, request: Request, kernels: KeptKernels, data: bytes) -> CompiledRegion:
        try:
            built = Engine.from_bytes(data)
            loaded = self._load(built.plan, region.device)
        except CompileError as error:
            raise _UnreadableError(str(error)) from error
        kernels.give(loaded)
        inputs = [each for i in request.engine_inputs if isinstance(each := request.inputs[i], Layout)]
        runner = EngineRunner(
            loaded,
            [(name, layout.order) for name, layout in zip(built.inputs, inputs, strict=True)],
            [(name, layout.order) for name, layout in zip(built.outputs, request.outputs, strict=True)],
            self._streams(region.device),
            compiled=functools.partial(kernels.keep, loaded),
        )
        program = program_of(region, request, runner, loaded.scratch_bytes)
        made = TensorRTRegion(region.name, program, self._services.run_program(program), built)
        return RangedRegion(made, region, request.ranges) if request.ranges else made


class _UnreadableError(CompileError):
    """Bytes that are no engine for this TensorRT and GPU."""


def engine_key(region: Region, request: Request, machine: str) -> str:
    """Names everything that an engine depends on: the region with every operator, argument and wire, what is asked of the builder, the versions
    of TensorRT and torch_tensorrt, the GPU with its driver (`machine`), and this package's sources."""
    digest = hashlib.sha256()
    for part in (region.key, request.form, installation(), machine, sources_version(*SOURCES)):
        digest.update(f"{part}\0".encode())
    for tensor in request.contents():
        digest.update(tensor)
    return digest.hexdigest()


def program_of(region: Region, request: Request, runner: EngineRunner, scratch_bytes: int) -> Program:
    """The region as one step: its tensors, and a block of working memory that the plan lays where nothing else is in use."""
    read = [each for i in request.engine_inputs if isinstance(each := request.inputs[i], Layout)]
    buffers = [replace(layout.spec, device=region.device) for layout in (*read, *request.outputs)]
    outputs = range(len(read), len(buffers))
    if scratch_bytes:
        size = scratch_buffer_bytes(scratch_bytes)
        buffers.append(TensorSpec((size,), "uint8", (1,), region.device))
    place = {position: buffer for buffer, position in enumerate(request.engine_inputs)}
    step = ExternalCall(
        runner, tuple(range(len(buffers))), len(buffers) - len(read), f"TensorRT engine of {region.name}"
    )
    return Program(
        buffers=tuple(buffers),
        inputs=tuple(place.get(position, -1) for position in range(len(region.inputs))),
        outputs=tuple(outputs),
        constants=(),
        steps=(step,),
        signature=tuple(each.spec if each.spec is not None else each.size for each in region.inputs),
        device=region.device,
    )


class TensorRTRegion(CompiledRegionBase):
    """A region as one engine."""

    def __init__(self, name: str, program: Program, run: ProgramCall, built: Engine) -> None:
        self.program = program
        self._name = name
        self._run = run
        self._built = built

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def release(self) -> None:
        self._run.release()

    def texts(self) -> Sequence[KernelText]:
        """Its layers, as TensorRT fused them."""
        return [KernelText(self._name, "\n".join(self._built.layers) + "\n", ".txt")]


class RangedRegion(CompiledRegionBase):
    """A region whose engine serves some sizes: others are run by PyTorch's operators. Sizes are read from shapes, on the host."""

    def __init__(self, made: TensorRTRegion, region: Region, ranges: Mapping[str, Range]) -> None:
        self._made = made
        self._eager = region.eager
        shapes = [(i, each.spec.shape) for i, each in enumerate(region.inputs) if each.spec is not None]
        dims = [(i, d, size) for i, shape in shapes for d, size in enumerate(shape)]
        self._bounds = [
            (i, d, extreme(size, ranges, "least"), extreme(size, ranges, "most"))
            for i, d, size in dims
            if not isinstance(size, int)
        ]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if all(least <= inputs[i].shape[d] <= most for i, d, least, most in self._bounds):
            return self._made(inputs)
        with torch.no_grad():
            return self._eager(inputs)

    def release(self) -> None:
        self._made.release()

    def texts(self) -> Sequence[KernelText]:
        return self._made.texts()


def _load(plan: bytes, device: Device) -> LoadedEngine:
    from torch_hybrid_backend.engines.tensorrt import adapter

    with torch.cuda.device(device.index):
        return adapter.Loaded(plan)


def _symbols(region: Region) -> list[Symbol]:
    sizes: list[Dim] = []
    for each in region.inputs:
        if each.spec is not None:
            sizes += [*each.spec.shape, *each.spec.strides]
        elif each.size is not None:
            sizes.append(each.size)
    return symbols(sizes)


def _known_range(region: Region, name: str) -> tuple[int, int]:
    """The range of a size symbol, as the graph's capture knows it."""
    for node in region.graph_module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    for each in size.node.expr.free_symbols:
                        if str(each) == name:
                            bounds = size.node.shape_env.bound_sympy(each)
                            return tuple(int(b) if b.is_Integer else sys.maxsize for b in (bounds.lower, bounds.upper))  # type: ignore[return-value]
    return 1, sys.maxsize
