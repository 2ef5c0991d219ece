"""A slow reference interpreter of the loops language: every lowering is checked against eager through it, without any engine.

Expressions are evaluated over whole domains at once: loop variables are ranges along their own axis, loads are advanced indexing. It is
strict where an engine may be sloppy: operand dtypes must agree, results must have the dtype the expression claims, and a load outside
a `guard` must be provably inside its buffer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.loops.index import FloorDiv, Index, LoopVar, Mod, Scalar, contiguous_strides, index_of, linear
from torch_hybrid_backend.loops.ir import (
    ROUND_TARGETS,
    AttentionGradientOp,
    AttentionKeyGradientOp,
    AttentionOp,
    Buffer,
    Call,
    Const,
    ConvOp,
    Expr,
    FromIndex,
    IntegerMatMulOp,
    Load,
    LoopOp,
    Map,
    MapOp,
    MatMulOp,
    ReduceOp,
    ScanOp,
    ScatterOp,
    ScoreFn,
    Value,
    compute_dtype,
    domain_vars,
    loads_of,
    score_over,
)
from torch_hybrid_backend.loops.lowering import Context, lower_node, supports
from torch_hybrid_backend.loops.ops import BINARY, COMPARE, LOGICAL, OPS, PREDICATE
from torch_hybrid_backend.loops.policy import COMMON, Abilities

Environment = dict[Buffer, torch.Tensor]

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "exp_nonpositive": torch.exp,
    "bitnot": torch.bitwise_not,
    "round_even": torch.round,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.remainder,
    "max": torch.maximum,
    "min": torch.minimum,
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
    "where": torch.where,
    "fma": lambda a, b, c: a * b + c,
}


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Frame:
    """A domain: values of its loop variables, which are new ones or those given, and memory."""

    def __init__(self, shape: tuple[int, ...], env: Environment, variables: Sequence[LoopVar] | None = None) -> None:
        self.shape, self.env = shape, env
        self.index = domain_vars(shape) if variables is None else tuple(map(index_of, variables))
        self.variables = {}
        for d, (index, size) in enumerate(zip(self.index, shape, strict=True)):
            if size > 1:
                ((variable, _),) = index.terms
                self.variables[variable] = torch.arange(size).reshape(
                    [size if k == d else 1 for k in range(len(shape))]
                )
        # Keyed by the mask too: under another guard other elements matter.
        self.memo: dict[tuple[int, int], torch.Tensor] = {}
        self.kept: list[object] = []

    def tensor(self, value: Value) -> torch.Tensor:
        """The value over the whole domain, in its compute dtype."""
        result = self.expr(value.at(self.index), None)
        assert result.dtype == torch_dtype(compute_dtype(value.dtype)), (result.dtype, value.dtype)
        return result.expand(self.shape)

    def evaluate_index(self, index: Index, mask: torch.Tensor | None) -> torch.Tensor:
        total = torch.tensor(index.const)
        for atom, coefficient in index.terms:
            match atom:
                case LoopVar():
                    part = self.variables[atom]
                case FloorDiv(numerator, divisor):
                    part = torch.div(self.evaluate_index(numerator, mask), divisor, rounding_mode="floor")
                case Mod(numerator, divisor):
                    part = torch.remainder(self.evaluate_index(numerator, mask), divisor)
                case Scalar(expr, low, high):
                    part = self.expr(expr, mask).to(torch.int64)
                    legal = (part >= low) & (part <= high)
                    assert bool((legal if mask is None else legal | ~mask).all()), "a scalar index left its range"
            total = total + part * coefficient
        return total

    def expr(self, e: Expr, mask: torch.Tensor | None) -> torch.Tensor:
        key = (id(e), id(mask))
        if key not in self.memo:
            result = self._expr(e, mask)
            assert result.dtype == torch_dtype(e.dtype), f"{e} claims {e.dtype} and is {result.dtype}"
            self.kept.extend((e, mask))
            self.memo[key] = result
        return self.memo[key]

    def _expr(self, e: Expr, mask: torch.Tensor | None) -> torch.Tensor:
        match e:
            case Const(dtype, value):
                return torch.tensor(value, dtype=torch_dtype(dtype))
            case FromIndex(_, index):
                return self.evaluate_index(index, mask)
            case Load():
                return self._load(e, mask)
            case Call():
                return self._call(e, mask)
        raise TypeError(f"not an expression of the loops language: {e!r}")

    def _load(self, e: Load, mask: torch.Tensor | None) -> torch.Tensor:
        memory = self.env[e.buffer]
        assert len(e.index) == memory.dim(), f"{len(e.index)} indices for {memory.dim()} dimensions"
        places = []
        for index, size in zip(e.index, memory.shape, strict=True):
            place = self.evaluate_index(index, mask)
            legal = (place >= 0) & (place < size)
            if mask is None:
                assert 0 <= index.low <= index.high < size, (
                    f"{index!r} in {index.low}..{index.high} is not below {size}"
                )
            else:
                legal = legal | ~mask
            assert bool(legal.all()), f"{index!r} leaves 0..{size - 1}"
            places.append(place.clamp(0, size - 1))
        element = memory[tuple(places)] if places else memory
        return element.to(torch_dtype(e.dtype))

    def _call(self, e: Call, mask: torch.Tensor | None) -> torch.Tensor:
        assert e.op in OPS
        if e.op == "guard":
            condition = self.expr(e.args[0], mask)
            outside = self.expr(e.args[2], mask)
            within = condition if mask is None else condition & mask
            inside = self.expr(e.args[1], within)
            assert inside.dtype == outside.dtype
            return torch.where(condition, inside, outside)
        args = [self.expr(a, mask) for a in e.args]
        if e.op == "cast":
            return args[0].to(torch_dtype(e.dtype))
        if e.op == "round":
            return args[0].to(torch_dtype(ROUND_TARGETS[int(args[1])])).to(torch.float32)
        if e.op in BINARY | COMPARE:
            assert args[0].dtype == args[1].dtype, f"{e.op} of {args[0].dtype} and {args[1].dtype}"
        if e.op in LOGICAL:
            assert all(a.dtype == torch.bool for a in args), e.op
        if e.op == "where":
            assert args[0].dtype == torch.bool
            assert args[1].dtype == args[2].dtype
        assert (
            e.op in COMPARE | PREDICATE
            or e.op == "not"
            or all(a.dtype != torch.bool for a in args)
            or (e.op in LOGICAL | {"where"})
        ), f"{e.op} of bool"
        function = _FUNCTIONS.get(e.op) or getattr(torch, e.op)
        return function(*args)


def _read(value: Value, env: Environment) -> torch.Tensor:
    return Frame(value.shape, env).tensor(value)


def evaluate(op: LoopOp, env: Environment) -> None:
    """Run one operation: fills `env[op.out]`."""
    match op:
        case MapOp(value=value):
            result = _read(value, env)
        case ReduceOp():
            result = _reduce(op, env)
        case ScanOp():
            result = _scan(op, env)
        case ScatterOp():
            result = _scatter(op, env)
        case IntegerMatMulOp(a=a, b=b, zero=zero):
            rows = _read(a, env).to(torch.int32)
            if zero is not None:
                rows = rows - _read(Map(op.out.shape[:2], "int32", zero), env)[..., None]
            result = torch.matmul(rows, _read(b, env).to(torch.int32))
        case MatMulOp(a=a, b=b):
            result = torch.matmul(_read(a, env), _read(b, env))
        case ConvOp(x=x, w=w):
            settings = (op.stride, op.padding, op.dilation, op.groups, op.transposed)
            result = convolve(_read(x, env), _read(w, env), op.out.shape[2:], *settings)
        case AttentionOp():
            q, k, v = (_read(value, env) for value in (op.q, op.k, op.v))
            scores = _scores(op.score, q, k, env)
            result = attend(scores, v, False, op.nan_rows)
            if op.log_sum_exp is not None:
                env[op.log_sum_exp] = _log_sum_exp(scores, op.empty)
        case AttentionGradientOp():
            result = _attention_gradient(op, env)
        case _:
            raise TypeError(f"not an operation of the loops language: {op!r}")
    assert tuple(result.shape) == op.out.shape, (tuple(result.shape), op.out.shape)
    env[op.out] = result.to(torch_dtype(op.out.dtype))


def _scores(score: ScoreFn, q: torch.Tensor, k: torch.Tensor, env: Environment) -> torch.Tensor:
    """See `loops.ir.ScoreFn`."""
    products = q @ k.transpose(-1, -2)
    shape = tuple(products.shape)
    buffer = Buffer(shape, str(products.dtype).removeprefix("torch."))
    frame = Frame(shape, {**env, buffer: products})
    return frame.expr(score_over(score, buffer, frame.index), None).expand(shape)


def _log_sum_exp(scores: torch.Tensor, empty: float) -> torch.Tensor:
    sums = torch.logsumexp(scores, -1)
    return sums.masked_fill(sums == -math.inf, empty)


def _attention_gradient(op: AttentionGradientOp, env: Environment) -> torch.Tensor:
    """See `loops.ir.AttentionGradientOp`."""
    q, k, v, grad = (_read(value, env) for value in (op.q, op.k, op.v, op.grad))
    log_sum_exp, delta = (_read(value, env)[..., None] for value in (op.log_sum_exp, op.delta))
    weights = torch.exp(_scores(op.score, q, k, env) - log_sum_exp)
    d = op.scale * weights * (grad @ v.transpose(-1, -2) - delta)
    if not isinstance(op, AttentionKeyGradientOp):
        return d @ k

    def summed(per_head: torch.Tensor) -> torch.Tensor:
        return per_head.unflatten(1, (op.out.shape[1], -1)).sum(2)

    env[op.value] = summed(weights.transpose(-1, -2) @ grad).to(torch_dtype(op.value.dtype))
    return summed(d.transpose(-1, -2) @ q)


def _reduce(op: ReduceOp, env: Environment) -> torch.Tensor:
    frame = Frame(op.domain, env)
    body = frame.expr(op.body(frame.index), None).expand(op.domain)
    return combine(body, op.axes, op.combiner)


def _scan(op: ScanOp, env: Environment) -> torch.Tensor:
    frame = Frame(op.out.shape, env)
    body = frame.expr(op.body(frame.index), None).expand(op.out.shape)
    rows = body.movedim(op.axis, -1)
    places = range(rows.shape[-1])
    match op.combiner:
        case "logaddexp":
            found = [rows[..., : place + 1].logsumexp(-1) for place in places]
        case "argmax" | "argmin":  # the last of equals
            found = [
                place - combine(rows[..., : place + 1].flip(-1), (rows.dim() - 1,), op.combiner) for place in places
            ]
        case _:
            found = [combine(rows[..., : place + 1], (rows.dim() - 1,), op.combiner) for place in places]
    return torch.stack(found, op.axis)


def _scatter(op: ScatterOp, env: Environment) -> torch.Tensor:
    """Point after point, in the order of the domain."""
    result, frame = _read(op.base, env).clone(), Frame(op.domain, env)
    body = frame.expr(op.body(frame.index), None).expand(op.domain).flatten()
    flat = linear(op.place(frame.index), contiguous_strides(op.out.shape))
    places = frame.evaluate_index(flat, None).expand(op.domain).flatten()
    assert bool(((places >= 0) & (places < result.numel())).all()), "a scatter leaves its result"
    memory = result.reshape(-1)
    if op.combiner == "write":
        for place, value in zip(places.tolist(), body, strict=True):
            memory[place] = value
    else:
        memory.scatter_reduce_(0, places, body, op.combiner if op.combiner == "sum" else f"a{op.combiner}")
    return result


def combine(body: torch.Tensor, axes: Sequence[int], combiner: str) -> torch.Tensor:
    """A reduction over some axes."""
    kept = [d for d in range(body.dim()) if d not in axes]
    rows = body.permute(*kept, *axes).reshape(*(body.shape[d] for d in kept), -1)
    match combiner:
        case "sum":
            return rows.sum(-1, dtype=rows.dtype)
        case "prod":
            return rows.prod(-1, dtype=rows.dtype)
        case "max" | "min":
            return getattr(rows, f"a{combiner}")(-1)
        case "any" | "all":
            assert rows.dtype == torch.bool
            return getattr(rows, combiner)(-1)
        case "argmax" | "argmin":
            return getattr(rows, combiner)(-1)
    raise ValueError(f"not a combiner: {combiner}")


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
) -> torch.Tensor:
    """See `loops.ir.ConvOp`; `size`: the result's."""
    if transposed:
        least = [
            (n - 1) * s + d * (k - 1) + 1 - 2 * p
            for n, k, s, p, d in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
        ]
        extra = [have - reached for have, reached in zip(size, least, strict=True)]
        return torch.convolution(x, w, None, stride, padding, dilation, True, extra, groups)
    pads: list[int] = []
    for n, k, out, s, p, d in zip(x.shape[2:], w.shape[2:], size, stride, padding, dilation, strict=True):
        # The last dimension comes first in `pad`; the zeros after the last element follow from the output's size.
        pads = [p, (out - 1) * s + d * (k - 1) + 1 - n - p, *pads]
    rank, padded = len(stride), torch.nn.functional.pad(x, pads)
    return torch.convolution(padded, w, None, stride, [0] * rank, dilation, False, [0] * rank, groups)


