"""The scalar language: expressions, lazily described tensors (values) and the loop operations that fill buffers.

    Expr   = Const(value) | Load(buffer, index) | FromIndex(index) | Call(op, args)
    Value  = Buffer                       a tensor that exists in memory
           | Map(shape, dtype, fn)        fn(index) -> Expr, computed where it is read (inlined) or realised by a MapOp
    LoopOp = MapOp | ReduceOp | ScanOp | ScatterOp | MatMulOp | ConvOp | AttentionOp | RecurrentOp | SegmentOp
                                          each fills one buffer; attention and recurrent layers some fill several

Scalars are computed in the *compute dtype* of a tensor's dtype: float32 for floats of 16 and 8 bits, the dtype itself otherwise. Loads widen,
stores narrow. A value of a narrow float holds numbers of that dtype whether or not it has memory (`rounded`): every operator of eager's ends
with a rounding, and nothing inside an operator rounds (`docs/adr/0069-half-types-round-where-operators-end.md`).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch_hybrid_backend.loops.index import Index, LoopVar, Scalar, as_index, var
from torch_hybrid_backend.sizes.size import Dim

INDEX_DTYPE = "int64"


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_NARROW_FLOATS = frozenset(("bfloat16", "float16", *FLOAT8))


def compute_dtype(dtype: str) -> str:
    """The dtype in which scalars of a tensor's dtype are computed."""
    return "float32" if dtype in _NARROW_FLOATS else dtype


@dataclass(frozen=True, slots=True, eq=False)
class Expr:
    """A scalar. Expressions are shared, not copied: compare by identity, print with `canonical`."""

    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class Const(Expr):
    """A literal, including infinities and NaN."""

    value: bool | int | float


