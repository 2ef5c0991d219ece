"""The one way of running a graph in PyTorch, operator by operator: every value has the strides it was traced with.

A traced graph relies on the strides that fake tensors had: later operators were chosen and decomposed for them. Real ones differ now
and then, mostly in dimensions of size 1: `view` makes of the transpose of a (1, 4096, 64) tensor one of shape (1, 64, 64, 64) with the
strides (64, 1, 4096, 64), where the trace has (262144, 1, 4096, 64); pointwise operators hand them on, and `native_group_norm` refuses.

Which values differ shows in a graph's first run, node by node. For all later runs the graph is rewritten so that those values alone are
given their strides. Mostly there are none, and later runs are the code that fx generates for the graph, with nothing added.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.graph.schema import has_effects, is_in_flight
from torch_hybrid_backend.sizes.forms import from_sympy, linear
from torch_hybrid_backend.sizes.size import Dim, evaluate, symbol, symbols
from torch_hybrid_backend.torch_private import LazyGraphModule, OpOverload, decomposition_table, tree_leaves, tree_map

# What operators raise for a dtype, layout or stride that they do not take. (An IndexError is always about values.)
_REFUSALS = (RuntimeError, TypeError, ValueError)


class EagerGraph:
    """A functional ATen graph, each node with `meta["val"]`, as a function of the list of its inputs. Threads may call it at once.

    An operator that lacks a kernel for the form (dtype, layout, strides) of its inputs, whatever values they hold, is computed by PyTorch's
    decomposition of it; not one that refuses dtypes which do not go together. Where sizes are known only at run time, those of the first call
    show which values differ from the trace.
    Placeholders with `meta["loose_strides"]` may have other strides in each call, in dimensions of size 1.
    """

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        self._traced = graph_module
        self._module: torch.fx.GraphModule | None = None  # what runs after the first run
        self._uses_decompositions = False

    @property
    def traced(self) -> torch.fx.GraphModule:
        """The graph as it was traced."""
        return self._traced

    @property
    def uses_decompositions(self) -> bool:
        """True if PyTorch's decompositions stood in for operators in the first run."""
        return self._uses_decompositions

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs. What an operator raises comes through unchanged."""
        try:
            return self.run(inputs)
        except OperatorRefusedError as refused:
            error = refused.error
        try:
            raise error
        finally:
            del error  # it and this frame would keep each other alive, and with them the run's tensors

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Run a call, but raise OperatorRefusedError where the fault is not in the values: an operator does not take the form of its inputs,
        and no decomposition stands in for it."""
        module = self._module
        if module is not None:
            return _listed(module(*inputs))
        first = TracedRun(self._traced)
        outputs = _listed(first.run(*inputs))
        module = with_right_text(first.rewritten())
        self._uses_decompositions = first.has_formulas
        LazyGraphModule.force_recompile(module)  # now, not in a run that is timed
        self._module = module
        return outputs


def with_right_text(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph module, or a copy of it that computes what its nodes say where the text that torch.fx prints of them does not.

    torch.fx prints `operator.pow(-2, t)` as `-2 ** t`, which Python reads as `-(2 ** t)`, and complex numbers as Python displays them:
    `(nan+nanj)` names no number, and `(-0+1j)` has lost the sign of its zero. In the copy such nodes call a function that holds the numbers.
    """
    if not any(map(_is_misprinted, graph_module.graph.nodes)):
        return graph_module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in filter(_is_misprinted, list(graph.nodes)):
        inputs = node.all_input_nodes
        call = functools.partial(_called, node.op, node.target, inputs, node.args, node.kwargs)
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(_named(call), tuple(inputs)))
        graph.erase_node(node)
    return torch.fx.GraphModule(graph_module, graph, "Eager")


def _is_misprinted(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in (operator.pow, operator.ipow) and not isinstance(node.args[0], Node):
        return True
    return any(isinstance(value, complex) for value in tree_leaves((node.args, node.kwargs)))


def _called(kind: str, target: Any, inputs: Sequence[Node], args: Any, kwargs: Any, *values: Any) -> Any:
    """The value of a node whose `inputs` have these `values`."""
    own = dict(zip(inputs, values, strict=True))
    args, kwargs = torch.fx.node.map_arg((args, kwargs), own.__getitem__)
    return getattr(args[0], target)(*args[1:], **kwargs) if kind == "call_method" else target(*args, **kwargs)


def _named(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same as a function with a name, which torch.fx asks for."""

    def with_its_numbers(*values: Any) -> Any:
        return call(*values)

    return with_its_numbers


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]  # a loop's condition returns a bare value


