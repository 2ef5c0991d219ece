"""Idioms of networks over graphs: messages along edges, their sums, means and largest at each node, and pooling of whole graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, REDUCTION, SMOOTH, STEP, SUM
from tests.random_programs.scope import Scope, Value
from tests.random_programs.vocabulary.parts import activation, divisor, last_norm, linear, weight


def nodes(scope: Scope) -> Value:
    """The features of nodes (nodes, channels): a value there is, or a new one."""
    draw = scope.draw
    found = scope.pick(
        lambda v: v.dtype in (torch.float32, torch.float64) and v.rank == 2 and 0 not in v.shape and max(v.shape) <= 40
    )
    if found is not None and not draw.chance(5):
        return found
    dtype = draw.choose([d for d in scope.dtypes if d in (torch.float32, torch.float64)] or [torch.float32])
    return scope.fresh([draw.choose([1, 3, 6, 10]), draw.choose([1, 2, 4, 8])], dtype)


@dataclass(frozen=True)
class Edges:
    source: Value
    target: Value
    count: int


def edges(scope: Scope, x: Value) -> Edges:
    """Edges between the nodes, drawn at random; some nodes have none."""
    count = scope.draw.choose([1, 4, 9, 17])
    pairs = scope.let(f"{scope.fresh([2, count], torch.int64, layout='contiguous')}.abs() % {x.shape[0]}", STEP)
    if scope.draw.chance(3):  # every node to itself as well
        loops = f"torch.arange({x.shape[0]}).expand(2, -1)"
        pairs = scope.let(f"torch.cat(({pairs}, {loops}), dim=1)", MOVE)
    source, target = (
        scope.several(f"{pairs}.unbind(0)", MOVE, 2)
        if scope.draw.chance(2)
        else (scope.let(f"{pairs}[{row}]", MOVE) for row in range(2))
    )
    return Edges(source, target, pairs.shape[1])


def _along(index: Value, like: Value) -> str:
    """The index with the messages' shape."""
    return f"{index}.view({', '.join(['-1', *['1'] * (like.rank - 1)])}).expand_as({like})"


def _summed(scope: Scope, messages: Value, index: Value, rows: int) -> Value:
    shape = f"({rows}, {', '.join(map(str, messages.shape[1:]))})" if messages.rank > 1 else f"({rows},)"
    room = f"{messages}.new_zeros({shape})"
    texts = [
        f"{room}.scatter_add_(0, {_along(index, messages)}, {messages})",
        f"torch.scatter_add({room}, 0, {_along(index, messages)}, {messages})",
        f"{room}.index_add_(0, {index}, {messages})",
        f"torch.index_add({room}, 0, {index}, {messages})",
        f"{room}.index_put(({index},), {messages}, accumulate=True)",
        f"{room}.scatter_reduce_(0, {_along(index, messages)}, {messages}, 'sum')",
    ]
    return scope.let(scope.draw.choose(texts), SUM)


def _reduced(scope: Scope, messages: Value, index: Value, rows: int) -> Value:
    """Sum, mean, largest or smallest at each node; 0 where there is none."""
    how = scope.draw.choose(["sum", "sum", "mean", "amax", "amin"])
    if how == "sum":
        return _summed(scope, messages, index, rows)
    shape = f"({rows}, {', '.join(map(str, messages.shape[1:]))})" if messages.rank > 1 else f"({rows},)"
    if how == "mean" and scope.draw.chance(2):
        count = scope.let(
            f"{messages}.new_zeros({rows}).scatter_add_(0, {index}, {messages}.new_ones({messages.shape[0]}))", SUM
        )
        ones = ", ".join(["-1", *["1"] * (messages.rank - 1)])
        return scope.let(f"{_summed(scope, messages, index, rows)} / {count}.clamp(min=1).view({ones})", REDUCTION)
    text = f"{messages}.new_zeros({shape}).scatter_reduce(0, {_along(index, messages)}, {messages}, '{how}', include_self=False)"
    return scope.let(text, REDUCTION if how == "mean" else MOVE)


def _at(scope: Scope, x: Value, index: Value) -> Value:
    return scope.let(
        scope.draw.choose([f"{x}.index_select(0, {index})", f"{x}[{index}]", f"torch.index_select({x}, 0, {index})"]),
        MOVE,
    )


