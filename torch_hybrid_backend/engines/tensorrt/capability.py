"""ATen operators that TensorRT supports, and reasons for refusing the others.

The registry of converters describes lowered graphs: it has no silu, no transpose and no max_pool2d_with_indices. So a node is lowered alone, on
fake inputs like its own, and the registry is asked about every operator in the result. Operators that TensorRT would silently get wrong are
refused here, with a code of their own.
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

# Dtypes of strongly typed networks. TensorRT has int8 and float8 for quantized values only, and no complex numbers.
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool})

# Some converters cut int64 to int32, such as that of `where`. These lowered operators are exact. They only move values; or take or return
# indices, which fit 32 bits, as tensors are smaller; or TensorRT computes them in 64 bits, as networks of 2.13 show. `adapter` checks each
# network too. Divisions are left out, as they differ in rounding.
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
# Of these, indices may be int64, as arguments or results; the values in the first argument may not.
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
    """Supported if TensorRT takes a node of a user's ATen graph. torch_tensorrt is asked only if no verdict on the node's form is kept."""
    target = node.target
    if is_item(node):  # the verdict is that on the operator whose result it is
        return Supported()
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return Refused(Reason.NOT_A_TENSOR, f"{target} is no ATen operator: sizes are computed on the host")
    if is_mutating(node):
        return Refused(Reason.IN_PLACE, f"{target} writes into an argument; an engine writes new tensors only")
    of_8_bits = quantization.verdict_of(node)
    if isinstance(of_8_bits, Refused):
        return of_8_bits
    for value in _values(node):
        refused = _refused_value(str(target), value)
        if refused is not None and not (of_8_bits and refused.code is Reason.DTYPE):
            return refused
    if of_8_bits is not None:
        return of_8_bits
    if not any(isinstance(value, torch.Tensor) for value in tree_leaves(node.meta.get("val"))):
        return Refused(Reason.NOT_A_TENSOR, f"{target} yields no tensor")
    form = _form(node)
    return _lowered_verdict(node) if form is None else kept.of(form, lambda: _lowered_verdict(node))


def _form(node: Node) -> str | None:
    """Text of everything that a verdict on a node depends on; None if the verdict depends on the contents of constants."""
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        return None

    def described(argument: Node) -> str:
        values = tree_leaves(argument.meta.get("val"))
        return str([TensorSpec.of(value) if isinstance(value, torch.Tensor) else value for value in values])

    arguments = map_arg((node.args, node.kwargs), described)
    return f"{node.target}{arguments}{_read(node)}{_most(node) or ''}"


def _most(node: Node) -> dict[str, int]:
    """Symbol name -> upper bound, for sizes of a node's inputs and results, as far as the graph's capture recorded bounds."""
    found: dict[str, int] = {}
    for value in tree_leaves([each.meta.get("val") for each in (*node.all_input_nodes, node)]):
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                bounds = {str(each): environment.bound_sympy(each).upper for each in size.node.expr.free_symbols}
                found |= {name: int(most) for name, most in bounds.items() if most.is_Integer}
    return dict(sorted(found.items()))


def _read(node: Node) -> list[int] | None:
    """Indices of a node's outputs that are used; None if the node has a single output."""
    if not isinstance(node.meta.get("val"), list | tuple):
        return None
    return sorted({int(user.args[1]) for user in node.users if is_item(user) and user.users})  # type: ignore[arg-type]


def graph_of_node(node: Node, fakes: Fakes) -> tuple[torch.fx.GraphModule, list[object]]:
    """A graph of one node, and values of `fakes` for its inputs. The graph returns the outputs that the node's users read.

    For each size symbol among the node's arguments, the graph has an unused tensor of this size as a leading input. In a region, inputs of the
    region determine such sizes."""
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
    """Change all devices among a graph's arguments to the CPU, in place. Tracing, folding and building then need no GPU memory."""

    def moved(argument: Argument) -> Argument:
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)


def refusal_of(node: Node, found: Converters) -> Refused | None:
    """The refusal of a node of a lowered graph by the registry's answer; None if the node has a converter."""
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
    """The module `adapter`, imported when first needed, as that takes seconds.

    When torch_tensorrt is imported, it redirects all warnings of the process to logging, and adds a handler to the root logger. Both are
    undone."""
    root, show = logging.getLogger(), warnings.showwarning
    handlers = list(root.handlers)
    from torch_hybrid_backend.engines.tensorrt import adapter

    if warnings.showwarning is not show:
        logging.captureWarnings(False)
    root.handlers[:] = handlers
    return adapter


def _lowered_verdict(node: Node) -> Verdict:
    adapter, fakes = _adapter(), Fakes(most=_most(node))
    graph, given = graph_of_node(node, fakes)
    try:
        lowered = adapter.lowered(graph, fakes, given)
    except MemoryError:  # no verdict, and not kept
        raise
    except failures(Exception) as error:  # a decomposition may fail in any way
        why = f"torch_tensorrt cannot lower {node.target}: {type(error).__name__}: {_first_line(error)}"
        return Refused(Reason.SYMBOLIC_SHAPE if fakes.assumptions() else Reason.ARGUMENT, why)
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
    """True if a lowered node computes int64 values exactly."""
    results = [v for v in tree_leaves(node.meta.get("val")) if _is_int64(v)]
    arguments = [argument.meta.get("val") for argument in node.all_input_nodes]
    read = [value for value in tree_leaves(arguments) if _is_int64(value)]
    if node.target is aten._to_copy.default:
        # TensorRT does not document its results for casts of int64 to int32, and of floats to int64.
        made = _dtypes(node.meta.get("val"))
        return not (read and made & {torch.int32}) and not (results and _dtypes(arguments) - {torch.bool, torch.int32})
    is_size = not _dtypes(node.meta.get("val"))  # sizes of tensors fit 32 bits
    if is_size or not (results or read):
        return True
    if node.target not in _EXACT_INT64 or any(_is_long(argument) for argument in tree_leaves(node.args)):
        return False
    values = arguments[:1] if node.target in _VALUES_FIRST else []
    return not any(_is_int64(value) for value in tree_leaves(values))


def _is_long(argument: object) -> bool:
    """True for an int that does not fit 32 bits, as converters need. sys.maxsize is allowed, as the end of a slice."""
    return type(argument) is int and not -(1 << 31) <= argument < (1 << 31) and argument != sys.maxsize


def _is_int64(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64


def _dtypes(values: object) -> set[torch.dtype]:
    return {value.dtype for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


def _refused_value(title: str, value: object) -> Refused | None:
    """The refusal of a value that no operator may read or make; None if the value is allowed."""
    if isinstance(value, torch.SymInt) and _is_unbacked([value]):
        return Refused(Reason.DATA_DEPENDENT, f"{title} depends on a number that is known only from data")
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
    """The values that a node reads, and its results that are used."""
    if is_item(node):  # the operator's other results are not read here
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
