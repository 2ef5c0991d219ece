"""Fusion: loop operations -> groups, each of which becomes one kernel.

A group has a domain (its loop variables) and members: operations re-expressed over those variables. One test decides whether an operation
may join. Its expression is written over the group's variables: every element that it reads of a member's result must be exactly the element
that the group holds at that point. So a group is correct by construction.

Kinds: "map" (elementwise), "row" (reductions over the same axes of one domain and what is computed per row from them: softmax,
normalisations), "matmul", "conv", "attention" (an anchor and its epilogue), "scatter", "segment" and "recurrent" (one
operation, which nothing joins).

Order: a group runs where its last member stood. It is closed to further members as soon as an operation outside reads one of its
results, so nothing ever moves past its own readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_hybrid_backend.loops.graph import LoopGraph
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of, reshape_index
from torch_hybrid_backend.loops.ir import (
    INDEX_DTYPE,
    AttentionGradientOp,
    AttentionOp,
    Buffer,
    Call,
    ConvOp,
    Expr,
    FromIndex,
    Load,
    LoopOp,
    MapOp,
    MatMulOp,
    RecurrentOp,
    ReduceOp,
    ScanOp,
    ScatterOp,
    SegmentOp,
    compute_dtype,
    depth,
    indices,
    loads_of,
    parts,
    post_order,
    rounded,
)
from torch_hybrid_backend.loops.policy import FusionPolicy
from torch_hybrid_backend.sizes.size import Dim, product, size_hint

_ANCHORS = (
    (MatMulOp, "matmul"),
    (ConvOp, "conv"),
    ((AttentionOp, AttentionGradientOp), "attention"),
)


@dataclass(slots=True, eq=False)
class Member:
    """An operation inside a group. `index`: the element of `op.out` at the domain point; `expr`: its value, over the domain.

    `role`: "full" and "scan" (one value per point), "scalar" and "reduce" (one per row). `depth`: of the expression (`loops.ir.depth`) after
    other members' expressions are inlined in it, as in the kernel.
    """

    op: LoopOp
    index: tuple[Index, ...]
    expr: Expr
    role: str
    reads: tuple[Buffer, ...]
    depth: int = 0

    @property
    def is_full(self) -> bool:
        """True if the member has a value at every point of the domain."""
        return self.role in ("full", "scan")


@dataclass(slots=True, eq=False)
class Group:
    """Operations that become one kernel."""

    kind: str
    shape: tuple[Dim, ...]
    variables: tuple[LoopVar, ...]
    axes: tuple[int, ...] = ()
    members: list[Member] = field(default_factory=list)
    position: int = 0
    closed: bool = False
    accumulator: Buffer | None = None
    besides: tuple[Buffer, ...] = ()  # further results of the anchor, which no member reads

    @property
    def point(self) -> tuple[Index, ...]:
        """The domain's variables as an index."""
        return tuple(map(index_of, self.variables))

    @property
    def kept_point(self) -> tuple[Index, ...]:
        return tuple(i for d, i in enumerate(self.point) if d not in self.axes)

    @property
    def kept_shape(self) -> tuple[Dim, ...]:
        return tuple(n for d, n in enumerate(self.shape) if d not in self.axes)

    def member_of(self, buffer: Buffer) -> Member | None:
        """The member that fills a buffer."""
        return next((m for m in self.members if m.op.out is buffer), None)

    def reads(self) -> list[Buffer]:
        """Buffers read from outside."""
        own = {m.op.out for m in self.members}
        found: dict[Buffer, None] = {}
        for member in self.members:
            for buffer in member.reads:
                if buffer not in own:
                    found[buffer] = None
        return list(found)


def fuse(graph: LoopGraph, policy: FusionPolicy) -> list[Group]:
    """Groups in execution order; together they perform every operation of the graph exactly once."""
    groups: list[Group] = []
    producer: dict[Buffer, Group] = {}
    readers: dict[Buffer, list[Group]] = {}
    for position, op in enumerate(graph.ops):
        reads = op.reads()
        group = _join(op, reads, producer, readers, policy)
        if group is None:
            group = _new_group(op, reads)
            groups.append(group)
        elif isinstance(group, tuple):  # a map group was rebuilt as a row group
            old, group = group
            groups[groups.index(old)] = group
            for member in group.members:
                producer[member.op.out] = group
            for known in readers.values():
                known[:] = [group if g is old else g for g in known]
        group.position = position
        producer.update(dict.fromkeys(op.outs, group))
        for buffer in reads:
            if (source := producer.get(buffer)) is not None and source is not group:
                source.closed = True
            readers.setdefault(buffer, []).append(group)
    return sorted(groups, key=lambda g: g.position)


