"""Dynamo's graph -> functional ATen graphs, through AOTAutograd.

Enters: what Dynamo hands a backend, `(graph module, example inputs)`: modules inlined, mutations and aliases as the
user wrote them, sizes possibly symbolic. Leaves: for each of inference, or forward and backward, one call of
`compile_graph` with a `CapturedGraph`: functional (no mutation, no aliasing input), decomposed by
`decompositions.decomposition_table`.

AOTAutograd's run-time wrapper around the compiled graphs restores what functionalisation took away: it copies mutated
inputs back (`keep_inference_input_mutations` is off, so that no `copy_` is in the graph; `input_updates` writes small parts in place instead),
rebuilds outputs that are views of inputs from the input itself, and re-applies autograd. Hence:

- Outputs must have the strides of their `meta["val"]`; the wrapper's `as_strided` and the backward graph's
  placeholders rely on them, saved activations included.
- Outputs share storage when run exactly where they do in `meta["val"]`, pieces of inputs under training included, which the wrapper leaves
  alone: `output_aliases` sees to both, and graphs that leave here have no two outputs that share storage.
- Tangents (`tangents_k` of the backward graph) are coerced at run time to the traced memory format, not to the traced
  strides: the stride of a dimension of size 1 may differ from `meta["val"]`, and a tangent may be an expanded tensor
  made contiguous. Guard on strides only where the size is above 1. They carry `meta["loose_strides"] = True`. They may be lazily
  conjugated or negated, whatever was traced, and a hook may hand back resolved what was saved conjugated: they get the bits of the trace here.
- Tensors that Dynamo lifted into the graph (`torch.tensor([1., 2.])` in the user's code) stay `get_attr` nodes
  (`_tensor_constant0`); they are given `meta["val"]` here. They never change.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.capture.cache.aot_cache import AotCache, capture_key
from torch_hybrid_backend.capture.cache.composed_tensors import taking_apart
from torch_hybrid_backend.capture.decompositions import asked, decomposition_table, whole_upsampling
from torch_hybrid_backend.capture.fixes.attention_states import without_attention_states
from torch_hybrid_backend.capture.fixes.dequantized_groups import plain_sizes_of_groups
from torch_hybrid_backend.capture.fixes.input_updates import InPlace, WriteRows, write_in_place
from torch_hybrid_backend.capture.fixes.norm_statistics import correct_statistics
from torch_hybrid_backend.capture.fixes.output_aliases import Restore, separate_aliases
from torch_hybrid_backend.capture.fixes.overlap import watch_overlaps
from torch_hybrid_backend.capture.fixes.strided_reads import read_owners
from torch_hybrid_backend.capture.fixes.strides import strides_of_eager
from torch_hybrid_backend.capture.input_names import name_inputs
from torch_hybrid_backend.core.captured import CapturedGraph, GraphKind
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TracingContext,
    detect_fake_mode,
    enable_python_dispatcher,
    functorch_config,
    is_any_autocast_enabled,
    is_traceable_wrapper_subclass,
    without_autocast,
)

log = logging.getLogger(__name__)

CompiledGraph = Callable[[list[Any]], "list[Any] | tuple[Any, ...]"]
CompileGraph = Callable[[CapturedGraph], CompiledGraph]


def capture(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: CompileGraph,
    keep_ops: Iterable[OpOverload],
    aot_cache: AotCache | None = None,
    applies: Callable[[str], bool] | None = None,
    write_rows: WriteRows | None = None,
) -> Callable[..., Any]:
    """Compile Dynamo's graph through `compile_graph`; returns the callable that Dynamo installs.

    `compile_graph` is called once for an inference graph; for training once for the forward graph now and once for the
    backward graph, now or in the first backward call. The callable it returns takes one list of inputs, which it may
    clear to free them early (torch's "boxed" convention), and returns the outputs in order.

    `keep_ops`: ATen operators that are never decomposed. `aot_cache`: where AOTAutograd's graphs are looked up and kept. `applies`:
    asked before each decomposition, the partitioner, and each fix, whose name it gets, whether that is to be applied; None: all are.
    `write_rows`: as for `InPlace.restorer`.

    Whatever `compile_graph` raises reaches Dynamo unchanged.
    """
    operators = frozenset(keep_ops)
    applied: Callable[[str], bool] = applies or (lambda _: True)
    key = capture_key(gm, example_inputs, operators) if aot_cache is not None else None
    if aot_cache is not None and key is not None:
        with_cached = _with_cached(aot_cache, key, gm, example_inputs, compile_graph)
        if with_cached is not None:
            return with_cached

    forward_static: set[str] = set()  # filled by the forward graph's compilation, read by the backward graph's
    without_wrapper: list[CompiledGraph] = []  # the graph, if AOTAutograd's wrapper would do nothing but call it
    backward: list[CompiledGraph] = []
    compiling_backward = ForkLock()

    def compile_as(kind: GraphKind, graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> CompiledGraph:
        placeholders = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
        if kind == "backward":
            # The partitioner gives a parameter saved for backward the name it has in the forward graph.
            static = forward_static.intersection(placeholders)
            for node in graph_module.graph.find_nodes(op="placeholder"):
                if node.name.startswith("tangents_"):
                    node.meta["loose_strides"] = True
        else:
            static = _static_inputs(placeholders)
            forward_static.update(static)
        is_kept = (
            aot_cache is not None
            and key is not None
            and kind == "inference"
            and aot_cache.add(key, graph_module, frozenset(static))
        )
        if kind != "backward":
            name_inputs(graph_module, gm)
        returned = range(0) if kind == "backward" else _returned(kind)
        mutated = _mutated_inputs() if kind == "inference" else ()
        boxed = _boxed(
            graph_module,
            kind,
            frozenset(static),
            _writes_inputs(),
            compile_graph,
            returned,
            mutated,
            applied,
            write_rows,
        )
        if is_kept:
            without_wrapper.append(boxed)
        return boxed

    def compile_backward(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        # AOTAutograd compiles it in the first backward call, outside Dynamo's lock: threads whose forward graph is one (instances of one class
        # share it) may all come, each with a copy of one graph, whose one fake mode two threads must not use at once.
        with compiling_backward:
            if not backward:
                backward.append(compile_as("backward", graph_module, inputs))
            return backward[0]

    captured = trace(
        gm,
        example_inputs,
        operators,
        applies,
        fw_compiler=partial(compile_as, "forward"),
        bw_compiler=compile_backward,
        inference_compiler=partial(compile_as, "inference"),
    )
    if without_wrapper:
        return _called_directly(without_wrapper[0], example_inputs)  # the wrapper took 9 of 42 us with 60 parameters
    # AOTAutograd copies the mark of the compiled graph onto its wrapper, which takes its inputs one by one. PyTorch's minifier
    # believes the mark, calls the wrapper with a list, and takes the error for one that does not matter.
    captured._boxed_call = False  # type: ignore[attr-defined]
    return watch_overlaps(captured, gm, example_inputs) if applied("the fix watch_overlaps") else captured


def trace(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    operators: frozenset[OpOverload],
    applies: Callable[[str], bool] | None = None,
    **compilers: Callable[..., CompiledGraph],
) -> Callable[..., Any]:
    """Have AOTAutograd make graphs of `gm`, with the fixes that act while it traces, and give them to its `compilers`; return its callable.

    operators: never decomposed. applies: as for `capture`.
    """
    from functorch.compile import default_partition, min_cut_rematerialization_partition

    from torch_hybrid_backend.torch_private import aot_autograd

    applied: Callable[[str], bool] = applies or (lambda _: True)
    table = decomposition_table(operators)

    def partition(*args: Any, **kwargs: Any) -> Any:
        least = partial(min_cut_rematerialization_partition, compiler="inductor")
        made = least if applied("the partitioner min_cut_rematerialization_partition") else default_partition
        if applied("the fix without_attention_states"):
            return without_attention_states(*args, partition=made, **kwargs)
        return made(*args, **kwargs)

    backend = aot_autograd(
        **compilers,
        decompositions=table if applies is None else asked(table, applies),
        partition_fn=partition,
        keep_inference_input_mutations=False,
    )
    # Donated buffers would make `backward(retain_graph=True)` an error, which eager allows.
    with contextlib.ExitStack() as stack:
        stack.enter_context(functorch_config.patch(donated_buffer=False))
        for fix in (whole_upsampling, plain_sizes_of_groups, strides_of_eager):
            if applied(f"the fix {fix.__name__}"):
                stack.enter_context(fix())
        traced: Callable[..., Any] = backend(gm, list(example_inputs))
    return traced


def _boxed(
    graph_module: torch.fx.GraphModule,
    kind: GraphKind,
    static: frozenset[str],
    writes_inputs: bool,
    compile_graph: CompileGraph,
    returned: range = range(0),
    mutated: Sequence[int] = (),
    applied: Callable[[str], bool] = lambda _: True,
    write_rows: WriteRows | None = None,
) -> CompiledGraph:
    """AOTAutograd's graph, corrected and compiled, as AOTAutograd calls it; `returned` as for `separate_aliases`, `mutated` as for
    `write_in_place`, `applied` says of each fix whether it is applied, `write_rows` as for `InPlace.restorer`."""
    in_place, restore = correct(graph_module, mutated, returned, applied)
    write = None if in_place is None else in_place.restorer(write_rows)
    compiled = compile_graph(CapturedGraph(graph_module, kind, static, writes_inputs))

    ordered = any(node.target is torch.ops.higher_order.with_effects for node in graph_module.graph.nodes)
    bits = _bits_of_inputs(graph_module) if kind == "backward" else {}  # Dynamo guards those of other inputs

    subclasses: list[int] | None = None  # found in the first call; Dynamo guards types

    def boxed(inputs: list[Any]) -> list[Any] | tuple[Any, ...]:
        nonlocal subclasses
        if subclasses is None:
            subclasses = [k for k, value in enumerate(inputs) if _is_plain_subclass(value)]
        for k in subclasses:
            # The graph was traced without them: what they override has been applied, and must not be once more.
            inputs[k] = inputs[k].as_subclass(torch.Tensor)
        if ordered:
            # AOTAutograd traces effect tokens as empty tensors and passes None for them.
            inputs = [torch.empty(0, device="cpu") if value is None else value for value in inputs]
        for k, traced in bits.items():
            if not traced.are_of(inputs[k]):
                inputs[k] = traced.copy_of(inputs[k])
        if restore is None and in_place is None:
            return compiled(inputs)
        # The list may be cleared.
        viewed, changed = ([inputs[k] for k in step.inputs] if step else () for step in (restore, in_place))
        outputs = compiled(inputs)
        outputs = outputs if restore is None else restore(outputs, viewed)
        return outputs if write is None else write(outputs, changed)

    boxed._boxed_call = True  # type: ignore[attr-defined]  # tells AOTAutograd not to unpack the list
    return boxed


def correct(
    graph_module: torch.fx.GraphModule,
    mutated: Sequence[int],
    returned: range,
    applied: Callable[[str], bool] = lambda _: True,
    may_write: Callable[[torch.fx.Node], bool] = lambda _: True,
) -> tuple[InPlace | None, Restore | None]:
    """Apply the fixes of AOTAutograd's graphs, in place; return what makes the original outputs: `Restore` first, then `InPlace`.

    mutated, may_write: as for `write_in_place`; returned: as for `separate_aliases`; applied: says of each fix whether it is applied.
    """
    complete_metadata(graph_module)
    for fix in (correct_statistics, read_owners):
        if applied(f"the fix {fix.__name__}"):
            fix(graph_module)
    in_place = write_in_place(graph_module, mutated, may_write) if applied("the fix write_in_place") else None
    restore = separate_aliases(graph_module, returned) if applied("the fix separate_aliases") else None
    return in_place, restore


def _bits_of_inputs(graph_module: torch.fx.GraphModule) -> dict[int, LazyBits]:
    """The traced bits of those inputs of a backward graph, by position, that may come with others: tangents, and what was saved with a bit."""
    inputs = ((k, node, node.meta.get("val")) for k, node in enumerate(graph_module.graph.find_nodes(op="placeholder")))
    traced = ((k, node, LazyBits.of(value)) for k, node, value in inputs if isinstance(value, torch.Tensor))
    return {k: bits for k, node, bits in traced if bits or node.meta.get("loose_strides")}


def _with_cached(
    aot_cache: AotCache,
    key: str,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: CompileGraph,
) -> Callable[..., Any] | None:
    """Dynamo's graph compiled from the ATen graph that an earlier trace left, or None where there is none."""
    fake_mode = detect_fake_mode([node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")])
    found = aot_cache.get(key, fake_mode) if fake_mode is not None else None
    if found is None or fake_mode is None:
        return None
    graph_module, static = found
    name_inputs(graph_module, gm)
    with fake_mode, enable_python_dispatcher(), without_autocast():  # as AOTAutograd calls compilers
        boxed = _boxed(graph_module, "inference", static, False, compile_graph)
    return _called_directly(boxed, example_inputs)


def _called_directly(boxed: CompiledGraph, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """An inference graph as Dynamo calls it, where that needs no wrapper but to take tensors apart."""
    flat = taking_apart(example_inputs)

    def run(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return boxed(flat(inputs))
        with torch.no_grad():  # inputs need no gradients, or there would be no inference graph
            return boxed(flat(inputs))

    def run_as_traced(*inputs: Any) -> Any:
        with without_autocast():  # its casts are in the graph: operators must not make others
            return run(*inputs)

    # Dynamo guards whether autocast is on.
    return run_as_traced if is_any_autocast_enabled() else run


def _is_plain_subclass(value: object) -> bool:
    """A tensor of a class that overrides functions only: one made of other tensors was taken apart by AOTAutograd."""
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    return not isinstance(value, torch.nn.Parameter | FakeTensor) and not is_traceable_wrapper_subclass(value)


def _returned(kind: GraphKind) -> range:
    """Outputs that AOTAutograd returns to the caller: a forward graph's first (the others are saved for backward), an inference graph's behind
    the new values of inputs."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return range(0)
    if kind == "forward":
        return range(metadata.num_forward)
    first = len(metadata.tokens) + metadata.num_mutated_inp_runtime_indices
    return range(first, first + metadata.num_outputs)


def _static_inputs(placeholders: Sequence[str]) -> set[str]:
    """Names of the placeholders that AOTAutograd knows as parameters or buffers, less those that the graph mutates.

    Dynamo marks parameters, buffers and `mark_static_address` tensors; AOTAutograd carries the marks as positions. A
    buffer that is mutated (BatchNorm's statistics in training, a KV cache) keeps its address but changes in every
    call, so treating it as a constant would mean repacking it every time.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return set()
    mutated = {index for index, info in enumerate(metadata.input_info) if info.mutates_data}
    return {
        placeholders[index]
        for index in metadata.static_input_indices
        if index < len(placeholders) and index not in mutated
    }


def _mutated_inputs() -> Sequence[int]:
    """Positions of the inputs whose new contents are an inference graph's first outputs, in that order; none where anything else is changed."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or metadata.tokens:
        return ()
    mutated: list[int] = metadata.mutated_inp_runtime_indices
    infos = [metadata.input_info[position] for position in mutated]
    is_plain = all(info.mutates_data and not info.mutates_metadata for info in infos)
    return mutated if is_plain else ()


def _writes_inputs() -> bool:
    """True if AOTAutograd's wrapper, around the graph being compiled, writes to inputs; True where it does not tell."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata is None or any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)


def complete_metadata(graph_module: torch.fx.GraphModule) -> None:
    """Give `meta["val"]` to get_attr tensors that have none, so that consumers see one rule for all values.

    Sub-graphs of control flow are graphs like the outer one, and are completed too.
    """
    values = [node.meta["val"] for node in graph_module.graph.nodes if "val" in node.meta]
    fake_mode = detect_fake_mode(values) or FakeTensorMode()
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if "val" in node.meta:
            continue
        owner: Any = graph_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):
            node.meta["val"] = fake_mode.from_tensor(owner.detach(), static_shapes=True)
        elif isinstance(owner, torch.fx.GraphModule):
            complete_metadata(owner)