def with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`value` with `strides` and its bits: itself where it has them, a view of it where only dimensions of size 1 differ, else a copy.

    Itself too where a copy could not have them, as elements would share memory.
    """
    if value.stride() == tuple(strides):
        return value
    both = [(a, b) for size, a, b in zip(value.shape, value.stride(), strides, strict=True) if size != 1]
    if value.numel() == 0 or all(a == b for a, b in both):
        return value.as_strided(value.shape, strides)
    if any(b == 0 for _, b in both):
        return value
    memory = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return LazyBits.of(value).view_of(memory).copy_(value)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place where a run finds a size symbol: in a node's number, or in a dimension of its tensor, which is factor * symbol + offset."""

    node: Node
    dimension: int | None
    factor: int
    offset: int

    def read(self, value: Any) -> int:
        number = value if self.dimension is None else value.shape[self.dimension]
        return (int(number) - self.offset) // self.factor


class TracedRun(torch.fx.Interpreter):
    """A graph run node by node, each value given the strides it was traced with. `env` holds the values that are still needed."""

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # it would write into the messages of errors
        self.env = {}
        self._graph_module = graph_module
        self._restrided: dict[Node, tuple[Dim, ...]] = {}  # the values that differed, and their traced strides
        self._formulas: dict[Node, Callable[..., Any]] = {}  # the operators that were computed by a decomposition
        self._places: dict[str, _Place] = {}
        self._sizes: dict[str, int] = {}

    def values(self, inputs: Sequence[Any]) -> Iterator[tuple[Node, Any]]:
        """Runs the graph step by step: each node and its value, which is let go of after its last use. The last is the outputs."""
        self.args_iter = iter(inputs)
        for node in self._graph_module.graph.nodes:
            value = self.env[node] = self.run_node(node)
            yield node, value
            for dead in self.user_to_last_uses.get(node, ()):
                del self.env[dead]

    def run_node(self, n: Node) -> Any:
        """The node's value. Raises OperatorRefusedError as `EagerGraph.run` does."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        try:
            # Not Interpreter.run_node: it writes to a record of the process (torch.fx.traceback) that another thread's tracing relies on.
            value = getattr(self, n.op)(n.target, args, kwargs)
        except failures(*_REFUSALS) as error:
            if not _refuses_form(n, args, kwargs, error):
                raise
            if _is_mistake(n, args, kwargs, error):
                raise OperatorRefusedError(f"{n.target}", error, is_mistake=True) from error
            value = self._decomposed(n, args, kwargs, error)
        traced = n.meta.get("val")
        self._learn_sizes(n, traced, value)
        if not _is_strided(traced) or not _is_strided(value) or is_in_flight(n):
            return value
        strides = _dims(traced.stride())
        if strides is None or any(s.name not in self._sizes for s in symbols(strides)):
            return value  # nothing so far tells what they are in this call
        result = with_strides(value, [evaluate(stride, self._sizes) for stride in strides])
        if result is not value or (n.meta.get("loose_strides") and 1 in value.shape):
            self._restrided[n] = strides
        return result

    @property
    def has_formulas(self) -> bool:
        """True if decompositions stood in for operators."""
        return bool(self._formulas)

    def rewritten(self) -> torch.fx.GraphModule:
        """The graph with what its run showed written into it: the graph itself where that is nothing."""
        if not self._restrided and not self._formulas:
            return self._graph_module
        graph = torch.fx.Graph()
        own: dict[Node, Node] = {}
        graph.output(graph.graph_copy(self._graph_module.graph, own))
        for node, formula in self._formulas.items():
            own[node].target = formula
        for node, strides in self._restrided.items():
            value = own[node]
            places = {s.name: self._places[s.name] for s in symbols(strides)}
            with graph.inserting_after(value):
                sources = (own[place.node] for place in places.values())
                new = graph.call_function(_restriding(strides, places), (value, *sources))
            value.replace_all_uses_with(new, delete_user_cb=functools.partial(_is_other, new))
        return torch.fx.GraphModule(self._graph_module, graph, "Eager")

    def _learn_sizes(self, node: Node, traced: object, value: Any) -> None:
        if isinstance(traced, torch.Tensor):
            described: Sequence[object] = traced.shape
        else:
            described = (traced,)
        for dimension, described_size in enumerate(described):
            if not isinstance(described_size, torch.SymInt):
                continue
            solved = linear(_dim(described_size))
            if solved is not None and solved[0] not in self._places:
                place = _Place(node, dimension if isinstance(traced, torch.Tensor) else None, *solved[1:])
                self._places[solved[0]] = place
                self._sizes[solved[0]] = place.read(value)

    def _decomposed(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Results that the operator's decomposition makes of the inputs that the operator itself refused with `error`."""
        decomposition = decomposition_table.get(node.target)  # type: ignore[call-overload]
        if decomposition is None:
            raise OperatorRefusedError(f"{node.target}", error) from error

        def formula(*args: Any, **kwargs: Any) -> Any:
            return decomposition(*args, **kwargs)

        try:
            value = formula(*args, **kwargs)
        except failures(Exception) as failed:  # formulas fail in their own ways: the operator's is to be told
            raise OperatorRefusedError(f"{node.target}", error) from failed
        if value is NotImplemented:
            raise OperatorRefusedError(f"{node.target}", error) from error
        self._formulas[node] = formula
        return value