def _new_group(op: LoopOp, reads: Sequence[Buffer]) -> Group:
    shape = op.domain if isinstance(op, ReduceOp | ScatterOp) else op.out.shape
    variables = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
    match op:
        case ReduceOp():
            group = Group("row", shape, variables, op.axes)
            group.members.append(Member(op, group.kept_point, op.body(group.point), "reduce", tuple(reads)))
        case ScanOp():
            group = Group("row", shape, variables, (op.axis,))
            group.members.append(Member(op, group.point, op.body(group.point), "scan", tuple(reads)))
        case MapOp():
            group = Group("map", shape, variables)
            value = op.value.at(group.point)
            group.members.append(Member(op, group.point, value, "full", tuple(reads), depth(value)))
        case ScatterOp():
            group = Group("scatter", shape, variables, closed=True)
            group.members.append(Member(op, op.place(group.point), op.body(group.point), "full", tuple(reads)))
        case SegmentOp():
            group = Group("segment", shape, variables, closed=True)
            group.members.append(Member(op, group.point, FromIndex(INDEX_DTYPE, as_index(0)), "full", tuple(reads)))
        case RecurrentOp():
            shape = (shape[0] - 1, *shape[1:])
            variables = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
            group = Group("recurrent", shape, variables, closed=True, besides=op.outs[1:])
            group.members.append(Member(op, group.point, FromIndex(INDEX_DTYPE, as_index(0)), "full", tuple(reads)))
        case _:
            kind = next(kind for anchor, kind in _ANCHORS if isinstance(op, anchor))
            group = Group(kind, shape, variables, besides=op.outs[1:])
            group.accumulator = Buffer(shape, compute_dtype(op.out.dtype), "accumulator")
            group.members.append(Member(op, group.point, group.accumulator.at(group.point), "full", tuple(reads)))
    return group


def _join(
    op: LoopOp,
    reads: Sequence[Buffer],
    producer: dict[Buffer, Group],
    readers: dict[Buffer, list[Group]],
    policy: FusionPolicy,
) -> Group | tuple[Group, Group] | None:
    """The group that took `op`, (old, new) where a group had to be rebuilt, or None."""
    if not isinstance(op, (MapOp, ReduceOp, ScanOp)):
        return None
    vertical = {g: None for b in reads if (g := producer.get(b)) is not None}
    candidates = sorted(vertical, key=lambda g: -g.position)
    # Siblings: groups that read the same tensor over the same domain.
    for buffer in reads:
        for group in readers.get(buffer, ()):
            if group not in vertical and group.kind in ("map", "row") and group not in candidates:
                candidates.append(group)
    for group in candidates:
        if group.closed or len(group.members) >= policy.max_members:
            continue
        if _outside_reads(group, reads) > policy.max_reads:
            continue
        if isinstance(op, ReduceOp):
            if (joined := _join_rows(group, op, op.domain, op.axes, reads, policy)) is not None:
                return joined
        elif isinstance(op, ScanOp):
            if (joined := _join_rows(group, op, op.out.shape, (op.axis,), reads, policy)) is not None:
                return joined
        elif (member := _express(group, op, reads, policy)) is not None:
            group.members.append(member)
            return group
    return None


def _outside_reads(group: Group, reads: Sequence[Buffer]) -> int:
    own = {m.op.out for m in group.members}
    return len(set(group.reads()) | set(reads) - own)


def _join_rows(
    group: Group,
    op: ReduceOp | ScanOp,
    domain: tuple[Dim, ...],
    axes: tuple[int, ...],
    reads: Sequence[Buffer],
    policy: FusionPolicy,
) -> Group | tuple[Group, Group] | None:
    """A reduction or a scan along `axes` of `domain` in a group."""

    def joins(rows: Group) -> bool:
        expr = op.body(rows.point)
        if not _consistent(rows, expr):
            return False
        index, role = (rows.point, "scan") if isinstance(op, ScanOp) else (rows.kept_point, "reduce")
        rows.members.append(Member(op, index, expr, role, tuple(reads)))
        return True

    if group.kind == "row" and group.shape == domain and group.axes == axes:
        return group if joins(group) else None
    if group.kind != "map" or product(group.shape) != product(domain):
        return None
    # The elementwise group becomes the prologue of a row group over the reduction's domain.
    rebuilt = Group("row", domain, tuple(LoopVar(f"i{d}", n) for d, n in enumerate(domain)), axes)
    if not _worth_rows(rebuilt, policy):
        return None
    for member in group.members:
        assert isinstance(member.op, MapOp)
        moved = _express(rebuilt, member.op, member.reads, policy)
        if moved is None or moved.role != "full":
            return None
        rebuilt.members.append(moved)
    return (group, rebuilt) if joins(rebuilt) else None


