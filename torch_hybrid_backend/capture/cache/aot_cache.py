"""AOTAutograd's result kept between processes, where nothing but its graph is needed: tracing a model takes it a second.

Kept are inference graphs whose run-time wrapper does nothing but take inputs apart that are made of other tensors: no input is written to, no
output is a view of an input or made of others, no size is symbolic. All else is traced anew in each process. The key covers whatever shapes the
result: Dynamo's graph with the lines it comes from, the inputs' metadata and which of them share memory, torch's settings, the sources of this
package that make it (`SOURCES`), and the versions. What cannot be keyed (another library's operator, a collective, a decomposition or kernel
that a program registers for ATen, active modes) has no key. `docs/adr/0010-aot-cache.md` gives the reasons;
`docs/adr/0063-aot-cache-for-tensor-subclasses.md` those for tensors that are made of others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.capture.cache.composed_tensors import UnkeyedError, class_key, parts_of
from torch_hybrid_backend.errors import CacheError, failures
from torch_hybrid_backend.graph.graph_json import NAMESPACES, NotTextError, graph_from_text, graph_to_text
from torch_hybrid_backend.graph.source import module_stack
from torch_hybrid_backend.machine import float32_precision
from torch_hybrid_backend.storage.sources import sources_version
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    TracingContext,
    compiled_autograd,
    count_torch_dispatch_modes,
    count_torch_function_modes,
    functions_of_torch,
    functorch_config,
    global_decomposition_table,
    is_traceable_wrapper_subclass,
    kernel_switches,
    peek_interpreter_stack,
    registered_kernels,
    vmap_kernels,
)

_log = logging.getLogger(__name__)
_KIND = "captures"
SOURCES = ("capture", "core", "sizes", "graph", "torch_private.py")  # what the graph that is kept is made by
# Elsewhere more decides what is traced than the key covers: which attention operator CUDA gets, say, depends on the GPU.
_KEYED_DEVICES = {"cpu", "meta"}
# Dispatch keys of the kernels that torch itself registers for ATen from Python.
_KEYS_OF_TORCH = {"Meta", "MPS", "CUDA"}
# And single kernels of its, from 2.14 on.
_KERNELS_OF_TORCH = {"aten/to_dense/FuncTorchDynamicLayerFrontMode", "aten/to_dense/PythonTLSSnapshot"}
# In traces through graphs that are modules, as exported ones are: how many graphs the process has made before.
_NUMBER_OF_GRAPH = re.compile(r"(?<=<eval_with_key>)\.\d+")
_COMPILED = (type(torch.Tensor.add), type(torch.add), type(torch.Tensor.__add__))


class AotCache:
    """The graphs that a store has kept, under keys of `capture_key`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, key: str, fake_mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, frozenset[str]] | None:
        """The ATen graph and the names of its static inputs, or None where there is none that can be read."""
        text = self._store.get(_KIND, key)
        if text is None:
            return None
        try:
            head, _, graph = text.partition(b"\n")
            return graph_from_text(graph, fake_mode), frozenset(json.loads(head))
        except failures(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            _log.info("a kept graph cannot be read, it is traced anew: %s", error)
            self._store.remove(_KIND, key)
            return None

    def add(self, key: str, graph_module: torch.fx.GraphModule, static: frozenset[str]) -> bool:
        """Keep the graph where its run-time wrapper does nothing and it has a textual form; called while AOTAutograd compiles it, before
        anything changed it. Returns whether it may be kept: then it may be called without that wrapper, also where the store cannot be
        written."""
        try:
            _check_trivial(graph_module)
            text = json.dumps(sorted(static)).encode() + b"\n" + graph_to_text(graph_module)
        except (UnkeyedError, NotTextError) as error:
            _log.debug("AOTAutograd's graph is not kept: %s", error)
            return False
        try:
            self._store.put(_KIND, key, text, suffix=".json")
        except CacheError as error:
            _log.info("AOTAutograd's graph is not kept: %s", error)
        return True


def capture_key(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], keep_ops: Iterable[OpOverload]) -> str | None:
    """SHA-256 of all that decides what AOTAutograd makes of Dynamo's graph; None where that is not known for sure."""
    try:
        parts = [*_versions(), *sorted(map(str, keep_ops)), *_settings(), gm.code]
        parts += [part for node in gm.graph.nodes for part in _node_parts(node)]
        parts += _input_parts(gm, example_inputs)
    except (UnkeyedError, AttributeError) as error:
        # What another version of torch calls otherwise is not known for sure either.
        _log.debug("no key for AOTAutograd's graph: %s", error)
        return None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _versions() -> tuple[str, ...]:
    return torch.__version__, str(torch.version.git_version), sources_version(*SOURCES)