def normalised(scope: Scope) -> None:
    """A graph convolution: messages weighted by the degrees of both ends."""
    x = nodes(scope)
    e, count = edges(scope, x), x.shape[0]
    degree = scope.let(f"{x}.new_zeros({count}).scatter_add_(0, {e.target}, {x}.new_ones({e.count}))", SUM)
    inverse = scope.let(f"{degree}.pow(-0.5).masked_fill({degree} == 0, 0)", SMOOTH)
    factor = scope.let(f"{inverse}[{e.source}] * {inverse}[{e.target}]", ARITHMETIC)
    y = linear(scope, x, scope.draw.choose([1, 4, 8]), bias=False)
    messages = scope.let(f"{factor}.view(-1, 1) * {_at(scope, y, e.source)}", ARITHMETIC)
    y = scope.let(f"{_summed(scope, messages, e.target, count)} + {weight(scope, [y.shape[1]], x.dtype)}", ARITHMETIC)
    activation(scope, y)


def neighbours(scope: Scope) -> None:
    """Reduce what the neighbours say, beside what the node has itself."""
    x = nodes(scope)
    e = edges(scope, x)
    y = _reduced(scope, _at(scope, x, e.source), e.target, x.shape[0])
    width = scope.draw.choose([2, 4])
    y = scope.let(f"{linear(scope, y, width)} + {linear(scope, x, width, bias=False)}", ARITHMETIC)
    if scope.draw.chance(2):
        scope.let(f"F.normalize({y}, p=2.0, dim=-1, eps=0.5)", REDUCTION)


def attentive(scope: Scope) -> None:
    """Softmax over the neighbours of each node, by scatters, with heads."""
    x = nodes(scope)
    e, count = edges(scope, x), x.shape[0]
    heads, size = scope.draw.choose([1, 2]), scope.draw.choose([1, 4])
    y = scope.let(f"{linear(scope, x, heads * size)}.view(-1, {heads}, {size})", MOVE)
    ends = [scope.let(f"({y} * {weight(scope, [1, heads, size], x.dtype, size)}).sum(-1)", REDUCTION) for _ in range(2)]
    scores = scope.let(
        f"F.leaky_relu({_at(scope, ends[0], e.source)} + {_at(scope, ends[1], e.target)}, 0.2)", ARITHMETIC
    )
    largest = scope.let(
        f"{scores}.detach().new_zeros({count}, {heads}).scatter_reduce(0, {_along(e.target, scores)}, {scores}, 'amax', include_self=False)",
        MOVE,
    )
    powers = scope.let(f"({scores} - {largest}.index_select(0, {e.target})).exp()", SMOOTH)
    total = scope.let(f"{_summed(scope, powers, e.target, count)}.index_select(0, {e.target}) + 1e-16", ARITHMETIC)
    shares = scope.let(f"{powers} / {total}", SMOOTH)
    messages = scope.let(f"{_at(scope, y, e.source)} * {shares}.unsqueeze(-1)", ARITHMETIC)
    y = _summed(scope, messages, e.target, count)
    scope.let(scope.draw.choose([f"{y}.view(-1, {heads * size})", f"{y}.mean(dim=1)"]), REDUCTION)


def isomorphic(scope: Scope) -> None:
    """The sum of the neighbours and a multiple of oneself, through two layers."""
    x = nodes(scope)
    e = edges(scope, x)
    y = _summed(scope, _at(scope, x, e.source), e.target, x.shape[0])
    y = linear(scope, scope.let(f"{y} + (1 + 0.25) * {x}", ARITHMETIC), scope.draw.choose([2, 4]))
    if x.shape[0] > 1 and scope.draw.chance(2):
        y = scope.let(
            f"F.batch_norm({y}, None, None, {weight(scope, [y.shape[1]], x.dtype)}, None, True, 0.1, 1e-2)", REDUCTION
        )
    linear(scope, activation(scope, y), scope.draw.choose([1, 4]))


def along_edges(scope: Scope) -> None:
    """Messages made from both ends and from how they differ."""
    x = nodes(scope)
    e = edges(scope, x)
    here, there = _at(scope, x, e.target), _at(scope, x, e.source)
    y = scope.let(f"torch.cat(({here}, {there} - {here}), dim=-1)", ARITHMETIC)
    y = activation(scope, linear(scope, y, scope.draw.choose([2, 4])))
    _reduced(scope, y, e.target, x.shape[0])