@dataclass(frozen=True, slots=True, eq=False)
class Load(Expr):
    """An element of a buffer, widened to its compute dtype; `index` is logical, whatever the buffer's layout."""

    buffer: Buffer
    index: tuple[Index, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FromIndex(Expr):
    """An index as an int64 scalar."""

    index: Index


@dataclass(frozen=True, slots=True, eq=False)
class Call(Expr):
    """A scalar operation of `loops.ops.OPS` applied to scalars."""

    op: str
    args: tuple[Expr, ...]

    def with_args(self, args: Iterable[Expr]) -> Call:
        """The operation with other arguments; `self` if the arguments are the same, so that shared parts stay shared."""
        changed = tuple(args)
        same = all(a is b for a, b in zip(changed, self.args, strict=True))
        return self if same else Call(self.dtype, self.op, changed)


# The narrow floats, by their number in a `round`.
ROUND_TARGETS = ("bfloat16", "float16", *FLOAT8)
# Operations whose result is one of a narrow float's numbers where all operands are.
_CHOOSING = frozenset("max min neg abs sign floor ceil trunc round_even".split())


def rounded(e: Expr, dtype: str) -> Expr:
    """A scalar rounded to `dtype`, kept in the compute dtype; the scalar itself if rounding changes nothing."""
    if dtype not in _NARROW_FLOATS or is_rounded(e, dtype):
        return e
    if isinstance(e, Const) and dtype not in FLOAT8:
        return Const(e.dtype, nearest(float(e.value), dtype))
    return Call("float32", "round", (e, Const(INDEX_DTYPE, ROUND_TARGETS.index(dtype))))


def is_rounded(e: Expr, dtype: str) -> bool:
    """True if a float32 scalar is known to be one of the numbers of the narrow float `dtype`."""
    stack, seen = [e], set[Expr]()
    while stack:
        match part := stack.pop():
            case _ if part in seen:
                continue
            case Load(buffer=buffer) if buffer.dtype == dtype:
                pass
            case Const(value=value) if value == 0 or (dtype not in FLOAT8 and nearest(float(value), dtype) == value):
                pass
            case Call(op="round", args=(_, Const(value=target))) if ROUND_TARGETS[int(target)] == dtype:
                pass
            case Call(op="cast", args=(x,)) if x.dtype == "bool" or (
                x.dtype in ("int8", "uint8") and dtype not in FLOAT8
            ):
                pass
            case Call(op="guard" | "where", args=(_, *chosen)):
                stack.extend(chosen)
            case Call(op=op, args=args) if op in _CHOOSING:
                stack.extend(args)
            case _:
                return False
        seen.add(part)
    return True


def unrounded(e: Expr, dtype: str) -> Expr:
    """The expression without its last rounding, which a store to a buffer of `dtype` does anyway."""
    match e:
        case Call(op="round", args=(x, Const(value=target))) if ROUND_TARGETS[int(target)] == dtype:
            return x
    return e


def nearest(value: float, dtype: str) -> float:
    """The number of bfloat16 or float16 that is nearest to one of float32, ties to even; of other dtypes the number itself."""
    if dtype not in ("bfloat16", "float16") or not math.isfinite(value):
        return value
    try:
        if dtype == "float16":
            return float(struct.unpack("e", struct.pack("e", value))[0])
        (bits,) = struct.unpack("I", struct.pack("f", value))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("f", struct.pack("I", bits))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


# index -> scalar
ScalarFn = Callable[[tuple[Index, ...]], Expr]
# index of a buffer's element -> index of the one element of a value computed from it
InverseFn = Callable[[tuple[Index, ...]], tuple[Index, ...]]


@dataclass(slots=True, eq=False)
class Value:
    """A tensor described by shape and dtype. `at` gives the scalar at a logical index."""

    shape: tuple[Dim, ...]
    dtype: str

    def at(self, index: tuple[Index, ...]) -> Expr:
        raise TypeError(f"{type(self).__name__} has no elements of its own; realise it first")

    @property
    def inverse(self) -> Mapping[Buffer, InverseFn]:
        """Maps from a buffer's indices to this value's, for buffers of which this value reads each element for exactly one of its own.

        Such a value can be an epilogue of the operation that fills the buffer.
        """
        return {}


_buffer_numbers = itertools.count()


class _Realizations:
    """Number of values that were given memory so far. Expressions that were made earlier may not read that memory."""

    count = 0


_realizations = _Realizations()


@dataclass(slots=True, eq=False)
class Buffer(Value):
    """A tensor in memory. `constant`: it holds parameters or folded values. `name` is for people. `by_value`: a number on the host, which
    kernels of another device get as an argument."""

    name: str = ""
    constant: bool = False
    by_value: bool = False
    number: int = field(default_factory=lambda: next(_buffer_numbers))

    def at(self, index: tuple[Index, ...]) -> Expr:
        return Load(compute_dtype(self.dtype), self, index)

    @property
    def inverse(self) -> Mapping[Buffer, InverseFn]:
        return {self: lambda index: index}


@dataclass(slots=True, eq=False)
class Map(Value):
    """A value computed element by element. `fn` returns scalars of the compute dtype of `dtype`; `at` gives them rounded to `dtype`.

    `parents`: values of which each element is read for exactly one element of this value, with maps from their indices to this value's.
    `base`: the value that this one is a view of, which at most clamps a constant's integers; a view never gets memory of its own.
    `realized`: once set, the buffer that all readers of this value read, views of it included.
    """

    fn: ScalarFn
    parents: tuple[tuple[Value, InverseFn], ...] = ()
    base: Value | None = None
    realized: Buffer | None = None
    # Set where the value is another one with zeros around it: (that value, how many zeros lie before it in each dimension).
    zero_padded: tuple[Value, tuple[int, ...]] | None = None
    _last: tuple[tuple[Index, ...], Expr, int] | None = None

    def at(self, index: tuple[Index, ...]) -> Expr:
        if self.realized is not None:
            return self.realized.at(index)
        # `x * x` reads x twice: without this memo an expression would grow exponentially along a chain of such operators.
        # Not past a realisation: what an operation reads and what its kernel loads must be one and the same.
        count = _realizations.count
        if self._last is None or self._last[2] != count or self._last[0] != index:
            self._last = (index, rounded(self.fn(index), self.dtype), count)
        return self._last[1]

    def realize(self, buffer: Buffer) -> None:
        """Have readers of this value read `buffer` from now on."""
        self.realized = buffer
        _realizations.count += 1

    @property
    def inverse(self) -> Mapping[Buffer, InverseFn]:
        # Each value is visited once: the paths from here to a shared ancestor double with every level.
        found: dict[Buffer, InverseFn] = {}
        seen: set[Value] = set()
        stack: list[tuple[Value, InverseFn]] = [(self, lambda index: index)]
        while stack:
            value, to_self = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if isinstance(value, Map) and value.realized is None:
                stack.extend((parent, _compose(to_self, to_value)) for parent, to_value in reversed(value.parents))
            else:
                own = value.realized if isinstance(value, Map) else value
                if isinstance(own, Buffer):
                    found.setdefault(own, to_self)
        return found


def _compose(outer: InverseFn, inner: InverseFn) -> InverseFn:
    return lambda index: outer(inner(index))


@dataclass(frozen=True, slots=True, eq=False)
class LoopOp:
    """An operation that fills the buffer `out`."""

    out: Buffer

    @property
    def outs(self) -> tuple[Buffer, ...]:
        """Every buffer that the operation fills, `out` first."""
        return (self.out,)

    def reads(self) -> list[Buffer]:
        """The buffers that the operation reads, in first-use order."""
        raise TypeError(f"{type(self).__name__} does not say what it reads")


@dataclass(frozen=True, slots=True, eq=False)
class MapOp(LoopOp):
    """out[i] = value[i], rounded to the buffer's dtype."""

    value: Value

    def reads(self) -> list[Buffer]:
        return buffers_of(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class ReduceOp(LoopOp):
    """out[kept] = combine over the axes `axes` of domain `domain` of body(full index).

    `out.shape` is `domain` without `axes`. `combiner`: "sum", "prod", "max", "min" (both NaN-propagating), "any", "all",
    "argmax", "argmin" (position in the row-major order of the reduced axes, the first of equals, NaN first; int64).
    Accumulates in the body's dtype (float64 stays float64; bfloat16 and float16 in float32).
    """

    domain: tuple[Dim, ...]
    axes: tuple[int, ...]
    combiner: str
    body: ScalarFn

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.domain)) if d not in self.axes)

    def reads(self) -> list[Buffer]:
        return buffers_of(Map(self.domain, self.out.dtype, self.body))