def _is_other(new: Node, user: Node) -> bool:
    return user is not new


def _restriding(strides: Sequence[Dim], places: Mapping[str, _Place]) -> Callable[..., torch.Tensor]:
    """A function of a value, and of those that tell the size symbols, which gives the value its strides."""

    def with_traced_strides(value: torch.Tensor, *sources: Any) -> torch.Tensor:
        found = zip(places.items(), sources, strict=True)
        sizes = {name: place.read(source) for (name, place), source in found}
        return with_strides(value, [evaluate(stride, sizes) for stride in strides])

    return with_traced_strides


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _dim(value: int | torch.SymInt) -> Dim | None:
    """The size as a `Size`, also if it depends on data: once it is there, its value is as good as another's."""
    return value if isinstance(value, int) else from_sympy(value.node.expr, lambda s: symbol(str(s)))


def _dims(values: Sequence[int | torch.SymInt]) -> tuple[Dim, ...] | None:
    found = [size for size in map(_dim, values) if size is not None]
    return tuple(found) if len(found) == len(values) else None


def _refuses_form(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> bool:
    """True if the operator raises for inputs of this form whatever they hold: tried with zeros and with ones.

    What raises for some values only (an index out of range, a singular matrix, an assertion) is the user's own fault to see.
    """
    operator = node.target
    if has_effects(node):  # it may be done once only: a collective, say
        return False
    if is_out_of_memory(error) or isinstance(error, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return False
    if not isinstance(operator, OpOverload):
        return False
    if not all(_is_form(source.meta.get("val")) for source in node.all_input_nodes):
        return False  # a number that depends on data may be what is wrong
    return _raises(operator, args, kwargs, _filled)


def _is_mistake(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> bool:
    """True if an operator that refuses the form of its inputs does so for any strides: dtypes that do not go together, say. Not where
    NotImplementedError says that there is no kernel."""
    assert isinstance(node.target, OpOverload)
    return not isinstance(error, NotImplementedError) and _raises(node.target, args, kwargs, _contiguous)


def _raises(
    operator: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    filled: Callable[[int, Any], Any],
) -> bool:
    """True if the operator raises both for zeros and for ones in the place of its tensors."""
    for number in (0, 1):
        fill = functools.partial(filled, number)
        try:
            operator(*tree_map(fill, args), **tree_map(fill, dict(kwargs)))
        except failures(Exception) as again:  # what it raises is the question
            if is_out_of_memory(again) or not isinstance(again, _REFUSALS):
                return False
        else:
            return False
    return True


def _is_form(traced: object) -> bool:
    """True if a traced value is a plain tensor, or a size that the graph's inputs tell."""
    return _is_strided(traced) or (isinstance(traced, int | torch.SymInt) and is_computable(dim(traced)))


def _contiguous(number: int, value: Any) -> Any:
    """A contiguous tensor of the same sizes that holds `number` everywhere; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.full(value.shape, number, dtype=value.dtype, device=value.device)


def _filled(number: int, value: Any) -> Any:
    """A tensor of the same form that holds `number` everywhere; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    memory = torch.full((TensorSpec.of(value).span,), number, dtype=value.dtype, device=value.device)
    return LazyBits.of(value).view_of(memory.as_strided(value.shape, value.stride()))
