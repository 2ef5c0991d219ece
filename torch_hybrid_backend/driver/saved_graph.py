"""SavedGraph: a compiled graph and the graphs that its control flow calls, as one plan that is data. Part of the wiring.

HybridGraph          -> SavedPlan, with a callback for each call of a control flow operator
the call's bodies    -> HybridGraphs, which are saved likewise; one that the call at hand has not reached runs once on its operands
runtime.inner_plans  -> one SavedPlan, with a step in place of each of these callbacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_hybrid_backend.artifact.functions import Function, graph_of
from torch_hybrid_backend.artifact.manifest import Limit
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region, Segment
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.driver.stages import Assignment, build_executable
from torch_hybrid_backend.errors import NotExportableError, failures
from torch_hybrid_backend.graph.schema import is_item
from torch_hybrid_backend.graph.values import output_nodes
from torch_hybrid_backend.passes.control_flow import CompiledBody, site_of
from torch_hybrid_backend.runtime.executor import Executor, SavedPlan
from torch_hybrid_backend.runtime.inner_plans import ControlFlow, with_control_flow
from torch_hybrid_backend.runtime.operator_program import NotNativeError, operator_region
from torch_hybrid_backend.runtime.plan_layout import AtSizes, StaticLayoutError
from torch_hybrid_backend.runtime.symbolic_executor import SymbolicExecutor
from torch_hybrid_backend.torch_private import HigherOrderOperator


@dataclass(frozen=True, slots=True, eq=False)
class SavedGraph:
    """A graph as one plan. `limits`: the sizes that limit what it serves. `assignments`: of the graph and of those that its control flow calls.
    `python_parts`: what the functions of the plan are, in words, in their order."""

    plan: SavedPlan
    limits: tuple[Limit, ...]
    assignments: tuple[Assignment, ...]
    python_parts: tuple[str, ...]


def saved_graph(graph: HybridGraph, inputs: Sequence[Any], config: Config) -> SavedGraph:
    """Save a graph that is ready, with the constants of a call's inputs. Segments that eager runs become steps where PyTorch's C interface can
    call their operators. Raises NotExportableError for what no file can hold."""
    assignment = graph.assignment
    executor = build_executable(assignment, inputs, config, is_saved=True).executor
    if isinstance(executor, SymbolicExecutor):
        saved, limits = _of_any_sizes(executor, inputs)
    elif isinstance(executor, Executor):
        saved, limits = executor.saved(inputs), ()
    else:
        raise NotExportableError(
            "its graph is run from Python, segment by segment, as graphs are whose sizes depend on data; HYBRID_LOG=info says why"
        )
    segments = {segment.region.name: segment for segment in assignment.partition.graph.segments}
    called = {
        number: segments[region]
        for number, region in saved.regions.items()
        if any(map(_runs_graphs, segments[region].region.graph_module.graph.nodes))
    }
    parts = {
        function: _in_words(function, segments[saved.regions[number]].region)
        for number, function in saved.functions.items()
        if number not in called
    }
    arguments = _arguments(assignment, inputs, {segment.region.name for segment in called.values()}) if called else {}
    assignments = [assignment]
    calls: dict[int, ControlFlow] = {}
    for number, segment in called.items():
        bodies, calls[number] = _read(segment, arguments[segment.region.name], assignment.partition.graph.sizes, config)
        for body in bodies:
            limits += body.limits
            assignments += body.assignments
            parts.update(zip(body.plan.functions.values(), body.python_parts, strict=True))
    plan = with_control_flow(saved, calls) if calls else saved
    if calls and plan.functions and isinstance(executor, SymbolicExecutor):
        raise NotExportableError(
            "it has control flow and parts that run in Python, which a file cannot hold for many sizes: export one file for each set of sizes, "
            "without dynamic_shapes"
        )
    return SavedGraph(plan, limits, tuple(assignments), tuple(parts[function] for function in plan.functions.values()))


def _of_any_sizes(executor: SymbolicExecutor, inputs: Sequence[Any]) -> tuple[SavedPlan, tuple[Limit, ...]]:
    try:
        saved, limits = executor.saved(inputs)
    except StaticLayoutError as error:
        raise NotExportableError(
            f"it cannot be exported for many sizes: {error}; export it without dynamic_shapes"
        ) from error
    return saved, limits


def _in_words(function: Function | AtSizes, region: Region) -> str:
    """A part that only Python runs: why, and the user's line; or one operator."""
    if graph_of(function) is None:
        return str(getattr(function, "args", [function])[0])
    where = f" ({region.source})" if region.source else ""
    return f"{_why_python(region)}{where}"