@dataclass(frozen=True, slots=True, eq=False)
class ScanOp(LoopOp):
    """out[i] = combine over all points that do not come after i along `axis` of body(point). `out.shape` is the domain.

    `combiner`: "sum", "prod", "max", "min" (both NaN-propagating), "argmax", "argmin" (position along the axis, the last of equals, NaN before
    all; int64), "logaddexp". Accumulates in the body's dtype. Only where the kernels can (`loops.policy.Abilities`).
    """

    axis: int
    combiner: str
    body: ScalarFn

    def reads(self) -> list[Buffer]:
        return buffers_of(Map(self.out.shape, self.out.dtype, self.body))


@dataclass(frozen=True, slots=True, eq=False)
class ScatterOp(LoopOp):
    """out = base; then for every point of `domain`, in no order: out[place(point)] = combine(out[place(point)], body(point)).

    `combiner`: "sum", "max", "min" (both NaN-propagating), or "write", where of several writes to one element any may stay.
    `place` gives an index inside `out`. Engines say in `loops.policy.Abilities` which of these they take.
    """

    base: Value
    domain: tuple[Dim, ...]
    place: InverseFn
    body: ScalarFn
    combiner: str

    def reads(self) -> list[Buffer]:
        point = domain_vars(self.domain)
        places = [FromIndex(INDEX_DTYPE, index) for index in self.place(point)]
        return _unique([*buffers_of(self.base), *(b for e in (*places, self.body(point)) for b in buffers_of_expr(e))])


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedOperand:
    """A constant right operand of a product, (1, K, N), as integers: (integers - zero_points) * scales, or table[integers].

    `integers`: of 8 bits, between `bounds`. `scales` and `zero_points`: one for `group` neighbours along k, (1, K / group, N), or one number
    for all. `table`: a codebook, float32; scales are then 1 and zero points 0.
    """

    integers: Value
    bounds: tuple[int, int]
    scales: Value | float
    zero_points: Value | float
    group: int
    table: Buffer | None = None

    @property
    def bits(self) -> int:
        """The number of bits, 8 or 4, that hold an integer."""
        return 4 if self.bounds[1] - self.bounds[0] < 16 else 8


