"""Adapter to torch_tensorrt: lowering, converter registry, networks and engines. Only this module and `converters` import torch_tensorrt.

Differences between releases of torch_tensorrt are data in `_SETTINGS`. Everything else is common to the sources of 2.11, 2.13 and 2.14.
torch_tensorrt's partitioner, runtime and engine cache are not used: the cache unpickles, and its key leaves out the arguments of operators.

Importing this module takes seconds and needs a GPU, whose capability torch_tensorrt reads. The first check of an operator, or the first build
of an engine, imports this module. Later processes read kept verdicts (`verdicts`) and load engines with TensorRT alone (`loaded`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch_tensorrt import __version__ as release
from torch_tensorrt._enums import dtype as trt_dtype
from torch_tensorrt._Input import Input
from torch_tensorrt.dynamo._settings import CompilationSettings
from torch_tensorrt.dynamo.conversion._ConverterRegistry import (
    DYNAMO_ATEN_CONVERTERS,
    ConverterSupport,
    node_has_dynamic_shapes,
)
from torch_tensorrt.dynamo.conversion._TRTInterpreter import TRTInterpreter, trt  # trt: TensorRT or RTX
from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor
from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering
from torch_tensorrt.dynamo.lowering.passes import constant_folding

from torch_hybrid_backend.engines.tensorrt.converters import converter_of
from torch_hybrid_backend.engines.tensorrt.decompositions import DECOMPOSITIONS, use_vec_overloads
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.log import tensorrt_log
from torch_hybrid_backend.engines.tensorrt.overlap import SharedContext
from torch_hybrid_backend.engines.tensorrt.size_arithmetic import lower_sizes
from torch_hybrid_backend.errors import CompileError, failures
from torch_hybrid_backend.graph.quantized import operator_name

_log = logging.getLogger(__name__)

GoingOn = Callable[[float], bool]


@contextlib.contextmanager
def _be_silent() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    if not handlers:  # remove what logging.basicConfig added; the user may have added handlers of other types meanwhile
        root.handlers[:] = [each for each in root.handlers if type(each) is not logging.StreamHandler]


# Hides torch_tensorrt's warnings, and removes the handler that its messages through the root logger add.
_silent = SharedContext(_be_silent)


# --- settings ---------------------------------------------------------------------------------------------------------------------------

# Settings by name; each release gets the settings that it has. Some defaults change results: `attn_bias_is_causal` takes every bias of
# attention for a causal mask. Releases before 2.12 must be asked for strong typing; later ones always use it.
_SETTINGS: dict[str, object] = {
    "min_block_size": 1,
    "truncate_double": False,
    "use_explicit_typing": True,  # until 2.11
    "use_fp32_acc": False,
    "attn_bias_is_causal": False,
    "decompose_attention": True,
    "immutable_weights": True,
    "cache_built_engines": False,
    "reuse_cached_engines": False,
    "offload_module_to_cpu": False,
    "enable_autocast": False,
    "use_complex_decomposition": False,  # from 2.14
}


def _settings(tf32: bool) -> CompilationSettings:
    known = {field.name for field in dataclasses.fields(CompilationSettings)}
    chosen = {name: value for name, value in _SETTINGS.items() if name in known}
    return CompilationSettings(**chosen, disable_tf32=not tf32)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {**get_decompositions(False, decompose_attention=True), **DECOMPOSITIONS}


# --- lowering ---------------------------------------------------------------------------------------------------------------------------


def lowered(graph_module: torch.fx.GraphModule, fakes: Fakes, inputs: Sequence[object]) -> torch.fx.GraphModule:
    """The graph lowered to operators that have converters, with metadata.

    `inputs`: a value for each placeholder. The tensors among them are of `fakes` and become the inputs of the result, in this order. Sizes are
    read from these tensors. Raises what tracing raises, and CompileError if tracing decided something by the example of a size."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        left = iter(given)
        return torch.fx.Interpreter(graph_module).run(
            *(next(left) if isinstance(value, torch.Tensor) else value for value in inputs)
        )

    with _silent:
        traced = fakes.traced(run, tensors, _decompositions())
        use_vec_overloads(traced)
        lower_sizes(traced)
        with _quantizers_kept:
            result: torch.fx.GraphModule = post_lowering(traced, _settings(tf32=False))
    assumptions = fakes.assumptions()
    if assumptions:
        raise CompileError(f"TensorRT's lowering holds only for sizes with {', '.join(assumptions)}")
    return result