def whole_graphs(scope: Scope) -> None:
    """Nodes reduced to their graphs: which graph a node belongs to is sorted."""
    x = nodes(scope)
    graphs = scope.draw.integer(1, 3)
    belongs = scope.let(f"torch.sort({scope.fresh([x.shape[0]], torch.int64)}.abs() % {graphs})[0]", STEP)
    y = _reduced(scope, x, belongs, graphs)
    if scope.draw.chance(2):
        y = last_norm(scope, y)
    if scope.draw.chance(2):
        scope.let(f"{x} - {y}[{belongs}]", ARITHMETIC)


def best_nodes(scope: Scope) -> None:
    """The nodes of the highest scores, in their order, gated by the score."""
    x = nodes(scope)
    score = scope.fresh([x.shape[0]], x.dtype, layout="contiguous")
    kept = scope.draw.integer(1, x.shape[0])
    form = scope.draw.integer(0, 2)
    order = [
        f"{score}.argsort(descending=True, stable=True)[:{kept}]",
        f"torch.sort({score}, descending=True, stable=True)[1].narrow(0, 0, {kept})",
        f"torch.topk({score} + torch.arange({x.shape[0]}) * 0.0078125, {kept})[1]",
    ][form]
    chosen = scope.let(order, STEP)
    y = scope.let(f"{x}[{chosen}] * torch.tanh({score}[{chosen}]).view(-1, 1)", SMOOTH)
    scope.let(
        scope.draw.choose(
            [f"torch.zeros_like({x}).index_copy(0, {chosen}, {y})", f"torch.cat(({y}.amax(0), {y}.mean(0)))"]
        ),
        REDUCTION,
    )


def sorted_runs(scope: Scope) -> None:
    """Number what is equal, without a result whose size depends on the values; places found in what is sorted."""
    n = scope.draw.choose([1, 5, 12])
    keys = scope.let(f"{scope.fresh([n], torch.int64)}.abs() % 5", STEP)
    ordered, back = scope.several(f"torch.sort({keys}, stable=True)", STEP, 2)
    starts = scope.let(f"torch.cat(({ordered}.new_ones(1, dtype=torch.bool), {ordered}[1:] != {ordered}[:-1]))", STEP)
    runs = scope.let(f"{starts}.cumsum(0) - 1", STEP)
    labels = scope.let(f"torch.zeros_like({runs}).scatter_(0, {back}, {runs})", STEP)
    forms = [
        f"torch.searchsorted({ordered}, torch.arange(6), right={scope.draw.chance(2)})",
        f"torch.bucketize({keys}, torch.tensor([1, 2, 4]))",
        f"torch.zeros(5, dtype=torch.int64).scatter_add(0, {labels}, torch.ones_like({keys}))",
        f"F.one_hot({labels}, {n}).sum(0).cumsum(0)",
        f"(torch.arange({n}) - torch.searchsorted({ordered}, {ordered}))[{back}.argsort()]",
    ]
    scope.let(scope.draw.choose(forms), STEP)


def dense_batch(scope: Scope) -> None:
    """Nodes put where their graph has room for them, masked, attended to, and taken out again."""
    x = nodes(scope)
    count, channels = x.shape
    graphs = divisor(scope, count)
    places = scope.let(f"{scope.fresh([count], torch.int64)}.argsort(stable=True)", STEP)
    dense = scope.let(f"{x}.new_zeros({count}, {channels}).index_put(({places},), {x})", MOVE)
    dense = scope.let(f"{dense}.view({graphs}, {count // graphs}, {channels})", MOVE)
    mask = scope.let(
        f"({places} % 3 != 0).view({graphs}, {count // graphs}) | (torch.arange({count // graphs}) == 0)", STEP
    )
    scores = scope.let(
        f"({dense} @ {dense}.mT * 0.125).masked_fill(~{mask}[:, None], float('-inf')).softmax(-1)", REDUCTION
    )
    y = scope.let(f"torch.where({mask}.unsqueeze(-1), {scores} @ {dense}, 0.0)", REDUCTION)
    scope.let(f"{y}.reshape(-1, {channels})[{places}]", MOVE)


TEMPLATES = (
    (normalised, 3),
    (neighbours, 3),
    (attentive, 3),
    (isomorphic, 2),
    (along_edges, 2),
    (whole_graphs, 2),
    (best_nodes, 2),
    (sorted_runs, 2),
    (dense_batch, 1),
)
