"""The ATen operators that TensorRT supports, and reasons for the others. Each operator is checked in the form to which torch_tensorrt lowers
it.

The registry of converters describes lowered graphs: it has no silu, no transpose and no max_pool2d_with_indices. So a node is lowered alone,
on fake inputs of the same form, and the registry is asked about every operator that comes out. What TensorRT would get wrong without saying
so is refused here, with a code of its own.
"""

from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.node import Argument, map_aggregate, map_arg

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tensorrt import quantization
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.faults import fault_of
from torch_hybrid_backend.engines.tensorrt.verdicts import Verdicts
from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.graph.schema import is_item, is_mutating
from torch_hybrid_backend.sizes.size import symbol, symbols
from torch_hybrid_backend.torch_private import OpOverload, tree_leaves

if TYPE_CHECKING:
    from torch_hybrid_backend.engines.tensorrt.adapter import Converters

aten = torch.ops.aten

# In networks that state every type. TensorRT has int8 and float8 for quantized values alone, and no complex numbers.
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool})

# Some converters cut whole numbers to 32 bits (`where` does). These lowered operators stay exact: they move values; they take indices, which
# fit 32 bits where a tensor has so many elements; they find positions; or their converters leave them to TensorRT's arithmetic of 64 bits,
# as the networks of 2.13 show. `adapter` looks at each network all the same. Divisions are left out: they round in more than one way.
_EXACT_INT64: frozenset[object] = frozenset(
    {
        operator.getitem,
        aten._reshape_copy.default,
        aten.abs.default,
        aten.add.Tensor,
        aten.alias.default,
        aten.amax.default,
        aten.amin.default,
        aten.argmax.default,
        aten.argmin.default,
        aten.arange.start_step,
        aten.cat.default,
        aten.clone.default,
        aten.embedding.default,
        aten.eq.Scalar,
        aten.eq.Tensor,
        aten.expand.default,
        aten.gather.default,
        aten.ge.Scalar,
        aten.ge.Tensor,
        aten.gt.Scalar,
        aten.gt.Tensor,
        aten.index.Tensor,
        aten.index_select.default,
        aten.le.Scalar,
        aten.le.Tensor,
        aten.lt.Scalar,
        aten.lt.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.mul.Tensor,
        aten.ne.Scalar,
        aten.ne.Tensor,
        aten.neg.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.sort.default,
        aten.sub.Tensor,
        aten.topk.default,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
# What may be int64 in their place: the indices they take, and those they find. Numbers themselves move through views and copies only.
_VALUES_FIRST: frozenset[object] = frozenset(
    {
        aten.argmax.default,
        aten.argmin.default,
        aten.embedding.default,
        aten.sort.default,
        aten.topk.default,
    }
)


def supports(node: Node, kept: Verdicts) -> Verdict:
    """Supported if TensorRT takes one ATen node of a user's graph. torch_tensorrt is asked where no verdict on the node's form is kept."""
    target = node.target
    if is_item(node):  # goes with its operator, about which it was asked
        return Supported()
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return Refused(Reason.NOT_A_TENSOR, f"{target} is no ATen operator: sizes are computed on the host")
    if is_mutating(node):
        return Refused(Reason.IN_PLACE, f"{target} writes into an argument; an engine writes new tensors only")
    of_bytes = quantization.judged(node)
    if isinstance(of_bytes, Refused):
        return of_bytes
    for value in _values(node):
        refused = _refused_value(str(target), value)
        if refused is not None and not (of_bytes and refused.code is Reason.DTYPE):
            return refused
    if of_bytes is not None:
        return of_bytes
    if not any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta.get("val"))):
        return Refused(Reason.NOT_A_TENSOR, f"{target} yields no tensor")
    form = _form(node)
    return _lowered_verdict(node) if form is None else kept.of(form, lambda: _lowered_verdict(node))


def _form(node: Node) -> str | None:
    """All that a verdict on a node depends on; None where that is more than a text: constants' contents."""
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        return None

    def described(argument: Node) -> str:
        values = tree_leaves(argument.meta.get("val"))
        return str([TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in values])

    arguments = map_arg((node.args, node.kwargs), described)
    return f"{node.target}{arguments}{_read(node)}{_most(node) or ''}"