@contextlib.contextmanager
def _keep_quantizers() -> Iterator[None]:
    """Keep dequantized constants from being folded: as floats they take four times the memory, and integer products become float products."""
    folder = constant_folding._TorchTensorRTConstantFolder
    is_impure = folder.is_impure
    folder.is_impure = lambda self, node: operator_name(node) is not None or is_impure(self, node)
    yield
    folder.is_impure = is_impure


_quantizers_kept = SharedContext(_keep_quantizers)


# --- capability -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Converters:
    """The registry's answer for one node.

    `known`: number of converters of the operator. `refusing`: names of validators that refuse the node. `static_only`: true if the other
    converters take no sizes known only at run time. `allocates`: true if the chosen converter's result has a size that depends on data."""

    known: int
    refusing: tuple[str, ...] = ()
    static_only: bool = False
    allocates: bool = False

    @property
    def found(self) -> bool:
        return self.known > len(self.refusing) and not self.static_only


def converters_of(node: torch.fx.Node) -> Converters:
    """The registry's answer for a node of a lowered graph, with reasons.

    The registry's own look-up gives no reasons. It reads settings of the whole process, which may be the user's; so does its validator of
    `getitem`. Here `getitem` has a converter if the operator whose result it indexes has one."""
    if converter_of(node) is not None:
        return Converters(1)
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        is_found = source.op == "get_attr" or converters_of(source).found
        return Converters(1, () if is_found else ("getitem_validator",))
    settings = _settings(tf32=False)
    candidates = [each for each in DYNAMO_ATEN_CONVERTERS.get(node.target, ()) if _is_builtin(each)]
    willing = [each for each in candidates if _accepts(each.capability_validator, node, settings)]
    refusing = tuple(_validator(each.capability_validator) for each in candidates if each not in willing)
    dynamic = [each for each in willing if each.supports_dynamic_shapes] if node_has_dynamic_shapes(node) else willing
    return Converters(
        len(candidates),
        refusing,
        bool(willing and not dynamic),
        any(each.requires_output_allocator for each in dynamic[:1]),
    )


def _is_builtin(converter: ConverterSupport) -> bool:
    """True if the converter is torch_tensorrt's own. The build process has no converters that a user registered; later processes, which read
    the kept verdict, may have none either."""
    return str(converter.converter_implementation.__module__).partition(".")[0] == "torch_tensorrt"


def _accepts(validator: Callable[..., bool], node: torch.fx.Node, settings: CompilationSettings) -> bool:
    try:
        return bool(validator(node, settings))
    except failures(Exception) as error:  # some validators assume positional arguments
        _log.debug("the validator %s failed for %s: %s", _validator(validator), node, error)
        return False


