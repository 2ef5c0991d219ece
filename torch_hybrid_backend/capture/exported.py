"""`torch.export`'s programs -> functional ATen graphs, through AOTAutograd; what its run-time wrapper would do in each call, as data.

Enters: an `ExportedProgram`. Leaves: an `ExportedGraph`. Its `captured` is the graph that `aot.capture` would make of the same operators, with
parameters, buffers and inputs as placeholders. In place of closures, `updates` and `results` say what becomes of its outputs.

Illegal (`NotExportableError`): outputs that are views by sizes known only at run time, an input whose shape is changed in
place, and collectives.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.capture.aot import correct, trace
from torch_hybrid_backend.capture.fixes.convolution_layouts import convolutions_of_all_sizes
from torch_hybrid_backend.capture.fixes.input_updates import Given, Write, written_rows
from torch_hybrid_backend.capture.fixes.output_aliases import AliasedResult, StridedView
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.graph.values import collectives
from torch_hybrid_backend.torch_private import FakeTensorMode, OpOverload, TracingContext, detect_fake_mode, tracing


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """The graph's output of that number."""

    number: int


@dataclass(frozen=True, slots=True)
class GraphInput:
    """The graph's input at that position."""

    position: int


@dataclass(frozen=True, slots=True)
class ViewOf:
    """A view of one of these."""

    origin: GraphOutput | GraphInput
    view: StridedView