def _most(node: Node) -> dict[str, int]:
    """The most that sizes can be of what a node reads and makes, by the names of their symbols, where the graph's capture knows it."""
    found: dict[str, int] = {}
    for value in tree_leaves([each.meta.get("val") for each in (*node.all_input_nodes, node)]):
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                bounds = {str(each): environment.bound_sympy(each).upper for each in size.node.expr.free_symbols}
                found |= {name: int(most) for name, most in bounds.items() if most.is_Integer}
    return dict(sorted(found.items()))


def _read(node: Node) -> list[int] | None:
    """The indices of a node's outputs that are read; None for a node of one output."""
    if not isinstance(node.meta.get("val"), list | tuple):
        return None
    return sorted({int(user.args[1]) for user in node.users if is_item(user) and user.users})  # type: ignore[arg-type]


def alone(node: Node, fakes: Fakes) -> tuple[torch.fx.GraphModule, list[object]]:
    """A graph of the node only, and values of `fakes` for its inputs. It returns the outputs that the node's users read. Sizes among its
    arguments are those of tensors that come first and that nothing reads: a region's inputs tell its sizes, whichever of them the node has."""
    graph = torch.fx.Graph()
    owner = torch.nn.Module()
    arguments = [value for source in node.all_input_nodes if isinstance(value := source.meta.get("val"), torch.SymInt)]
    given: list[object] = [
        fakes.tensor(TensorSpec((symbol(each.name, each.hint),), "float32", (1,), CPU))
        for each in symbols(map(dim, arguments))
    ]
    for number, _ in enumerate(given):
        graph.placeholder(f"size{number}")
    own: dict[Node, Node] = {}
    module = node.graph.owning_module
    for source in node.all_input_nodes:
        if source.op == "get_attr" and module is not None:
            setattr(owner, source.name, operator.attrgetter(str(source.target))(module))
            own[source] = graph.get_attr(source.name)
        else:
            own[source] = graph.placeholder(source.name)
            given.append(_fake(source.meta.get("val"), fakes))
    own[node] = graph.node_copy(node, own.__getitem__)
    read = _read(node)
    graph.output(
        (own[node],) if read is None else tuple(graph.call_function(operator.getitem, (own[node], i)) for i in read)
    )
    on_host(graph)
    return torch.fx.GraphModule(owner, graph), given


def on_host(graph: torch.fx.Graph) -> None:
    """The same for the CPU: what is traced, folded or built is so without a GPU's memory. All of a region is on one device."""

    def moved(argument: Argument) -> Argument:
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)


def refusal_of(node: Node, found: Converters) -> Refused | None:
    """The refusal of a node of a lowered graph by the registry's answer; None where it has a converter."""
    if not found.known:
        return Refused(Reason.UNKNOWN_OPERATOR, f"torch_tensorrt has no converter for {node.target}")
    if found.allocates:
        return Refused(Reason.DATA_DEPENDENT, f"how large the result of {node.target} is depends on its data")
    if found.found:
        return None
    if found.static_only:
        return Refused(
            Reason.SYMBOLIC_SHAPE, f"the converter of {node.target} takes no sizes that are known only at run time"
        )
    return Refused(
        Reason.ARGUMENT, f"the converter of {node.target} does not take these arguments ({', '.join(found.refusing)})"
    )


def _adapter() -> ModuleType:
    """Imported when it is first needed: that takes seconds. torch_tensorrt hands all warnings of the process to logging as it is imported, and
    gives the root logger a handler: that is undone."""
    root, show = logging.getLogger(), warnings.showwarning
    handlers = list(root.handlers)
    from torch_hybrid_backend.engines.tensorrt import adapter

    if warnings.showwarning is not show:
        logging.captureWarnings(False)
    root.handlers[:] = handlers
    return adapter


def _lowered_verdict(node: Node) -> Verdict:
    adapter, fakes = _adapter(), Fakes(most=_most(node))
    graph, given = alone(node, fakes)
    try:
        lowered = adapter.lowered(graph, fakes, given)
    except MemoryError:  # that is no verdict to keep
        raise
    except failures(Exception) as error:  # a decomposition may fail in any way on forms not thought of
        why = f"torch_tensorrt cannot lower {node.target}: {type(error).__name__}: {_first_line(error)}"
        return Refused(Reason.SYMBOLIC_SHAPE if fakes.assumed() else Reason.ARGUMENT, why)
    for each in lowered.graph.nodes:
        refused = _refused_lowered(node, each, adapter.converters_of)
        if refused is not None:
            return refused
    return Supported()