def _settings() -> Iterator[str]:
    """Parts of torch's state that decide how ATen operators are traced."""
    context = TracingContext.try_get()
    if context is None or context.fakify_first_call:
        raise UnkeyedError("not called by Dynamo alone")
    if count_torch_dispatch_modes() or count_torch_function_modes():
        raise UnkeyedError("modes are active")
    if peek_interpreter_stack() is not None:
        raise UnkeyedError("inside a function transform")
    if functorch_config.functionalize_rng_ops or compiled_autograd.in_compiled_autograd_region:
        raise UnkeyedError("random numbers are functionalised, or autograd is compiled")
    _check_registrations()
    yield functorch_config.get_hash().hex()
    yield repr(
        (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            float32_precision("cpu"),
            float32_precision("cuda"),
            torch.backends.mha.get_fastpath_enabled(),
            kernel_switches(),
            torch.is_autocast_cache_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )
    )


def _check_registrations() -> None:
    """A program may replace what ATen's operators do, or are made of; nothing says how."""
    known = _KERNELS_OF_TORCH | vmap_kernels()
    kernels = [name.split("/") for name in registered_kernels() - known if name.startswith("aten/")]
    if any(key not in _KEYS_OF_TORCH for *_, key in kernels):
        raise UnkeyedError("the program has kernels of its own for ATen")
    for table in global_decomposition_table.values():
        for formula in table.values():
            if str(getattr(formula, "__module__", "torch")).partition(".")[0] != "torch":
                raise UnkeyedError(f"the program has a decomposition of its own: {formula}")


def _node_parts(node: Node) -> Iterator[str]:
    target = node.target
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        _check_device(value)
    match node.op:
        case "placeholder":
            marks = node.meta.get("tensor_dict", {})
            yield repr(sorted((name, repr(mark)) for name, mark in marks.items() if name.startswith("_dynamo")))
        case "call_function":
            known = target in (getattr, operator.getitem) or _is_torchs(target)
            if not known:
                raise UnkeyedError(f"the function {target}")
            is_operator = isinstance(target, OpOverload | OpOverloadPacket)
            yield str(target) if is_operator else _qualified(target)
        case "call_method":
            first = node.args[0]
            if not isinstance(first, Node) or not isinstance(first.meta.get("example_value"), FakeTensor):
                raise UnkeyedError(f"the method {target} of no tensor")
            if not _is_unchanged(getattr(torch.Tensor, str(target), None)):
                raise UnkeyedError(f"the method {target} is not torch's own")
        case "output":
            if not all(isinstance(each.meta.get("example_value"), FakeTensor) for each in node.all_input_nodes):
                raise UnkeyedError("an output that is made of other tensors")
        case _:
            raise UnkeyedError(f"{node.op} {target}")
    for argument in (*node.args, *node.kwargs.values()):
        _check_argument(argument)
    yield _NUMBER_OF_GRAPH.sub("", str(node.meta.get("stack_trace")))
    yield repr(module_stack(node))


def _check_device(tensor: torch.Tensor) -> None:
    if tensor.device.type not in _KEYED_DEVICES:
        raise UnkeyedError(f"a tensor on {tensor.device}")


def _check_argument(value: object) -> None:
    """All that Dynamo's code prints in full; whatever else there may be prints as its type or its address."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_argument(item)
    elif isinstance(value, slice):
        _check_argument((value.start, value.stop, value.step))
    elif not (
        value is None
        or value is Ellipsis
        or isinstance(
            value,
            Node | bool | int | float | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format,
        )
    ):
        raise UnkeyedError(f"an argument of type {type(value).__name__}")


def _is_torchs(function: object) -> bool:
    """True if a function is the one of this name in Python's `operator` or in one of torch's own modules, or an operator of torch's own."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        return str(function).partition(".")[0] in NAMESPACES
    name = getattr(function, "__name__", "")
    functions = (torch, torch.functional, torch.nn.functional, torch.amp.autocast_mode)
    places = (operator, *functions, *functions_of_torch())
    return any(getattr(place, name, None) is function for place in places) and _is_unchanged(function)