def _worth_rows(group: Group, policy: FusionPolicy) -> bool:
    rows, elements = size_hint(product(group.kept_shape)), size_hint(product(group.shape))
    return rows >= policy.min_rows or elements <= policy.small_elements


def _express(group: Group, op: MapOp, reads: Sequence[Buffer], policy: FusionPolicy) -> Member | None:
    """`op` over the group's variables, or None where it does not fit."""
    numel = product(op.out.shape)
    full, rows = product(group.shape), product(group.kept_shape)
    if numel not in (full, rows) or (group.kind != "row" and numel != full):
        return None
    role = "full" if numel == full else "scalar"
    if role == "full" and group.kind == "row" and not _worth_rows(group, policy):
        return None
    for index in _own_indices(group, op, role):
        expr = op.value.at(index)
        if _consistent(group, expr):
            deep = _depth(group, expr)
            return Member(op, index, expr, role, tuple(reads), deep) if deep <= policy.max_depth else None
    return None


def _depth(group: Group, expr: Expr) -> int:
    """The depth of an expression in the group's kernel. Members of a row group are stages, whose results are not computed again."""
    if group.kind == "row":
        return depth(expr)
    depths = {member.op.out: member.depth for member in group.members}
    return depth(expr, lambda load: depths.get(load.buffer, 0))


def _own_indices(group: Group, op: MapOp, role: str) -> list[tuple[Index, ...]]:
    """Ways of running through `op`'s elements along with the group's domain, each a bijection."""
    point, shape = (group.point, group.shape) if role == "full" else (group.kept_point, group.kept_shape)
    found: list[tuple[Index, ...]] = []
    inverse = op.value.inverse
    for member in group.members:
        if member.op.out in inverse and member.is_full == (role == "full"):
            found.append(inverse[member.op.out](member.index))
    found.append(point if op.out.shape == shape else reshape_index(point, op.out.shape, shape))
    return found


def _consistent(group: Group, expr: Expr) -> bool:
    """True if every element of a member that `expr` reads is the one the group holds at the current point.

    A member's result used inside an index (an embedding's row number) does not qualify: indices are read from memory.
    """
    at = [FromIndex(INDEX_DTYPE, index) for part in parts([expr]) for index in indices(part)]
    in_indices = set(parts(at, within_indices=True))
    for load in loads_of(expr):
        member = group.member_of(load.buffer)
        if member is not None and (load.index != member.index or load in in_indices):
            return False
        if load.buffer in group.besides:
            return False
    return True


def replace_loads(expr: Expr, replacement: Callable[[Load], Expr | None]) -> Expr:
    """The expression with some loads replaced; shared parts stay shared. Loads inside indices are kept."""
    done: dict[Expr, Expr] = {}
    for e in post_order(expr):
        match e:
            case Load():
                done[e] = replacement(e) or e
            case Call():
                done[e] = e.with_args(done[a] for a in e.args)
            case _:
                done[e] = e
    return done[expr]


def inlined(group: Group) -> dict[Buffer, Expr]:
    """For map and anchor groups: each member's value with the other members' values substituted, by the buffer it is stored in.

    A substituted value is rounded to the buffer's dtype: so it is the same as the one that is read from memory.
    """
    values: dict[Buffer, Expr] = {}
    held: dict[Buffer, Expr] = {}
    for member in group.members:
        out = member.op.out
        values[out] = replace_loads(member.expr, lambda load: held.get(load.buffer))
        held[out] = rounded(values[out], out.dtype)
    return values


def needed_outside(groups: Sequence[Group], outputs: Sequence[Buffer]) -> set[Buffer]:
    """The buffers that must exist in memory: read by another group, or outputs of the region."""
    needed = set(outputs)
    for group in groups:
        needed.update(group.reads())
    return needed