@dataclass(frozen=True, slots=True, eq=False)
class MatMulOp(LoopOp):
    """out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n]. `a` is (B, M, K), `b` is (B, K, N) or (1, K, N).

    `a_bits`: the number of bits that elements of `a` may be rounded to (`core.precision.ROW_BITS`); 32: they are not. `quantized`: `b` as
    integers, if it is constant and quantized and kernels multiply integers (`loops.quantized.quantized_operand`).
    """

    a: Value
    b: Value
    a_bits: int = field(default=32, kw_only=True)
    quantized: QuantizedOperand | None = field(default=None, kw_only=True)

    def reads(self) -> list[Buffer]:
        return _unique(buffers_of(self.a) + buffers_of(self.b))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerMatMulOp(MatMulOp):
    """out[b, m, n] = sum over k of (a[b, m, k] - zero(b, m)) * b[b, k, n], exactly: operands of 8 bits, `out` int32, `zero` int32 or int64.

    `zero` None is 0. int32 holds the sums of a * b. `out` is float64 if a zero point may be so large that int32 does not hold the result.
    """

    zero: ScalarFn | None = None

    def reads(self) -> list[Buffer]:
        own = MatMulOp.reads(self)
        return (
            own if self.zero is None else _unique([*own, *buffers_of_expr(self.zero(domain_vars(self.out.shape[:2])))])
        )


@dataclass(frozen=True, slots=True, eq=False)
class ConvOp(LoopOp):
    """A 1-D, 2-D or 3-D cross-correlation with zero padding, no bias (the epilogue adds it).

    `padding` counts the zeros before the first element; how many lie after the last follows from the output's size.
    x is (N, C, *spatial), w is (O, C/groups, *kernel), out is (N, O, *out_spatial); the tuples have one entry per spatial dimension.

    `transposed`: the gradient of a convolution by its image, as `torch.nn.ConvTranspose2d` computes it. Along each spatial dimension
    out[p] = sum over k of w[k] * x[(p + padding - k * dilation) / stride], over the k for which that is a whole number and inside x. w is
    (C, O/groups, *kernel). Transposed and 3-D convolutions only where the kernels can (`loops.policy.Abilities`).
    """

    x: Value
    w: Value
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = field(default=False, kw_only=True)

    def reads(self) -> list[Buffer]:
        return _unique(buffers_of(self.x) + buffers_of(self.w))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerConvOp(ConvOp):
    """The convolution of x - `zero` with w, exactly: operands of 8 bits, `out` int32. Zeros lie around x - `zero`, not around x."""

    zero: int = 0