def _validator(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", function))


# --- building ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """An input of an engine. `shape`: its sizes, -1 if known only at run time. `order`: its dimensions in memory order, outermost first.
    `least`, `typical`, `most`: the range of shapes."""

    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    shape: tuple[int, ...]
    least: tuple[int, ...]
    typical: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NetworkOutput:
    """An output of an engine; fields as in `NetworkInput`."""

    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    shape: tuple[int, ...]


def build_engine(
    module: torch.fx.GraphModule,
    inputs: Sequence[NetworkInput],
    outputs: Sequence[NetworkOutput],
    *,
    tf32: bool,
    going_on: GoingOn,
) -> tuple[bytes, tuple[str, ...]]:
    """The serialized engine of a lowered graph, and its layers as TensorRT fused them: "gemm: name (Half, Half -> Half)".

    `going_on`: takes the progress, from 0 to 1, and returns false to stop the build. Raises CompileError if the build was stopped, if a
    converter or TensorRT fails, and if the network would not be exact.
    """
    with _silent, tensorrt_log.collect(fully=True) as log:
        interpreter = _Interpreter(module, inputs, outputs, _settings(tf32), going_on)
        try:
            interpreter._construct_trt_network_def()
        except CompileError:
            raise
        except failures(Exception) as error:  # a converter may fail in any way
            node = interpreter._cur_node
            raise CompileError(
                f"the converter of {None if node is None else node.target} failed: {type(error).__name__}: {error}"
            ) from error
        _check_exact(interpreter.ctx.net)
        config = interpreter._populate_trt_builder_config()
        config.progress_monitor = monitor = _Monitor(going_on)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        plan = interpreter.builder.build_serialized_network(interpreter.ctx.net, config)
    if monitor.cancelled:
        raise CompileError("the build of a TensorRT engine was cancelled")
    if plan is None:
        raise CompileError(f"TensorRT could not build an engine: {log.why}")
    return bytes(plan), tuple(log.layers)


class _Interpreter(TRTInterpreter):  # type: ignore[misc]
    """Runs a lowered graph through converters. Inputs and outputs get this package's names, dtypes, ranges and memory orders."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[NetworkInput],
        outputs: Sequence[NetworkOutput],
        settings: CompilationSettings,
        going_on: GoingOn,
    ) -> None:
        ranged = [each for each in inputs if each.least != each.most]
        # The base class only needs to know whether any input has a range.
        spec = [Input(min_shape=(1,), opt_shape=(2,), max_shape=(2,), dtype=torch.float32)] if ranged else []
        super().__init__(module, spec, compilation_settings=settings)
        self._inputs = iter(inputs)
        self._outputs = outputs
        self._going_on = going_on
        self._kept: list[Any] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        if not self._going_on(0.0):
            raise CompileError("the build of a TensorRT engine was cancelled")
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        own = converter_of(self._cur_node)
        if own is None:
            return super().call_function(target, args, kwargs)
        return own(self.ctx, self._kept, self._cur_node_name, *args, **kwargs)

    def placeholder(self, target: str, args: Any, kwargs: Any) -> Any:
        given = next(self._inputs)
        shape, least, typical, most = (
            [sizes[d] for d in given.order] for sizes in (given.shape, given.least, given.typical, given.most)
        )
        tensor = self.ctx.net.add_input(given.name, trt_dtype._from(given.dtype).to(trt.DataType), shape)
        if self.optimization_profiles and least != most:
            self.optimization_profiles[0].set_shape(given.name, least, typical, most)
        inverse = tuple(given.order.index(d) for d in range(len(given.order)))
        return self._reordered(tensor, inverse, given.name)

    def output(self, target: str, args: Any, kwargs: Any) -> None:
        aliased = getattr(self.ctx, "aliased_outputs", ())
        if aliased:  # from 2.14: KV caches are updated in place
            raise CompileError("the engine would write into its inputs")
        seen: set[int] = {id(self.ctx.net.get_input(i)) for i in range(self.ctx.net.num_inputs)}
        names = {self.ctx.net.get_input(i).name for i in range(self.ctx.net.num_inputs)}
        for result, wanted in zip(args[0], self._outputs, strict=True):
            is_folded = isinstance(result, torch.Tensor)
            value = get_trt_tensor(self.ctx, result, f"{wanted.name}_constant") if is_folded else result
            if not isinstance(value, trt.ITensor):
                raise CompileError(f"the output {wanted.name} is not a tensor of the network")
            tensor = self._shaped(self._typed(value, wanted), wanted)
            tensor = self._reordered(tensor, wanted.order, wanted.name)
            if id(tensor) in seen or tensor.name in names:
                tensor = self.ctx.net.add_identity(tensor).get_output(0)
            seen.add(id(tensor))
            names.add(wanted.name)
            tensor.name = wanted.name
            self.ctx.net.mark_output(tensor)

    def _typed(self, tensor: Any, wanted: NetworkOutput) -> Any:
        dtype = trt_dtype._from(wanted.dtype).to(trt.DataType)
        if tensor.dtype == dtype:
            return tensor
        if (tensor.dtype, dtype) not in _WIDENING:
            raise CompileError(f"a converter computes {wanted.name} in {tensor.dtype}, not in {dtype}")
        return self.ctx.net.add_cast(tensor, dtype).get_output(0)

    def _shaped(self, tensor: Any, wanted: NetworkOutput) -> Any:
        """Restore the shape of a scalar tensor, which converters make a tensor of one dimension."""
        shape = tuple(tensor.shape)
        if shape == wanted.shape or -1 in (*shape, *wanted.shape):
            return tensor
        if [n for n in shape if n != 1] != [n for n in wanted.shape if n != 1]:
            raise CompileError(f"a converter makes {wanted.name} of shape {shape}, not {wanted.shape}")
        layer = self.ctx.net.add_shuffle(tensor)
        layer.reshape_dims = wanted.shape
        return layer.get_output(0)

    def _reordered(self, tensor: Any, order: tuple[int, ...], name: str) -> Any:
        if order == tuple(range(len(order))):
            return tensor
        layer = self.ctx.net.add_shuffle(tensor)
        layer.first_transpose = trt.Permutation(order)
        layer.name = f"{name} in memory"
        return layer.get_output(0)