def _refused_lowered(node: Node, lowered: Node, converters_of: Callable[[Node], Converters]) -> Refused | None:
    if lowered.op == "output":
        if any(not isinstance(result, Node) for result in tree_leaves(lowered.args)):
            return Refused(Reason.ARGUMENT, f"torch_tensorrt's lowering of {node.target} drops an output that is read")
        return None
    if lowered.op != "call_function":
        return None
    values = _values(lowered)
    title = str(lowered.target) if lowered.target == node.target else f"{lowered.target}, which {node.target} becomes,"
    for value in values:
        refused = _refused_value(title, value)
        if refused is not None:
            return refused
    refused = refusal_of(lowered, converters_of(lowered))
    if refused is None and (fault := fault_of(lowered)):
        refused = Refused(Reason.ARGUMENT, fault)
    if refused is not None and lowered.target != node.target:
        return Refused(refused.code, f"{refused.why}, which {node.target} becomes")
    if refused is None and not _is_exact(lowered):
        return Refused(Reason.INT64, f"{title} would compute whole numbers of 64 bits in 32")
    return refused


def _is_exact(node: Node) -> bool:
    """True if whole numbers of 64 bits come out of a lowered node as they should."""
    results = [v for v in tree_leaves(node.meta.get("val")) if _is_int64(v)]
    arguments = [argument.meta.get("val") for argument in node.all_input_nodes]
    read = [value for value in tree_leaves(arguments) if _is_int64(value)]
    if (
        node.target is aten._to_copy.default
    ):  # to fewer bits, and from numbers that are not whole, is more than TensorRT says of it
        made = _dtypes(node.meta.get("val"))
        return not (read and made & {torch.int32}) and not (results and _dtypes(arguments) - {torch.bool, torch.int32})
    is_size = not _dtypes(node.meta.get("val"))  # of a tensor: those fit 32 bits
    if is_size or not (results or read):
        return True
    if node.target not in _EXACT_INT64 or any(_is_long(argument) for argument in tree_leaves(node.args)):
        return False
    values = arguments[:1] if node.target in _VALUES_FIRST else []
    return not any(_is_int64(value) for value in tree_leaves(values))


def _is_long(argument: object) -> bool:
    """True if it is a number of more than 32 bits, in which converters hold them; the end of a slice may be any."""
    return type(argument) is int and not -(1 << 31) <= argument < (1 << 31) and argument != sys.maxsize


def _is_int64(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64


def _dtypes(values: object) -> set[torch.dtype]:
    return {value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


def _refused_value(title: str, value: object) -> Refused | None:
    """The refusal of a value that no operator may read or make; None if there is none."""
    if isinstance(value, torch.SymInt) and _is_unbacked([value]):
        return Refused(Reason.DATA_DEPENDENT, f"{title} depends on a number that only its data tell")
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized:
        return Refused(Reason.LAYOUT, f"{title} has a tensor of layout {value.layout}; TensorRT takes plain ones")
    if value.dtype is torch.float64:
        return Refused(Reason.FLOAT64, f"{title} computes in float64, which TensorRT does not have")
    if value.dtype not in _DTYPES:
        return Refused(Reason.DTYPE, f"{title} has a tensor of {value.dtype}, which TensorRT does not compute in")
    if _is_unbacked(value.shape):
        return Refused(Reason.DATA_DEPENDENT, f"how large a tensor of {title} is depends on data")
    if any(isinstance(size, int) and size == 0 for size in value.shape):
        return Refused(Reason.EMPTY, f"{title} has a tensor without elements")
    return None


def _is_unbacked(sizes: Iterable[int | torch.SymInt]) -> bool:
    return not all(is_computable(dim(size)) for size in sizes)


def _values(node: Node) -> list[object]:
    """The values that a node reads, and those of its results that are read."""
    if is_item(node):  # of the others of an operator's results nothing is read here
        return tree_leaves(node.meta.get("val"))
    arguments = [argument.meta.get("val") for argument in node.all_input_nodes]
    results: Any = node.meta.get("val")
    read = _read(node)
    return [*tree_leaves(arguments), *tree_leaves(results if read is None else [results[i] for i in read])]


def _fake(value: object, fakes: Fakes) -> object:
    if isinstance(value, torch.Tensor):
        return fakes.tensor(TensorSpec.of(value))
    return fakes.size(dim(value)) if isinstance(value, torch.SymInt) else value


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