# a segment's number -> (its first point, the point behind its last), int64
BoundsFn = Callable[[Index], tuple[Expr, Expr]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SegmentOp(LoopOp):
    """out[g, *rest] = the sum over the points i of segment g of body((i, *rest)); 0 for a segment without points.

    Segment g has the points from `bounds(g)[0]` to before `bounds(g)[1]`, numbers in 0 .. points; data may decide them. Accumulates in
    the body's dtype, in the order of points. Only where the kernels can (`loops.policy.Abilities`).
    """

    points: Dim
    bounds: BoundsFn
    body: ScalarFn

    def reads(self) -> list[Buffer]:
        segment, *rest = domain_vars(self.out.shape)
        made = (*self.bounds(segment), self.body((var("point", self.points), *rest)))
        return _unique([b for e in made for b in buffers_of_expr(e)])


# (products, (s, b, j), state, cell) -> (new state, new cell): of one unit of a recurrent layer; the cell is None where there is none.
CellFn = Callable[[tuple[Expr, ...], tuple[Index, ...], Expr, "Expr | None"], tuple[Expr, "Expr | None"]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecurrentOp(LoopOp):
    """Steps of one direction of a recurrent layer, one after the other. out (T + 1, B, H): row 0 is `state`, row s + 1 the state behind step s.

    In step s each unit j gets `gates` products with the state before: of gate g, the sum over k of out[s, b, k] * weight[g * H + j, k].
    `unit` makes the new state of them, and the new cell, (B, H), if there is a `cell`; the last one is in `last_cell`. `weight` is
    (gates * H, H), or the buffer that an engine packed it into. Only where the kernels can (`loops.policy.Abilities`).
    """

    gates: int
    weight: Value
    state: Value
    unit: CellFn
    cell: Value | None = None
    last_cell: Buffer | None = None

    @property
    def outs(self) -> tuple[Buffer, ...]:
        return (self.out,) if self.last_cell is None else (self.out, self.last_cell)

    def reads(self) -> list[Buffer]:
        steps, batch, units = self.out.shape
        products = tuple(Buffer((batch, units), self.out.dtype, "product") for _ in range(self.gates))
        point = domain_vars((steps - 1, batch, units))
        cell = None if self.last_cell is None else self.last_cell.at(point[1:])
        made = self.unit(tuple(p.at(point[1:]) for p in products), point, self.out.at(point), cell)
        begun = [self.state] if self.cell is None else [self.state, self.cell]
        read = [b for e in made if e is not None for b in buffers_of_expr(e)]
        read += [b for value in (*begun, self.weight) for b in buffers_of(value)]
        return [b for b in _unique(read) if b not in (*products, *self.outs)]


# (q . k, (*lead, s, t)) -> the score at that point, like the `score_mod` of FlexAttention
ScoreFn = Callable[[Expr, tuple[Index, ...]], Expr]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionOp(LoopOp):
    """Scaled dot-product attention (SDPA): out = softmax(score(q @ k^T)) @ v, with any number of leading dimensions, which all operands have.

    q is (*lead, S, D), k (*lead, T, D), v (*lead, T, E), out (*lead, S, E). `score` turns each product into a score: it scales, masks, caps.
    `attention_scores.SdpaScore` is the score of PyTorch's operators; kernels that have arguments for its parts read them from there.

    A row that sees nothing (scores of -inf alone) is 0, or NaN with `nan_rows`, as a softmax that is written out has it.

    `log_sum_exp`: a buffer (*lead, S) for the natural logarithm of each row's sum of exponentials; a row that sees nothing has `empty` there.
    Only where the kernels can (`Abilities.attention_gradients`).
    """

    q: Value
    k: Value
    v: Value
    score: ScoreFn
    nan_rows: bool = False
    log_sum_exp: Buffer | None = None
    empty: float = 0.0

    @property
    def outs(self) -> tuple[Buffer, ...]:
        return (self.out,) if self.log_sum_exp is None else (self.out, self.log_sum_exp)

    def reads(self) -> list[Buffer]:
        own = [b for value in (self.q, self.k, self.v) for b in buffers_of(value)]
        return _unique([*own, *score_reads(self.score, self.q, self.k)])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionGradientOp(LoopOp):
    """Operands of `AttentionQueryGradientOp` and `AttentionKeyGradientOp`.

    With weights = exp(score(q @ k^T) - log_sum_exp): d = scale * weights * (grad @ v^T - delta). q is (B, H, S, D), k (B, H, T, D),
    v (B, H, T, E), grad (B, H, S, E); log_sum_exp and delta (B, H, S), delta the sums of grad * output along E. `scale` is the derivative
    of a score by its product. A row that sees nothing has a log-sum-exp of +inf, or scores of -inf alone and a finite log-sum-exp.

    Source: Dao, "FlashAttention-2", 2023.
    """

    q: Value
    k: Value
    v: Value
    grad: Value
    log_sum_exp: Value
    delta: Value
    score: ScoreFn
    scale: float

    def reads(self) -> list[Buffer]:
        values = (self.q, self.k, self.v, self.grad, self.log_sum_exp, self.delta)
        own = [b for value in values for b in buffers_of(value)]
        return _unique([*own, *score_reads(self.score, self.q, self.k)])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionQueryGradientOp(AttentionGradientOp):
    """out = d @ k, (B, H, S, D)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionKeyGradientOp(AttentionGradientOp):
    """out = d^T @ q, (B, G, T, D), and `value` = weights^T @ grad, (B, G, T, E): sums over the H / G query heads that share a key head."""

    value: Buffer

    @property
    def outs(self) -> tuple[Buffer, ...]:
        return self.out, self.value


def score_over(score: ScoreFn, product: Buffer, index: tuple[Index, ...]) -> Expr:
    """The score at a point, of the element of the buffer `product` there."""
    return score(product.at(index), index)


def score_reads(score: ScoreFn, q: Value, k: Value) -> list[Buffer]:
    """The buffers that scores read, such as a mask."""
    shape = (*q.shape[:-1], k.shape[-2])
    product = Buffer(shape, compute_dtype(q.dtype), "product")
    return [b for b in buffers_of_expr(score_over(score, product, domain_vars(shape))) if b is not product]


def _unique(buffers: list[Buffer]) -> list[Buffer]:
    return list(dict.fromkeys(buffers))


def domain_vars(shape: tuple[Dim, ...], prefix: str = "i") -> tuple[Index, ...]:
    """Loop variables, one for each dimension."""
    return tuple(var(f"{prefix}{d}", size) for d, size in enumerate(shape))


def buffers_of(value: Value) -> list[Buffer]:
    """The buffers a value reads, in first-use order."""
    if isinstance(value, Buffer):
        return [value]
    return buffers_of_expr(value.at(domain_vars(value.shape)))


def parts(exprs: Iterable[Expr], *, within_indices: bool = False) -> Iterator[Expr]:
    """Every distinct part of expressions in first-use order, the expressions themselves included."""
    stack, seen = [*exprs][::-1], set[Expr]()
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        yield e
        if isinstance(e, Call):
            stack.extend(reversed(e.args))
        elif within_indices:
            for index in indices(e):
                stack.extend(_scalars(index))


def post_order(expr: Expr) -> Iterator[Expr]:
    """Every distinct part of an expression, each after its arguments; the expression itself is the last."""
    done: set[Expr] = set()
    stack = [expr]
    while stack:
        e = stack[-1]
        waiting = [a for a in e.args if a not in done] if isinstance(e, Call) else []
        if waiting:
            stack.extend(reversed(waiting))
            continue
        stack.pop()
        if e not in done:
            done.add(e)
            yield e


def depth(expr: Expr, behind: Callable[[Load], int] = lambda _: 0) -> int:
    """Number of scalar operations on the longest path to an expression; `behind`: how many lie behind a load."""
    depths: dict[Expr, int] = {}
    for e in post_order(expr):
        match e:
            case Call():
                depths[e] = 1 + max((depths[a] for a in e.args), default=0)
            case Load():
                depths[e] = behind(e)
            case _:
                depths[e] = 0
    return depths[expr]


def indices(expr: Expr) -> tuple[Index, ...]:
    """The indices at which one part of an expression loads, or with which it computes."""
    match expr:
        case Load():
            return expr.index
        case FromIndex():
            return (expr.index,)
    return ()


def loads_of(expr: Expr) -> list[Load]:
    """Every distinct load of an expression, those inside indices included."""
    return [e for e in parts([expr], within_indices=True) if isinstance(e, Load)]


def _scalars(index: Index) -> list[Expr]:
    found: list[Expr] = []
    for atom, _ in index.terms:
        if isinstance(atom, Scalar):
            found.append(atom.expr)
        elif not isinstance(atom, LoopVar):
            found.extend(_scalars(atom.numerator))
    return found


def buffers_of_expr(expr: Expr) -> list[Buffer]:
    """The buffers an expression loads from."""
    return _unique([load.buffer for load in loads_of(expr)])


def count_calls(expr: Expr) -> int:
    """Distinct scalar operations in an expression, casts not counted."""
    return sum(isinstance(e, Call) and e.op not in ("cast", "round") for e in parts([expr]))


def canonical(expr: Expr, buffer_names: Mapping[Buffer, str]) -> str:
    """A text that is equal for two expressions that compute the same thing from the same-named buffers."""
    lines: list[str] = []
    names: dict[Expr, str] = {}

    def show(e: Expr) -> str:
        if e in names:
            return names[e]
        match e:
            case Const():
                text = f"{e.value!r}:{e.dtype}"
            case Load():
                text = f"{buffer_names[e.buffer]}[{', '.join(show_index(i) for i in e.index)}]"
            case FromIndex():
                text = f"index({show_index(e.index)})"
            case Call():
                text = f"{e.op}({', '.join(show(a) for a in e.args)}):{e.dtype}"
            case _:
                raise TypeError(f"not an expression of the loops language: {e!r}")
        lines.append(text)
        names[e] = f"%{len(lines) - 1}"
        return names[e]

    def show_index(index: Index) -> str:
        parts = []
        for atom, coefficient in index.terms:
            match atom:
                case LoopVar():
                    text = atom.name
                case Scalar():
                    text = f"<{show(atom.expr)}>"
                case _:
                    mark = "//" if type(atom).__name__ == "FloorDiv" else "%"
                    text = f"({show_index(atom.numerator)}{mark}{atom.divisor})"
            parts.append(f"{coefficient}*{text}")
        return "+".join([*sorted(parts), str(index.const)])

    result = show(expr)
    return ";".join([*lines, result])


def scalar_index(expr: Expr, low: int, high: Dim) -> Index:
    """A scalar read from a tensor as an index with values in `low .. high`."""
    if isinstance(expr, Const):
        return as_index(int(expr.value))
    if isinstance(expr, FromIndex):
        return expr.index
    return Index(((Scalar(expr, low, high), 1),), 0)
