"""The TensorRT engine: regions as engines that NVIDIA's builder makes, each in a process of its own. Importing this module imports no TensorRT.

The engine is disabled by default; the setting `engines` (HYBRID_ENGINES) enables it. No GPU has run its engines yet.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx

from torch_hybrid_backend.builds.builds import Build, Builds
from torch_hybrid_backend.builds.pending import BuildingRegion
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import (
    CompiledRegion,
    CompiledRegionBase,
    EngineBase,
    KernelText,
    Pending,
    PendingRegion,
    ProgramCall,
    RunProgram,
)
from torch_hybrid_backend.core.plan import Attempt
from torch_hybrid_backend.core.program import ExternalCall, ExternalRunner, PackedConstant, Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tensorrt import capability
from torch_hybrid_backend.engines.tensorrt.build import (
    BuildRequest,
    Layout,
    SerializedEngine,
    contiguous,
    memory_order,
)
from torch_hybrid_backend.engines.tensorrt.constants import (
    Budget,
    ConstantForm,
    EitherRunner,
    are_worth_memory,
    positions_of,
)
from torch_hybrid_backend.engines.tensorrt.installed import NO_GPU, described, installation
from torch_hybrid_backend.engines.tensorrt.kernels import KeptKernels
from torch_hybrid_backend.engines.tensorrt.precision_fallback import (
    ATTENTION,
    CONVOLUTIONS,
    PRODUCTS,
    AccumulationPrecision,
    accumulation_precisions,
    keeps_tf32_exact,
)
from torch_hybrid_backend.engines.tensorrt.precision_fallback import name as operator_name
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of, symbols_of
from torch_hybrid_backend.engines.tensorrt.runtime import (
    CudaStreams,
    EngineRunner,
    LoadedEngine,
    Streams,
    scratch_buffer_bytes,
)
from torch_hybrid_backend.engines.tensorrt.verdicts import Verdicts
from torch_hybrid_backend.errors import AccuracyError, CompileError
from torch_hybrid_backend.machine import fingerprint, float32_precision
from torch_hybrid_backend.measuring.measure import Timer, measure
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.sources import sources_version

_log = logging.getLogger(__name__)

BUILD = "torch_hybrid_backend.engines.tensorrt.build:build"
_KIND = "tensorrt"
# The rooms of this package whose sources the bytes of an engine depend on.
SOURCES = ("core", "sizes", "graph", "engines/tensorrt")


def allows_tf32(region: Region) -> bool:
    """True if PyTorch allows TF32 for all products and convolutions of the region: an engine has one TF32 flag for both."""
    of_products, of_convolutions = (precision == "tf32" for precision in float32_precision("cuda"))
    names = {operator_name(node) for node in region.graph_module.graph.nodes}
    products = any(name in PRODUCTS or name.startswith(ATTENTION) for name in names)
    convolutions = bool(names & CONVOLUTIONS)
    return (products or convolutions) and (of_products or not products) and (of_convolutions or not convolutions)


class TensorRTEngine(EngineBase):
    """Compiles regions to TensorRT engines for the GPUs of this process. Weights are inputs of engines, held once and live. Where it is faster,
    weights are constants (`engines/tensorrt/constants.py`).

    `load`: loads an engine's bytes on a device. `entry`: the function that builds engines. `streams`: the streams of a device. `machine`: key
    of a device and its driver. `verdicts`: kept verdicts on operators. Tests pass their own.
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
        verdicts: Verdicts | None = None,
    ) -> None:
        self._services = services
        self._percent = config.tensorrt_constants_percent
        self._entry = entry
        self._load = load or _load
        self._streams = streams
        self._machine = machine
        self._builds = Builds(services.store, _KIND)
        self._verdicts = Verdicts(services.store, verdict_versions()) if verdicts is None else verdicts

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
        return capability.supports(node, self._verdicts)

    def accepts(self, region: Region) -> Verdict:
        """Supported if all tensors of the region are on one device, and every size symbol is a dimension of an input."""
        if region.numbers:
            return Refused(Reason.DEVICE, f"{region.name} reads numbers that are tensors on the host")
        specs = [each.spec for each in region.inputs]
        known = {str(size) for spec in specs if spec is not None for size in spec.shape}
        unknown = [each.name for each in symbols_of(region) if each.name not in known]
        if unknown:
            return Refused(Reason.SYMBOLIC_SHAPE, f"no dimension of an input of {region.name} is the size {unknown[0]}")
        return Supported()

    def reads(self, spec: TensorSpec) -> TensorSpec:
        """The spec itself if it is dense, in any order of dimensions; otherwise the contiguous spec."""
        return spec if memory_order(spec) is not None else contiguous(spec)

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        """Load engines that were built before, and start builds for the other regions, which are returned as pending.

        Builds run one after another, in processes, each for at most the deadline's limit. Equal regions share a build."""
        budget = Budget.of(regions, self._percent)
        return [self._compiled(region, deadline, budget) for region in regions]

    def _compiled(
        self, region: Region, deadline: Deadline, budget: Budget, failed: tuple[Attempt, ...] = ()
    ) -> CompiledRegion | PendingRegion | Exception:
        """The region with the first accumulation precision whose results are not known to differ too much. `failed`: earlier attempts."""
        try:
            for accumulation in accumulation_precisions(region)[len(failed) :]:
                try:
                    return self._with_accumulation(region, accumulation, deadline, budget, failed)
                except AccuracyError as error:  # remembered
                    failed = (*failed, Attempt(accumulation, str(error)))
            raise AccuracyError(
                f"its results are too far from eager's: {'; '.join(f'{a.why} {a.how}' for a in failed)}"
            )
        except CompileError as error:
            return error

    def _with_accumulation(
        self,
        region: Region,
        accumulation: AccumulationPrecision,
        deadline: Deadline,
        budget: Budget,
        failed: tuple[Attempt, ...],
    ) -> CompiledRegion | PendingRegion:
        tf32 = allows_tf32(region) or keeps_tf32_exact(region, accumulation)
        request = BuildRequest.of(region, ranges_of(region), tf32=tf32, accumulation=accumulation)
        key, data = self.key_and_bytes(region, request)
        attempts = (*failed, Attempt(accumulation)) if failed else ()

        def more_exact(deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
            why = AccuracyError(f"a relative error of {error:.2g}")
            self._builds.reject(key, why)
            found = self._compiled(region, deadline, budget, (*failed, Attempt(accumulation, str(why))))
            if isinstance(found, Exception) and not isinstance(found, AccuracyError):
                raise found
            return None if isinstance(found, Exception) else found

        def load(data: bytes) -> CompiledRegion:
            runner, built = self.runner(region, request, key, data)
            program = program_of(region, request, runner, runner.scratch_bytes)
            constants = self._constants(region, request, runner, budget, deadline.limit_s)
            run = self._services.run_program(program)
            return TensorRTRegion(region.name, program, run, built, attempts, more_exact, constants)

        build = self._builds.start(key, self._entry, data, deadline.limit_s)
        if build.done:
            try:
                return load(build.result(0))
            except _UnreadableError:  # the kept bytes are truncated, or of an incompatible TensorRT of the same version
                build = self._builds.start(key, self._entry, data, deadline.limit_s, rebuild=True)
        return BuildingRegion(build, load, attempts)

    def runner(
        self, region: Region, request: BuildRequest, key: str, data: bytes
    ) -> tuple[EngineRunner, SerializedEngine]:
        """Load the engine that was built for a request on the region's device. Raises CompileError for bytes that are no such engine."""
        try:
            built = SerializedEngine.from_bytes(data)
            loaded = self._load(built.plan, region.device)
        except CompileError as error:
            raise _UnreadableError(str(error)) from error
        kernels, streams = KeptKernels(self._services.store, key), self._streams(region.device)
        with streams.entered():
            kernels.give(loaded)
        inputs = [each for i in request.engine_inputs if isinstance(each := request.inputs[i], Layout)]
        runner = EngineRunner(
            loaded,
            [(name, layout.order) for name, layout in zip(built.inputs, inputs, strict=True)],
            [(name, layout.order) for name, layout in zip(built.outputs, request.outputs, strict=True)],
            streams,
            compiled=functools.partial(kernels.keep, loaded),
        )
        return runner, built

    def _constants(
        self, region: Region, request: BuildRequest, runner: EngineRunner, budget: Budget, limit_s: float
    ) -> _Constants | str:
        """The region's form with weights as constants, or the reason why there is none; "" if the region has no weights."""
        positions = positions_of(region)
        if not positions:
            return ""
        if request.ranges:
            return "its sizes vary, and a plan is made for each"
        size_bytes = sum(spec.size_bytes for i in positions if (spec := region.inputs[i].spec) is not None)
        if size_bytes > budget.limit_bytes:
            return f"they take {size_bytes} bytes, and `tensorrt_constants_percent` allows {budget.limit_bytes}"
        streams = self._streams(region.device)
        maker = _Maker(self, region, request, positions, limit_s)
        form = ConstantForm(region.name, size_bytes, maker, lambda: streams.capturing)
        place = {position: buffer for buffer, position in enumerate(request.engine_inputs)}
        weights = [place[position] for position in positions]
        either = EitherRunner(runner, form, len(place), weights, lambda: streams.capturing)

        def program(scratch_bytes: int) -> Program:
            return program_of(region, request, either, scratch_bytes, PackedConstant(len(place), positions, form.pack))

        timer = functools.partial(self._services.timer, region.device)
        return _Constants(form, positions, budget, program, self._services.run_program, timer, runner.scratch_bytes)

    def key_and_bytes(self, region: Region, request: BuildRequest) -> tuple[str, bytes]:
        """The key of an engine, and the bytes of the request for it."""
        return engine_key(region, request, self._machine(region.device)), request.to_bytes()

    def start(self, key: str, request: bytes, limit_s: float) -> Build:
        """Start a build, or return the build that was started or kept before. Kept bytes that are no engine are built anew."""
        build = self._builds.start(key, self._entry, request, limit_s)
        if build.done:
            kept = build.result(0)
            try:
                SerializedEngine.from_bytes(kept)
            except CompileError:
                build = self._builds.start(key, self._entry, request, limit_s, rebuild=True)
        return build


@dataclass(frozen=True, slots=True, eq=False)
class _Maker:
    """The maker of engines of one region with its weights as constants: a `constants.Maker`."""

    engine: TensorRTEngine
    region: Region
    request: BuildRequest
    positions: tuple[int, ...]
    limit_s: float

    def _with(self, weights: Sequence[torch.Tensor]) -> BuildRequest:
        return replace(self.request, constants=dict(zip(self.positions, weights, strict=True)))

    def key_and_request(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        return self.engine.key_and_bytes(self.region, self._with(weights))

    def start(self, key: str, request: bytes) -> Build:
        return self.engine.start(key, request, self.limit_s)

    def load(self, key: str, built: bytes) -> tuple[EngineRunner, SerializedEngine]:
        # Which positions are constants is all that counts here.
        return self.engine.runner(self.region, self._with([torch.empty(0)] * len(self.positions)), key, built)


class _UnreadableError(CompileError):
    """Bytes that are no engine for this TensorRT and GPU."""


def engine_key(region: Region, request: BuildRequest, machine: str) -> str:
    """Key of everything that an engine depends on: the region with every operator, argument and edge, the build request, the versions
    of TensorRT and torch_tensorrt, the GPU with its driver (`machine`), and this package's sources."""
    digest = hashlib.sha256()
    for part in (region.key, request.form, installation(), machine, sources_version(*SOURCES)):
        digest.update(f"{part}\0".encode())
    for tensor in request.contents():
        digest.update(tensor)
    return digest.hexdigest()


def verdict_versions() -> str:
    """The versions that verdicts on operators depend on, in addition to the operators' forms. torch_tensorrt reads the capability of the
    current GPU when it is imported."""
    chip = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return (
        f"torch {torch.__version__} {torch.version.git_version}, {installation()}, {chip}, {sources_version(*SOURCES)}"
    )


def program_of(
    region: Region,
    request: BuildRequest,
    runner: ExternalRunner,
    scratch_bytes: int,
    mark: PackedConstant | None = None,
) -> Program:
    """The region as a program of one step, with its tensors and a block of working memory. Steps of a plan share that block, as it is in use
    during one step only. Its size is that which the engine needs for the largest sizes that it serves. `mark`: an int64 on the CPU that the
    step reads after its inputs."""
    layouts = [each for i in request.engine_inputs if isinstance(each := request.inputs[i], Layout)]
    read = [replace(layout.spec, device=region.device) for layout in layouts]
    if mark is not None:
        read.append(TensorSpec((1,), "int64", (1,), CPU))
    buffers = [*read, *(replace(layout.spec, device=region.device) for layout in request.outputs)]
    outputs = range(len(read), len(buffers))
    if scratch_bytes:
        size = scratch_buffer_bytes(scratch_bytes)
        buffers.append(TensorSpec((size,), "uint8", (1,), region.device))
    place = {position: buffer for buffer, position in enumerate(request.engine_inputs)}
    title = f"TensorRT engine of {region.name}" + ("" if mark is None else ", weights as constants")
    step = ExternalCall(runner, tuple(range(len(buffers))), len(buffers) - len(read), title)
    return Program(
        buffers=tuple(buffers),
        inputs=tuple(place.get(position, -1) for position in range(len(region.inputs))),
        outputs=tuple(outputs),
        constants=() if mark is None else (mark,),
        steps=(step,),
        signature=tuple(each.spec if each.spec is not None else each.size for each in region.inputs),
        device=region.device,
        ranges=tuple((name, each.least, each.most) for name, each in request.ranges.items()),
    )


# Compiles the region with the next accumulation precision, given the relative error of its results; None if there is none.
MoreExact = Callable[[Deadline, float], CompiledRegion | PendingRegion | None]


class TensorRTRegion(CompiledRegionBase):
    """A region as one engine. `attempts`: accumulation precisions that were tried. `constants`: the form with constants, or why there is
    none."""

    def __init__(
        self,
        name: str,
        program: Program,
        run: ProgramCall,
        built: SerializedEngine,
        attempts: tuple[Attempt, ...] = (),
        more_exact: MoreExact = lambda deadline, error: None,
        constants: _Constants | str = "",
    ) -> None:
        self.program = program
        self.name = name
        self.attempts = attempts
        self._more_exact = more_exact
        self._next: CompiledRegion | PendingRegion | None = None
        self._run = run
        self._built = built
        self._constants = constants

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        """The form with constants, if its engine is built and faster; otherwise this form, and the build is started."""
        return self if isinstance(self._constants, str) else self._constants.faster(self, inputs, budget_s)

    @property
    def note(self) -> str:
        """The reason why the weights are inputs or constants; "" if that is not decided."""
        why = self._constants if isinstance(self._constants, str) else self._constants.why_inputs
        if why:
            return f"weights as inputs: {why}"
        return "" if isinstance(self._constants, str) else self._constants.comparison

    def begun(self) -> Pending | None:
        return None if isinstance(self._constants, str) else self._constants.form.begun()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        """The region with the next accumulation precision; pending until it is built."""
        if self._next is None:
            self._next = self._more_exact(deadline, error)
        return self._next.result() if isinstance(self._next, PendingRegion) and self._next.done else self._next

    def release(self) -> None:
        self._run.release()

    def texts(self) -> Sequence[KernelText]:
        """The engine's layers, as TensorRT fused them."""
        return [_layers(self.name, self._built.layers)]


@dataclass(slots=True, eq=False)
class _Constants:
    """The form of a region that takes its weights as constants while they do not change. `program`: makes its program, given the bytes of
    working memory. `scratch_bytes`: working memory of the form with inputs. `timer`: times work on the region's device."""

    form: ConstantForm
    positions: tuple[int, ...]
    budget: Budget
    program: Callable[[int], Program]
    run_program: RunProgram
    timer: Callable[[], Timer]
    scratch_bytes: int
    made: RegionWithConstants | None = None
    comparison: str = ""  # times of both forms, if `made` exists

    @property
    def why_inputs(self) -> str:
        """The reason why constants were given up; "" if they were not."""
        return self.form.why if self.form.is_given_up else ""

    def faster(self, inputs_form: TensorRTRegion, inputs: Sequence[torch.Tensor], budget_s: float) -> CompiledRegion:
        """The faster form on a call's inputs, timed for about `budget_s` seconds and decided once.

        `inputs_form` if it is about as fast, or if the other form is not built."""
        engine = self.form.prepare([inputs[i] for i in self.positions])
        if engine is None:
            return inputs_form
        if self.made is not None:
            return self.made
        size = max(self.scratch_bytes, engine.scratch_bytes)
        self.form.limit_scratch(size)
        program = self.program(size)
        made = RegionWithConstants(inputs_form, program, self.run_program(program), self.form)
        with self.form.trial():
            made(inputs)
        if not self.form.serves:
            self.form.give_up("they changed while engines were chosen")
            return inputs_form
        times = measure([lambda: inputs_form(inputs), lambda: made(inputs)], budget_s, timer=self.timer())
        as_inputs, as_constants = (each.low_us for each in times)
        comparison = (
            f"{time_in_words(as_inputs)} with its weights as inputs, {time_in_words(as_constants)} with constants"
        )
        if not are_worth_memory(as_inputs, as_constants):
            self.form.give_up(f"it takes {comparison}")
        elif self.budget.grant(self.form, as_inputs - as_constants):
            _log.info("region %s takes %s", self.form.name, comparison)
            self.comparison = f"weights as constants: it takes {comparison}"
            self.made = made
            return made
        made.release()
        return inputs_form


class RegionWithConstants(CompiledRegionBase):
    """A region as two engines: one with constants while these equal the weights, otherwise the one with inputs."""

    form = "constants"

    def __init__(self, inputs_form: TensorRTRegion, program: Program, run: ProgramCall, form: ConstantForm) -> None:
        self.program = program
        self.attempts = inputs_form.attempts
        self._inputs_form = inputs_form
        self._run = run
        self._form = form

    @property
    def note(self) -> str:
        return self._inputs_form.note

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(inputs)

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | PendingRegion | None:
        """The form with inputs, with the same accumulation precision: constants may be the reason for the error."""
        self._form.give_up("its results are too far from eager's")
        return self._inputs_form

    def release(self) -> None:
        self._run.release()

    def texts(self) -> Sequence[KernelText]:
        """The layers of the engine with constants, if it is built, otherwise of the engine with inputs."""
        layers = self._form.layers
        return [_layers(self._inputs_form.name, layers)] if layers else self._inputs_form.texts()


def _layers(name: str, layers: Sequence[str]) -> KernelText:
    return KernelText(name, "\n".join(layers) + "\n", ".txt")


def _load(plan: bytes, device: Device) -> LoadedEngine:
    from torch_hybrid_backend.engines.tensorrt.loaded import Loaded

    with torch.cuda.device(device.index):
        return Loaded(plan)