# Exact conversions: converters compute indices in 32 bits.
_WIDENING = {
    (trt.int32, trt.int64),
    (trt.bool, trt.int32),
    (trt.bool, trt.int64),
}


def _check_exact(network: Any) -> None:
    """Raise CompileError if the network cuts int64 to int32 for anything but an index. Indices into a tensor fit 32 bits."""
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    sizes = {layer.get_output(0).name for layer in layers if layer.type == trt.LayerType.SHAPE}
    cut = {layer.get_output(0).name: layer.name for layer in layers if _cuts(layer, sizes)}
    for layer in layers:
        for position in range(layer.num_inputs):
            tensor = layer.get_input(position)
            is_index = layer.type == trt.LayerType.GATHER and position == 1
            if tensor is not None and tensor.name in cut and not is_index:
                raise CompileError(f"the layer {cut[tensor.name]!r} cuts int64 to int32")


def _cuts(layer: Any, sizes: set[str]) -> bool:
    """True if a layer casts int64 to int32. Sizes are excepted, as they fit 32 bits; `sizes`: names of tensors that hold some."""
    if layer.type not in _CASTS:
        return False
    before, after = layer.get_input(0), layer.get_output(0)
    is_size = before.is_shape_tensor or after.is_shape_tensor or before.name in sizes
    return bool((before.dtype, after.dtype) == (trt.int64, trt.int32)) and not is_size


_CASTS = (trt.LayerType.CAST, trt.LayerType.IDENTITY)


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Progress monitor of a build: reports the progress of the outermost phase, and cancels the build."""

    def __init__(self, going_on: GoingOn) -> None:
        trt.IProgressMonitor.__init__(self)
        self._going_on = going_on
        self._steps: dict[str, int] = {}
        self.cancelled = False

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        if not parent_phase:
            self._steps[phase_name] = max(1, num_steps)

    def phase_finish(self, phase_name: str) -> None:
        self._steps.pop(phase_name, None)

    def step_complete(self, phase_name: str, step: int) -> bool:
        done = step / self._steps[phase_name] if phase_name in self._steps else 0.0
        try:
            self.cancelled = self.cancelled or not self._going_on(done)
        except BaseException:  # Ctrl-C too: no exception may pass through TensorRT's C++
            self.cancelled = True
        return not self.cancelled


def versions() -> str:
    """Versions of the loaded TensorRT and torch_tensorrt."""
    return f"{trt.__name__} {trt.__version__}, torch_tensorrt {release}"
