"""The one module that imports torch_tensorrt, with its `converters`: lowering, registry, networks, engines.

What differs between releases of torch_tensorrt is in `_SETTINGS`, as data; the rest is what 2.11, 2.13 and 2.14 have in common, read in their
sources (github.com/pytorch/TensorRT). Their partitioner, run-time and engine cache are not used: the cache unpickles, and its key leaves out
the arguments of operators.

Importing this module takes seconds, and needs a GPU: torch_tensorrt reads the capability of the current one. It is imported only when an
operator is checked, or an engine is built, for the first time: `verdicts` are kept, and `loaded` needs TensorRT alone.
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
from torch_hybrid_backend.engines.tensorrt.decompositions import DECOMPOSITIONS, name_resizes
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.log import their_log
from torch_hybrid_backend.engines.tensorrt.overlap import Overlapping
from torch_hybrid_backend.engines.tensorrt.size_arithmetic import spell_sizes
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
    if not handlers:  # then it may have one of logging.basicConfig's; others that came meanwhile are the user's
        root.handlers[:] = [each for each in root.handlers if type(each) is not logging.StreamHandler]


# Their code logs through the root logger, which gives that a handler, and warns. Neither is the user's.
_silent = Overlapping(_be_silent)


# --- settings ---------------------------------------------------------------------------------------------------------------------------

# What is set where a release has a setting of this name. Left at their defaults, some change results: `attn_bias_is_causal` takes every
# bias of attention for a causal mask. Releases before 2.12 ask for strong typing; those after always do it.
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
    """A graph in the operators that converters exist for, with metadata. `inputs`: a value for each placeholder; those that are tensors of
    `fakes` are the inputs of the result, in this order, and its sizes are read from them. Raises what tracing raises, CompileError where that
    decided something by an example of a size."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        left = iter(given)
        return torch.fx.Interpreter(graph_module).run(
            *(next(left) if isinstance(value, torch.Tensor) else value for value in inputs)
        )

    with _silent:
        traced = fakes.traced(run, tensors, _decompositions())
        name_resizes(traced)
        spell_sizes(traced)
        with _quantizers_kept:
            result: torch.fx.GraphModule = post_lowering(traced, _settings(tf32=False))
    assumed = fakes.assumed()
    if assumed:
        raise CompileError(f"TensorRT's lowering holds only for sizes with {', '.join(assumed)}")
    return result


@contextlib.contextmanager
def _keep_quantizers() -> Iterator[None]:
    """Keep dequantized constants as they are: folded, they would take four times the memory, and products of integers would be none."""
    theirs = constant_folding._TorchTensorRTConstantFolder
    is_impure = theirs.is_impure
    theirs.is_impure = lambda self, node: operator_name(node) is not None or is_impure(self, node)
    yield
    theirs.is_impure = is_impure


_quantizers_kept = Overlapping(_keep_quantizers)


# --- capability -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Converters:
    """The registry's answer for one node. `known`: how many converters its operator has; `refusing`: the names of the validators that
    refuse this node; `static_only`: whether what is left takes no sizes known only at run time; `allocates`: whether the one that is chosen
    tells the size of its result only when it has run."""

    known: int
    refusing: tuple[str, ...] = ()
    static_only: bool = False
    allocates: bool = False

    @property
    def found(self) -> bool:
        return self.known > len(self.refusing) and not self.static_only


def converters_of(node: torch.fx.Node) -> Converters:
    """The same walk as the registry's own, which tells no reason, and looks at settings that are one for the process, a user's maybe. (So
    does the validator of items, which are what their operator is.) `node` is of a lowered graph."""
    if converter_of(node) is not None:
        return Converters(1)
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        is_found = source.op == "get_attr" or converters_of(source).found
        return Converters(1, () if is_found else ("getitem_validator",))
    settings = _settings(tf32=False)
    candidates = [each for each in DYNAMO_ATEN_CONVERTERS.get(node.target, ()) if _is_theirs(each)]
    willing = [each for each in candidates if _accepts(each.capability_validator, node, settings)]
    refusing = tuple(_validator(each.capability_validator) for each in candidates if each not in willing)
    dynamic = [each for each in willing if each.supports_dynamic_shapes] if node_has_dynamic_shapes(node) else willing
    return Converters(
        len(candidates),
        refusing,
        bool(willing and not dynamic),
        any(each.requires_output_allocator for each in dynamic[:1]),
    )