def _why_python(region: Region) -> str:
    try:
        operator_region(region)
    except NotNativeError as error:
        return str(error)
    return "an engine that is called from Python"


def _runs_graphs(node: Node) -> bool:
    """True if the node calls an operator that runs graphs: control flow, and what PyTorch wraps around it."""
    return isinstance(node.target, HigherOrderOperator)


def _arguments(assignment: Assignment, inputs: Sequence[Any], regions: set[str]) -> dict[str, list[Any]]:
    """The arguments of segments, by region, in a call of the graph."""
    found: dict[str, list[Any]] = {}
    runs = assignment.runs

    def run(index: int, segment: Segment, arguments: Sequence[Any]) -> Sequence[Any]:
        if segment.region.name in regions:
            found[segment.region.name] = list(arguments)
        return runs[index](arguments)

    assignment.python_executor().run(inputs, run)
    return found


def _read(
    segment: Segment, arguments: Sequence[Any], sizes: Mapping[str, Any], config: Config
) -> tuple[list[SavedGraph], ControlFlow]:
    """The bodies of a call of a control flow operator, and the call."""
    module = segment.region.graph_module
    placeholders = module.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, arguments, strict=True))
    tensors = [node for node, name in zip(placeholders, segment.inputs, strict=True) if name not in sizes]
    position = {node: number for number, node in enumerate(tensors)}
    computing = [each for each in module.graph.nodes if each.op == "call_function" and not is_item(each)]
    node = next(filter(_runs_graphs, computing))
    site, name = site_of(node), str(node.target)

    def refuse(why: str) -> NotExportableError:
        where = f" ({segment.region.source})" if segment.region.source else ""
        return NotExportableError(f"its control flow cannot be written, {name}{where}: {why}")

    if name == "auto_functionalized_v2":
        raise refuse(
            "a branch or a body writes to a tensor that it is given, or to a buffer: return the new value, and write it outside"
        )
    if site is None or name not in ("cond", "while_loop"):
        raise refuse(
            "a file holds torch.cond and while_loop; write it as one of these, or as operators without control flow"
        )
    assert len(computing) == 1, "calls of control flow are segments of their own"
    asked = node.args[0] if name == "cond" else None
    if asked is not None and not (asked in position and _is_truth_value(asked.meta["val"])):
        raise refuse("what it asks is not a tensor of one truth value")
    carried = site.operands[: site.changing]
    if not all(operand in position for operand in carried):
        raise refuse("it carries a number from one iteration to the next: carry a tensor")
    results = [each for each in output_nodes(module) if isinstance(each.meta["val"], torch.Tensor)]
    if len(results) != sum(each not in sizes for each in segment.outputs):
        raise refuse("one of its results is no tensor")
    operands = [given[each] if isinstance(each, Node) else each for each in site.operands]
    bodies = []
    for attribute in site.bodies:
        body = getattr(module, attribute.target)
        graph = body.run if isinstance(body, CompiledBody) else None
        if not isinstance(graph, HybridGraph):
            raise refuse(f"{attribute.target} could not be compiled; the log says why")
        if not graph.is_ready:
            try:
                with torch.no_grad():
                    graph(list(operands))
            except failures(Exception) as error:  # whatever it raises: the user's call does not run it
                raise refuse(
                    f"the example call does not run {attribute.target}, which fails on that call's tensors ({error}): export with a call on "
                    "whose tensors both branches work"
                ) from error
        bodies.append(saved_graph(graph, operands, config))
        if name == "while_loop" and len(bodies) == 1 and not _is_truth_value(graph([*operands])[0]):
            raise refuse("its condition does not return a tensor of one truth value")
    numbers = tuple(position.get(each) if isinstance(each, Node) else None for each in site.operands)
    call = ControlFlow(
        (bodies[0].plan, bodies[1].plan),
        None if asked is None else position[asked],
        numbers,
        site.changing,
        tuple(int(each.args[1]) for each in results),  # type: ignore[arg-type]
    )
    return bodies, call


def _is_truth_value(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.numel() == 1 and value.is_cpu