def attend(scores: torch.Tensor, v: torch.Tensor, causal: bool, nan_rows: bool = False) -> torch.Tensor:
    """See `loops.kernels.AttentionKernel`."""
    if causal:
        rows, columns = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])
        scores = scores.masked_fill(columns > rows, -math.inf)
    weights = torch.softmax(scores, -1)
    return (weights if nan_rows else weights.masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0)) @ v


def trace(fn: Callable[..., object], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The ATen graph of a function, with fake tensors as `meta["val"]`; unread nodes are dropped."""
    graph_module = make_fx(fn, tracing_mode="fake")(*inputs)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def run_graph(
    graph_module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], abilities: Abilities = COMMON
) -> list[torch.Tensor]:
    """Lower every node of a graph, run the operations that come out, and return the graph's results."""
    operations: list[LoopOp] = []
    context = Context(operations.append, abilities)
    values: dict[torch.fx.Node, Any] = {}
    env: Environment = {}
    remaining = iter(inputs)
    outputs: list[torch.fx.Node] = []
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            verdict = supports(node, abilities)
            assert verdict, f"{node.target}: {verdict}"
            values[node] = lower_node(context, node, values)
        elif node.op == "output":
            outputs = node.all_input_nodes
        else:
            is_input = node.op == "placeholder"
            tensor = next(remaining) if is_input else operator.attrgetter(node.target)(graph_module)
            buffer = Buffer(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), node.name, not is_input)
            values[node], env[buffer] = buffer, tensor
    for node in outputs:
        meta = node.meta["val"]
        assert values[node].shape == tuple(meta.shape), (values[node].shape, meta.shape)
        assert values[node].dtype == str(meta.dtype).removeprefix("torch."), (values[node].dtype, meta.dtype)
        check_inverse(values[node], env)
    buffers = [context.materialize(values[node]) for node in outputs]
    for op in operations:
        for buffer in op.reads():
            assert buffer in env, f"{type(op).__name__} reads a buffer that nothing has filled"
        evaluate(op, env)
    return [env[buffer] for buffer in buffers]


def check_inverse(value: Value, env: Environment) -> None:
    """Every claimed inverse is a bijection: the elements it names, over the whole buffer, are all of the value's, once each."""
    for buffer, inverse in value.inverse.items():
        frame = Frame(buffer.shape, env)
        place = linear(inverse(frame.index), contiguous_strides(value.shape))
        reached = frame.evaluate_index(place, None).expand(buffer.shape).flatten()
        assert torch.equal(reached.sort().values, torch.arange(math.prod(value.shape))), f"{inverse} is no bijection"
        own = linear(frame.index, contiguous_strides(buffer.shape))
        loads = [load for load in loads_of(value.at(inverse(frame.index))) if load.buffer is buffer]
        for load in loads:
            read = frame.evaluate_index(linear(load.index, contiguous_strides(buffer.shape)) - own, None)
            assert not read.any(), (
                f"{buffer.name} is read at {load.index} for the element that stands for {frame.index}"
            )