def _is_unchanged(function: object) -> bool:
    """True if a function is compiled code, or Python from torch's own files."""
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function) in _COMPILED
    return bool(code.co_filename.startswith(str(Path(torch.__file__).parent)))


def _qualified(function: object) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _input_parts(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[str]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example_inputs) or any(True for _ in gm.children()):
        raise UnkeyedError("not a flat graph")
    first: dict[int, int] = {}
    for node, value in zip(placeholders, example_inputs, strict=True):
        yield from _tensor_parts(value, node.meta.get("example_value"), first)


def _tensor_parts(value: Any, fake: Any, first: dict[int, int]) -> Iterator[str]:
    """`first`: each storage -> which of all tensors had it first, to be filled."""
    is_composed = is_traceable_wrapper_subclass(fake)
    legal = (type(fake),) if is_composed else (torch.Tensor, torch.nn.Parameter, FakeTensor)
    if type(value) not in legal or not isinstance(fake, torch.Tensor if is_composed else FakeTensor):
        raise UnkeyedError(f"an input of type {type(value).__name__}")
    _check_device(fake)
    if fake.layout is not torch.strided or fake.is_quantized:
        raise UnkeyedError("an input that is not strided")
    numbers = [fake.storage_offset(), *fake.shape, *fake.stride()]
    if not all(type(number) is int for number in numbers):
        raise UnkeyedError("an input of symbolic size")
    yield repr(
        (
            *(fake.dtype, str(fake.device), fake.dim(), numbers),
            *(fake.requires_grad, fake.is_leaf, fake.is_conj(), fake.is_neg(), fake.is_inference()),
            *(isinstance(value, torch.nn.Parameter), fake.untyped_storage().nbytes()),
            first.setdefault(value.untyped_storage()._cdata, len(first)),
        )
    )
    if is_composed:
        yield class_key(fake)
        for name, part in parts_of(fake):
            yield from _tensor_parts(getattr(value, name), part, first)


def _check_trivial(graph_module: torch.fx.GraphModule) -> None:
    """Raises where AOTAutograd's wrapper has anything to do beside taking inputs apart and calling the graph without autograd."""
    from torch_hybrid_backend.torch_private import MutationType, OutputType, PlainTensorMeta

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    try:
        if context is None or metadata is None or context.guards_context.aotautograd_guards:
            raise UnkeyedError("AOTAutograd has set guards")
        if any(info.mutation_type is not MutationType.NOT_MUTATED for info in metadata.input_info):
            raise UnkeyedError("an input is written to")
        legal = (OutputType.non_alias, OutputType.unsafe_view_alias)
        if any(info.output_type not in legal for info in metadata.output_info):
            raise UnkeyedError("an output is a view of an input, or an input")
        if any(info.requires_grad or info.dynamic_dims for info in metadata.output_info):
            raise UnkeyedError("an output takes part in autograd, or its size is symbolic")
        # Where inputs are made of others, the metadata is that of the graph of their parts.
        if any(type(meta) is not PlainTensorMeta for meta in metadata.subclass_inp_meta):
            raise UnkeyedError("an input is made of other tensors")
        if metadata.tokens or metadata.num_intermediate_bases or metadata.is_rng_op_functionalized:
            raise UnkeyedError("the wrapper hands over more than the user's values")
        if metadata.grad_enabled_mutation is not None:
            raise UnkeyedError("the graph switches autograd")
    except AttributeError as error:  # another version of torch
        raise UnkeyedError(f"AOTAutograd's metadata: {error}") from error
    (output,) = graph_module.graph.find_nodes(op="output")
    if len(output.args[0]) != len(metadata.output_info):
        raise UnkeyedError("the graph has other outputs than the user's")
    if len(graph_module.graph.find_nodes(op="placeholder")) != len(metadata.input_info):
        raise UnkeyedError("the graph has other inputs than the user's")


sources_version(*SOURCES)  # now: as they are imported