@dataclass(frozen=True, slots=True)
class Copied:
    """An input gets the contents of an output."""

    position: int
    output: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Slices of an input along `dim` are replaced, at the positions that `index` has."""

    position: int
    dim: int
    index: GraphOutput | GraphInput
    source: GraphOutput | GraphInput


class SizesTraced:
    """Assumptions of a trace on sizes known only at run time: the guards that it adds to a `ShapeEnv`. None: all sizes are known."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._before = len(environment.guards) if environment is not None else 0

    @property
    def assumed(self) -> list[str]:
        """Guards that are more than a range of one symbol, as text."""
        guards = self._environment.guards[self._before :] if self._environment is not None else []
        return [
            str(guard.expr) for guard in guards if not (guard.expr.is_Relational and len(guard.expr.free_symbols) == 1)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class ExportedGraph:
    """A program's graph, and the way from its outputs to the results of a call.

    `tensors`: the first inputs of the graph, by name: parameters, buffers and constants. `arguments`: the further inputs, as positions among
    the flat arguments of a call, and `specs` their forms; the other arguments are no tensors, and fixed. `updates`: carried out in order,
    before `results` are read. A result of another type is returned as it is.
    """

    captured: CapturedGraph
    tensors: tuple[tuple[str, torch.Tensor], ...]
    arguments: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    sizes: SizesTraced
    updates: tuple[Copied | Rows, ...]
    results: tuple[GraphOutput | GraphInput | ViewOf | object, ...]


def capture_exported(exported: torch.export.ExportedProgram, keep_ops: frozenset[OpOverload]) -> ExportedGraph:
    """Capture a program. Raises NotExportableError for what no file can hold, and what AOTAutograd raises."""
    module, tensors, arguments = _with_placeholders_only(exported.module(check_guards=False))
    if (found := next(collectives(module), None)) is not None:
        raise NotExportableError(
            f"it calls {found.target}, which works with other processes, and a file is run by one: export a model without collectives, or "
            f"compile this one on each rank. Called at {source_line(found) or 'a line that torch.export does not tell'}"
        )
    placeholders = module.graph.find_nodes(op="placeholder")
    fake_mode = detect_fake_mode([node.meta.get("val") for node in placeholders]) or FakeTensorMode()
    made: list[ExportedGraph] = []

    def inference(graph_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        made.append(_exported_graph(graph_module, tensors, arguments, sizes))
        return lambda inputs: inputs  # never called

    sizes = SizesTraced(fake_mode.shape_env)
    examples = [fake_mode.from_tensor(tensor, static_shapes=True) for _, tensor in tensors]
    examples += [node.meta["val"] for node in placeholders[len(tensors) :]]
    with torch.no_grad(), convolutions_of_all_sizes(), tracing(TracingContext(fake_mode)):
        trace(module, examples, keep_ops, fw_compiler=inference, bw_compiler=inference, inference_compiler=inference)
    return made[0]


def _with_placeholders_only(
    module: Any,
) -> tuple[torch.fx.GraphModule, tuple[tuple[str, torch.Tensor], ...], tuple[int, ...]]:
    """The module of a program with a placeholder for each tensor that it holds, before those of its arguments; and both as `ExportedGraph` has
    them.

    A tensor of several names becomes one placeholder: AOTAutograd would take it for inputs that overlap.
    """
    graph: torch.fx.Graph = module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    for node in graph.find_nodes(op="call_module"):  # checks of inputs, which readers of files make themselves
        if not node.users:
            graph.erase_node(node)
    # Of dtypes and devices, which readers of files compare as well.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    arguments = graph.find_nodes(op="placeholder")
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    inputs: dict[int, Node] = {}
    first = next(iter(graph.nodes))
    held = {node: operator.attrgetter(str(node.target))(module) for node in graph.find_nodes(op="get_attr")}
    held = {
        node: value for node, value in held.items() if isinstance(value, torch.Tensor)
    }  # not graphs of control flow
    for node, tensor in held.items():
        if id(tensor) not in inputs:
            with graph.inserting_before(first):
                inputs[id(tensor)] = graph.placeholder(f"tensor_{len(tensors)}")
            inputs[id(tensor)].meta = dict(node.meta)
            tensors[id(tensor)] = (str(node.target), tensor.detach())
        node.replace_all_uses_with(inputs[id(tensor)])
    for node in held:
        graph.erase_node(node)
    kept = []
    for position, node in enumerate(arguments):
        if isinstance(node.meta.get("val"), torch.Tensor):
            kept.append(position)
        else:  # its value is part of the program
            if node.users:
                raise NotExportableError(
                    f"its argument {node.name} is a number that may differ from call to call: pass a tensor, or give it no dynamic_shapes"
                )
            graph.erase_node(node)
    return torch.fx.GraphModule(module, graph), tuple(tensors.values()), tuple(kept)


def _exported_graph(
    graph_module: torch.fx.GraphModule,
    tensors: tuple[tuple[str, torch.Tensor], ...],
    arguments: tuple[int, ...],
    sizes: SizesTraced,
) -> ExportedGraph:
    """Correct AOTAutograd's graph, which is being compiled, and take what its wrapper knows."""
    context = TracingContext.try_get()
    metadata: Any = context.fw_metadata if context is not None else None
    assert metadata is not None, "AOTAutograd tells it while it compiles"
    if metadata.tokens:
        raise NotExportableError("it has effects that PyTorch keeps in order by tokens, such as printing")
    mutated: list[int] = metadata.mutated_inp_runtime_indices
    if any(metadata.input_info[position].mutates_metadata for position in mutated):
        raise NotExportableError("it changes the shape or strides of an input in place, not its contents alone")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(tensors) + len(arguments):
        raise NotExportableError(
            "two of its inputs are the same tensor, and it changes one of them: pass tensors of their own"
        )
    returned = _returned_inputs(graph_module, placeholders, metadata)
    rows: dict[Node, int] = {}

    def is_of_rows(update: Node) -> bool:
        found = written_rows(update)
        if found is not None:
            rows[update.args[0]] = found[0]  # type: ignore[index]
        return found is not None

    outputs = range(len(mutated), len(mutated) + len(metadata.output_info))
    in_place, restore = correct(graph_module, mutated, outputs, may_write=is_of_rows)
    restored: Sequence[Any] = (
        [_result(each) for each in restore.results] if restore is not None else _outputs(graph_module)
    )
    final = (
        restored
        if in_place is None
        else [each if isinstance(each, Write) else restored[each] for each in in_place.results]
    )
    updates = tuple(
        _update(position, final[number], restored, placeholders, rows) for number, position in enumerate(mutated)
    )
    results = tuple(
        returned[number] if number in returned else final[len(mutated) + number]
        for number in range(len(metadata.output_info))
    )
    static = frozenset(
        node.name for position, node in enumerate(placeholders[: len(tensors)]) if position not in mutated
    )
    captured = CapturedGraph(graph_module, "inference", static, writes_inputs=bool(mutated))
    specs = tuple(TensorSpec.of(node.meta["val"]) for node in placeholders[len(tensors) :])
    (output,) = graph_module.graph.find_nodes(op="output")  # in a partitioned graph a text is the name of a value
    output.args = (tuple(None if isinstance(value, str) else value for value in output.args[0]),)
    return ExportedGraph(captured, tensors, arguments, specs, sizes, updates, results)


def _outputs(graph_module: torch.fx.GraphModule) -> list[Any]:
    """The graph's outputs as results; literals as they are."""
    (output,) = graph_module.graph.find_nodes(op="output")
    return [GraphOutput(number) if isinstance(value, Node) else value for number, value in enumerate(output.args[0])]


def _returned_inputs(graph_module: torch.fx.GraphModule, placeholders: Sequence[Node], metadata: Any) -> dict[int, Any]:
    """The results that are an input or a view of one, which AOTAutograd's wrapper makes of the input itself, by number."""
    (output,) = graph_module.graph.find_nodes(op="output")
    originals = output.args[0][len(metadata.mutated_inp_runtime_indices) :]
    found: dict[int, Any] = {}
    for number, (info, original) in enumerate(zip(metadata.output_info, originals, strict=False)):
        if info.output_type.name not in ("is_input", "alias_of_input"):
            continue
        origin = GraphInput(info.base_idx)
        if info.output_type.name == "is_input":
            found[number] = origin
            continue
        value, base = original.meta["val"], placeholders[info.base_idx].meta["val"]
        numbers = (*value.shape, *value.stride(), value.storage_offset(), base.storage_offset())
        if value.dtype != base.dtype or not all(isinstance(each, int) for each in numbers):
            raise NotExportableError(
                f"its result {number} is a view of an input by another dtype, or by sizes known only at run time"
            )
        is_same_storage = value.untyped_storage()._cdata == base.untyped_storage()._cdata
        offset = value.storage_offset() - (base.storage_offset() if is_same_storage else 0)
        found[number] = ViewOf(origin, StridedView(tuple(value.shape), value.stride(), offset, LazyBits.of(value)))
    return found


def _result(aliased: AliasedResult) -> Any:
    origin = GraphInput(aliased.source) if aliased.of_input else GraphOutput(aliased.source)
    if aliased.make is None:
        return origin
    if not isinstance(aliased.make, StridedView):
        raise NotExportableError(
            "two of its results share memory in a way that depends on sizes known only at run time"
        )
    return ViewOf(origin, aliased.make)


def _update(
    position: int, value: Any, restored: Sequence[Any], placeholders: Sequence[Node], rows: dict[Node, int]
) -> Copied | Rows:
    if isinstance(value, GraphOutput):
        return Copied(position, value.number)
    if not isinstance(value, Write):
        raise NotExportableError(f"the new value of its input {placeholders[position].name} is a view of another value")
    index, source = _givens(value, restored)
    return Rows(position, rows[placeholders[position]], index, source)


def _givens(write: Write, restored: Sequence[Any]) -> list[GraphOutput | GraphInput]:
    """The positions and the slices of a write, which are the only values among its arguments."""
    found: list[GraphOutput | GraphInput] = []

    def collect(argument: Any) -> Any:
        if isinstance(argument, Given):
            found.append(GraphInput(argument.position) if argument.is_input else restored[argument.position])
        return argument

    torch.fx.node.map_aggregate(write.args, collect)
    return found
