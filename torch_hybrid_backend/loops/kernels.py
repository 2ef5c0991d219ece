"""Kernels: fusion groups as plain data, ready for a printer.

A kernel is one anchor (nothing, a reduction, a matmul, a convolution, attention) with what is fused around it. Everything is spelled
out over the kernel's own loop variables, so a kernel can be pickled to a compiler process and has a canonical text for caches.

Loads in expressions name `Buffer` objects. Those in `reads` and `writes` are the kernel's arguments, by position; any other lives inside the
kernel only: an accumulator, the result of a row kernel's stage.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import TypeVar

from torch_hybrid_backend.loops.index import Index, LoopVar, is_wide, reach
from torch_hybrid_backend.loops.ir import Buffer, Expr, FromIndex, parts
from torch_hybrid_backend.loops.layout import Layout
from torch_hybrid_backend.sizes.size import MAX_SIZE, Dim, Size, Symbol, product, size_hint, symbols


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """A buffer that the kernel reads or writes, and its layout in memory."""

    buffer: Buffer
    layout: Layout

    @property
    def span(self) -> Dim:
        return self.layout.span(self.buffer.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """buffer[index] = value, rounded to the buffer's dtype; `index` and `value` are over the kernel's loop variables."""

    buffer: Buffer
    index: tuple[Index, ...]
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Base of all kernels: arguments in call order, `reads` before `writes`, and the loop variables of the domain."""

    reads: tuple[Argument, ...]
    writes: tuple[Argument, ...]
    domain: tuple[LoopVar, ...]  # one per dimension of the domain; extent 1 dimensions included
    # The number of the schedule's choice, in the order of its own estimates: 0 is the best.
    schedule_rank: int = field(default=0, kw_only=True)

    @property
    def kind(self) -> str:
        """The beginning of the kernel's name (`codegen.kernel_name`): that of its class in lower case, "map", "fused_conv"."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__.removesuffix("Kernel"))
        return words.lower().replace("mat_mul", "matmul")

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds of a convolution or matmul in one call, at typical sizes; 0 for other kernels."""
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class MapKernel(Kernel):
    """For every point of the domain: the stores."""

    stores: tuple[Store, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScatterKernel(Kernel):
    """For every point of the domain, in no order: `store`, combined with the value in its place (see `loops.ir.ScatterOp`)."""

    store: Store
    combiner: str


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A step of a row kernel.

    "map": local[point] = value (over the full domain: a row buffer); "scalar": local[kept] = value (once per row);
    "reduce": local[kept] = combine over the reduced axes of value; "scan": local[point] = combine of value over all that does not come after
    it along the one reduced axis (`loops.ir.ScanOp`); "store": `store` for every point of the domain;
    "store_scalar": `store` once per row.
    Later stages load what earlier ones wrote as `Load(local, index)` with `index` the domain's variables (map, scan) or its kept variables.
    """

    kind: str
    local: Buffer | None
    value: Expr
    combiner: str = ""
    store: Store | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowKernel(Kernel):
    """For every row (point of the kept axes): the stages in order, each over the row's elements (points of `axes`).

    Softmax, normalisations, sums: several reductions over the same axes of one domain, in one pass over memory per row.
    """

    axes: tuple[int, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MatMulKernel(Kernel):
    """Domain (b, m, n): accumulator[b, m, n] = sum over `k` of a * b, then the stores read `accumulator`.

    `a` is over (b, m, k), `b` over (b, k, n).
    """

    k: LoopVar
    a: Expr
    b: Expr
    accumulator: Buffer
    stores: tuple[Store, ...]

    @property
    def multiply_adds(self) -> float:
        return _points(self.domain) * size_hint(self.k.extent)


@dataclass(frozen=True, slots=True, eq=False)
class ConvKernel(Kernel):
    """Domain (n, o, *out_spatial): the accumulator, then the stores; see `loops.ir.ConvOp`.

    `x` is over (n, c, *in_spatial) given by `x_vars`, in range only: the printer handles padding. `w` is over (o, c / groups, *kernel) given
    by `w_vars`; (c, o / groups, *kernel) where the convolution is transposed.
    """

    x_vars: tuple[LoopVar, ...]
    x: Expr
    w_vars: tuple[LoopVar, ...]
    w: Expr
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    accumulator: Buffer
    stores: tuple[Store, ...]
    transposed: bool = field(default=False, kw_only=True)

    @property
    def multiply_adds(self) -> float:
        # Each element of the image meets every tap, or each of the result.
        points = self.x_vars if self.transposed else self.domain
        return _points(points) * _points(self.w_vars[1:])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionKernel(Kernel):
    """Domain (b, h, s, e): softmax(score) v, then the stores read `accumulator`.

    `score` is over `score_vars` and reads `product`, which lives in the kernel: q k^T * scale at that point. None: the score is the product.
    Causal: -inf where t > s. A row of -inf alone is 0, or NaN with `nan_rows`.
    """

    q: Expr
    q_vars: tuple[LoopVar, ...]  # (b, h, s, d)
    k: Expr
    k_vars: tuple[LoopVar, ...]  # (b, h, t, d)
    v: Expr
    v_vars: tuple[LoopVar, ...]  # (b, h, t, e)
    score: Expr | None
    score_vars: tuple[LoopVar, ...]  # (b, h, s, t)
    product: Buffer
    scale: float
    causal: bool
    accumulator: Buffer
    stores: tuple[Store, ...] = field(default=())
    nan_rows: bool = False

    @property
    def multiply_adds(self) -> float:
        return (
            _points(self.domain[:3])
            * size_hint(self.k_vars[2].extent)
            * (_points(self.q_vars[3:]) + _points(self.domain[3:]))
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SegmentKernel(Kernel):
    """Domain (g, *rest): `out`[point of the domain] = the sum of `value`, over (`point`, *rest), for points from `first` to before `end`, both
    over g; see `loops.ir.SegmentOp`."""

    out: Buffer
    point: LoopVar
    first: Expr
    end: Expr
    value: Expr


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecurrentKernel(Kernel):
    """Domain (s, b, j): see `loops.ir.RecurrentOp`. First `begin`, over (b, j), then step after step `stores`, over the domain.

    `stores` read `products`, one buffer for each gate, over (b, j), which live in the kernel: sums over k of `states`[s, b, k] times `weight`.
    """

    begin: tuple[Store, ...]
    states: Buffer
    weight: Buffer
    products: tuple[Buffer, ...]
    stores: tuple[Store, ...]

    @property
    def multiply_adds(self) -> float:
        return _points(self.domain) * size_hint(self.domain[2].extent) * len(self.products)


def _points(variables: tuple[LoopVar, ...]) -> float:
    return math.prod(float(size_hint(variable.extent)) for variable in variables)


KernelT = TypeVar("KernelT", bound=Kernel)


def as_kind(kernel: Kernel, kind: type[KernelT], **changed: object) -> KernelT:
    """The kernel as one of a subclass of its class: `changed` fields, and the kernel's own."""
    fields = {member.name: getattr(kernel, member.name) for member in dataclasses.fields(kernel)}
    return kind(**{**fields, **changed})


def kernel_sizes(kernel: Kernel) -> list[Symbol]:
    """The size symbols that a kernel depends on. They are arguments in this order, after the buffers."""
    found: dict[Symbol, None] = {}
    seen: set[object] = set()

    def visit(value: object) -> None:
        match value:
            case None | bool() | int() | float() | str() | LoopVar(_, int()):
                return
            case Size():
                found.update(dict.fromkeys(symbols([value])))
            case tuple() | list():
                for item in value:
                    visit(item)
            case Index():
                visit(value.const)
                for atom, coefficient in value.terms:
                    visit(coefficient)
                    visit(atom)
            case Buffer():
                visit(value.shape)
            case _ if dataclasses.is_dataclass(value) and value not in seen:
                seen.add(value)
                for member in dataclasses.fields(value):
                    visit(getattr(value, member.name))

    # What a kernel declares first: then the order does not depend on how its expressions were built.
    visit([variable.extent for variable in kernel.domain])
    visit([(argument.buffer.shape, argument.layout) for argument in (*kernel.reads, *kernel.writes)])
    visit(kernel)
    return list(found)


def counts_far(kernel: Kernel) -> bool:
    """True if a kernel has more points, or arguments of more elements, than 32 bits count; sizes that are no numbers do not count."""
    extents = (
        product(variable.extent for variable in kernel.domain),
        *(a.span for a in (*kernel.reads, *kernel.writes)),
    )
    return any(isinstance(extent, int) and extent > MAX_SIZE for extent in extents)


def kernel_counts(kernel: Kernel) -> tuple[Size, ...]:
    """Bounds, as sizes, of what a kernel counts or computes in 32 bits: its points, and indices used as numbers."""
    indices = (e.index for e in parts(expressions(kernel)) if isinstance(e, FromIndex) and not is_wide(e.index))
    counts = (product(variable.extent for variable in kernel.domain), *map(reach, indices))
    return tuple(count for count in counts if isinstance(count, Size))


def expressions(kernel: Kernel) -> list[Expr]:
    """Every expression that a kernel holds, in the order of its fields: operands, then stages or stores."""
    found: list[Expr] = []

    def visit(value: object) -> None:
        match value:
            case Expr():
                found.append(value)
            case tuple():
                for item in value:
                    visit(item)
            case Stage() | Store() | Kernel():
                for member in dataclasses.fields(value):
                    visit(getattr(value, member.name))

    visit(kernel)
    return found