def _is_theirs(converter: ConverterSupport) -> bool:
    """True if it is torch_tensorrt's. The process that builds has none of those that a user registers, nor may a later one that finds the
    verdict."""
    return str(converter.converter_implementation.__module__).partition(".")[0] == "torch_tensorrt"


def _accepts(validator: Callable[..., bool], node: torch.fx.Node, settings: CompilationSettings) -> bool:
    try:
        return bool(validator(node, settings))
    except failures(Exception) as error:  # some take it for granted that arguments are given by position
        _log.debug("the validator %s failed for %s: %s", _validator(validator), node, error)
        return False


def _validator(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", function))


# --- building ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """An input of an engine: a tensor of `shape` (-1: known only at run time), whose dimensions lie in memory in this `order`, outermost
    first. `least`, `typical`, `most`: the range of shapes."""

    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    shape: tuple[int, ...]
    least: tuple[int, ...]
    typical: tuple[int, ...]
    most: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NetworkOutput:
    """An output of an engine, likewise."""

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
    """A serialised engine of a lowered graph, and its layers as TensorRT lists them, fused as they are: "gemm: name (Half, Half -> Half)".

    `going_on` is told how far the build is, from 0 to 1, and says whether to go on. Raises CompileError where it said no, where a converter
    fails, where the network would not be exact, and where TensorRT fails.
    """
    with _silent, their_log.heard(fully=True) as log:
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
    """Runs a lowered graph through converters. Inputs and outputs are ours: their order in memory, ranges, names and types."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[NetworkInput],
        outputs: Sequence[NetworkOutput],
        settings: CompilationSettings,
        going_on: GoingOn,
    ) -> None:
        ranged = [each for each in inputs if each.least != each.most]
        # Its own constructor wants to know only whether there is a range.
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
        if aliased:  # from 2.14: caches of keys and values are updated where they lie
            raise CompileError("the engine would write into its inputs")
        seen: set[int] = {id(self.ctx.net.get_input(i)) for i in range(self.ctx.net.num_inputs)}
        names = {self.ctx.net.get_input(i).name for i in range(self.ctx.net.num_inputs)}
        for result, wanted in zip(args[0], self._outputs, strict=True):
            is_folded = isinstance(result, torch.Tensor)
            value = get_trt_tensor(self.ctx, result, f"{wanted.name}_constant") if is_folded else result
            if not isinstance(value, trt.ITensor):
                raise CompileError(f"the output {wanted.name} is no tensor of the network")
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
        """Converters make numbers of no dimensions tensors of one element: that is undone."""
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


# Conversions that lose nothing: indices that converters compute in 32 bits, truth values in either.
_WIDENING = {
    (trt.int32, trt.int64),
    (trt.bool, trt.int32),
    (trt.bool, trt.int64),
}


def _check_exact(network: Any) -> None:
    """Raises CompileError where whole numbers are cut to 32 bits for anything but an index: an index that fits a tensor fits those."""
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    sizes = {layer.get_output(0).name for layer in layers if layer.type == trt.LayerType.SHAPE}
    cut = {layer.get_output(0).name: layer.name for layer in layers if _cuts(layer, sizes)}
    for layer in layers:
        for position in range(layer.num_inputs):
            tensor = layer.get_input(position)
            is_index = layer.type == trt.LayerType.GATHER and position == 1
            if tensor is not None and tensor.name in cut and not is_index:
                raise CompileError(f"the layer {cut[tensor.name]!r} cuts whole numbers to 32 bits")


def _cuts(layer: Any, sizes: set[str]) -> bool:
    """`sizes`: the names of tensors that hold a tensor's sizes, which fit 32 bits."""
    if layer.type not in _CASTS:
        return False
    before, after = layer.get_input(0), layer.get_output(0)
    is_size = before.is_shape_tensor or after.is_shape_tensor or before.name in sizes
    return bool((before.dtype, after.dtype) == (trt.int64, trt.int32)) and not is_size


_CASTS = (trt.LayerType.CAST, trt.LayerType.IDENTITY)


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Tells how far the outermost phase is, and cancels."""

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
        except BaseException:  # Ctrl-C too: nothing may be raised through TensorRT's C++
            self.cancelled = True
        return not self.cancelled


def versions() -> str:
    """TensorRT's version and torch_tensorrt's, as they are loaded."""
    return f"{trt.__name__} {trt.__version__}, torch_tensorrt {release}"
