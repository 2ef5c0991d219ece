"""Idioms of networks for sequences: transformers, recurrent networks, state spaces, mixtures of experts, recommenders."""

from __future__ import annotations

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, REDUCTION, SMOOTH, STEP
from tests.random_programs.scope import Scope, Value
from tests.random_programs.vocabulary.parts import (
    activation,
    channel_norm,
    divisor,
    last_norm,
    linear,
    residual,
    weight,
)


def tokens(scope: Scope) -> Value:
    """A batch of sequences (batch, length, channels): one there is, or a new one; batch and length are often 1."""
    draw = scope.draw
    found = scope.pick(lambda v: v.dtype.is_floating_point and v.rank == 3 and 0 not in v.shape and max(v.shape) <= 40)
    if found is not None and not draw.chance(5):
        return found
    shape = [draw.choose([1, 1, 2, 3]), draw.choose([1, 2, 3, 5, 7, 9]), draw.choose([2, 4, 8, 16])]
    return scope.fresh(shape, draw.choose(scope.dtypes))


def _heads(scope: Scope, x: Value, heads: int, channels: int) -> Value:
    """(batch, heads, length, channels of a head)."""
    y = linear(scope, x, channels)
    texts = [
        f"{y}.view({x}.shape[0], -1, {heads}, {channels // heads}).transpose(1, 2)",
        f"{y}.reshape({x}.shape[0], {x}.shape[1], {heads}, {channels // heads}).permute(0, 2, 1, 3)",
        f"{y}.unflatten(-1, ({heads}, {channels // heads})).movedim(1, 2)",
    ]
    return scope.let(scope.draw.choose(texts), MOVE)


def _rotated(scope: Scope, x: Value) -> Value:
    """A rotary embedding of positions: halves, or neighbours, rotated."""
    length, channels = x.shape[-2:]
    if channels % 2:
        return x
    angles = scope.let(f"torch.outer(torch.arange({length}) / 1.0, 0.5 ** torch.arange({channels // 2}))", SMOOTH)
    if scope.draw.chance(2):
        even, odd = scope.let(f"{x}[..., ::2]", MOVE), scope.let(f"{x}[..., 1::2]", MOVE)
        cos, sin = scope.let(f"{angles}.cos()", SMOOTH), scope.let(f"{angles}.sin()", SMOOTH)
        turned = f"torch.stack(({even} * {cos} - {odd} * {sin}, {even} * {sin} + {odd} * {cos}), -1)"
        return scope.let(f"{turned}.flatten(-2).to({x}.dtype)", ARITHMETIC)
    both = scope.let(f"torch.cat(({angles}, {angles}), dim=-1)[None, None]", MOVE)
    half = scope.let(f"torch.cat((-{x}[..., {channels // 2}:], {x}[..., :{channels // 2}]), dim=-1)", MOVE)
    return scope.let(f"({x} * {both}.cos()) + ({half} * {both}.sin())", ARITHMETIC)


def _attended(scope: Scope, query: Value, key: Value, value: Value) -> Value:
    """Attention: PyTorch's operator with its masks, or written out."""
    rows, columns = query.shape[-2], key.shape[-2]
    form = scope.draw.integer(0, 5)
    call = f"F.scaled_dot_product_attention({query}, {key}, {value}"
    if form == 0:
        return scope.let(f"{call})", REDUCTION)
    if form == 1:
        return scope.let(f"{call}, is_causal=True)", REDUCTION)
    if form == 2:  # the diagonal stays open: nothing is masked out as a whole
        mask = scope.let(
            f"torch.ones({rows}, {columns}, dtype=torch.bool).tril({columns - rows if columns >= rows else 0})", STEP
        )
        mask = scope.let(f"{mask}[None, None].expand({query.shape[0]}, 1, {rows}, {columns})", MOVE)
        return scope.let(f"{call}, attn_mask={mask})", REDUCTION)
    if form == 3:
        bias = scope.fresh([1, scope.draw.choose([1, query.shape[1]]), rows, columns], query.dtype)
        return scope.let(f"{call}, attn_mask={bias}, scale=0.25)", REDUCTION)
    scores = scope.let(f"torch.matmul({query}, {key}.transpose(2, 3)) * {query.shape[-1] ** -0.5}", REDUCTION)
    if form == 4:
        future = f"torch.ones({rows}, {columns}, dtype=torch.bool).triu(1)"
        scores = scope.let(
            f"torch.softmax({scores}.masked_fill({future}, float('-inf')), dim=-1, dtype=float32)", REDUCTION
        )
        return scope.let(f"torch.matmul({scores}.to({value}.dtype), {value})", REDUCTION)
    return scope.let(f"torch.einsum('bhqk,bhkd->bhqd', {scores}.softmax(-1), {value})", REDUCTION)


def attention(scope: Scope) -> None:
    """A layer's attention, with rotated positions, with fewer heads for keys, and with itself or another sequence."""
    x = tokens(scope)
    size, heads = scope.draw.choose([2, 4]), scope.draw.choose([1, 2, 4])
    groups = divisor(scope, heads)
    y = last_norm(scope, x)
    other = y if not scope.draw.chance(4) else scope.fresh([x.shape[0], scope.draw.integer(1, 5), 4], x.dtype)
    query = _heads(scope, y, heads, heads * size)
    key, value = (_heads(scope, other, groups, groups * size) for _ in range(2))
    if scope.draw.chance(2):
        query, key = _rotated(scope, query), _rotated(scope, key)
    if groups != heads:
        shape = f"{x.shape[0]}, {groups}, {heads // groups}, {key.shape[2]}, {size}"
        key, value = (
            scope.let(
                f"{v}[:, :, None, :, :].expand({shape}).reshape({x.shape[0]}, {heads}, {v.shape[2]}, {size})", MOVE
            )
            for v in (key, value)
        )
    out = _attended(scope, query, key, value)
    out = scope.let(f"{out}.transpose(1, 2).contiguous().view({x}.shape[0], {x}.shape[1], -1)", MOVE)
    residual(scope, x, linear(scope, out, x.shape[2]))


def packed_attention(scope: Scope) -> None:
    """Query, key and value from one product, as libraries of vision transformers write it."""
    x = tokens(scope)
    batch, length, _ = x.shape
    heads, size = scope.draw.choose([1, 2, 3]), scope.draw.choose([1, 2, 4])
    packed = linear(scope, last_norm(scope, x), 3 * heads * size)
    packed = scope.let(f"{packed}.reshape({batch}, {length}, 3, {heads}, {size}).permute(2, 0, 3, 1, 4)", MOVE)
    query, key, value = scope.several(f"{packed}.unbind(0)", MOVE, 3)
    out = _attended(scope, query, key, value)
    out = linear(
        scope, scope.let(f"{out}.transpose(1, 2).reshape({batch}, {length}, {heads * size})", MOVE), x.shape[2]
    )
    residual(scope, x, scope.let(f"{out} * {weight(scope, [x.shape[2]], x.dtype)}", ARITHMETIC))


def relative_attention(scope: Scope) -> None:
    """A bias that depends on the distance, looked up in a table."""
    x = tokens(scope)
    length = x.shape[1]
    distance = scope.let(f"torch.arange({length})[None, :] - torch.arange({length})[:, None]", STEP)
    bucket = scope.let(
        f"torch.where({distance} > 0, 4, 0) + torch.minimum({distance}.abs(), torch.full_like({distance}, 3))", STEP
    )
    bias = scope.let(f"F.embedding({bucket}, {weight(scope, [8, 2], x.dtype)}).permute(2, 0, 1).unsqueeze(0)", MOVE)
    query, key, value = (_heads(scope, x, 2, 8) for _ in range(3))
    scores = scope.let(f"torch.matmul({query}, {key}.mT) + {bias}", REDUCTION)
    scope.let(f"(F.softmax({scores}, -1) @ {value}).transpose(1, 2).flatten(2)", REDUCTION)


def cached_attention(scope: Scope) -> None:
    """The next token's keys and values put into a cache, in place, and all so far attended to."""
    draw = scope.draw
    batch, heads, room, size = draw.choose([1, 2]), draw.choose([1, 2]), draw.choose([4, 6]), draw.choose([2, 4])
    dtype = draw.choose(scope.dtypes)
    at, new = draw.integer(0, room - 2), draw.choose([1, 1, 2])
    query = scope.fresh([batch, heads, new, size], dtype)
    caches = [scope.fresh([batch, heads, room, size], dtype, layout="contiguous") for _ in range(2)]
    fresh = [scope.fresh([batch, new, heads, size], dtype) for _ in range(2)]
    form = draw.integer(0, 2)
    for cache, made in zip(caches, fresh, strict=True):
        turned = f"{made}.transpose(1, 2)"
        texts = [
            f"{cache}[:, :, {at}:{at + new}] = {turned}",
            f"{cache}.index_copy_(2, torch.arange({at}, {at + new}), {turned})",
            f"{cache}.narrow(2, {at}, {new}).copy_({turned})",
        ]
        scope.several(texts[form], MOVE, 0)
    key, value = (scope.let(f"{cache}[:, :, :{at + new}]", MOVE) for cache in caches)
    _attended(scope, query, key, value)


def gated(scope: Scope) -> None:
    """A gated layer, its halves from two products or from one."""
    x = tokens(scope)
    width = scope.draw.choose([2, 4, 8])
    y = last_norm(scope, x)
    if scope.draw.chance(2):
        y = scope.let(f"F.silu({linear(scope, y, width)}) * {linear(scope, y, width)}", SMOOTH)
    else:
        value, gate = scope.several(f"{linear(scope, y, 2 * width)}.chunk(2, dim=-1)", MOVE, 2)
        y = scope.let(scope.draw.choose([f"{value} * F.gelu({gate})", f"F.silu({gate}) * {value}"]), SMOOTH)
    residual(scope, x, linear(scope, y, x.shape[2]))


def perceptron(scope: Scope) -> None:
    x = tokens(scope)
    residual(
        scope,
        x,
        linear(scope, activation(scope, linear(scope, last_norm(scope, x), scope.draw.choose([2, 8]))), x.shape[2]),
    )


def modulated(scope: Scope) -> None:
    """Six vectors from a condition shift, scale and gate the layers of a diffusion transformer."""
    x = tokens(scope)
    batch, _, channels = x.shape
    condition = scope.fresh([batch, 4], x.dtype)
    six = linear(scope, scope.let(f"F.silu({condition})", SMOOTH), 3 * channels)
    shift, scale, gate = scope.several(
        scope.draw.choose(
            [
                f"{six}.chunk(3, dim=1)",
                f"({six}.reshape({batch}, 3, -1) + {weight(scope, [1, 3, channels], x.dtype)}).unbind(1)",
            ]
        ),
        ARITHMETIC,
        3,
    )
    y = scope.let(
        f"F.layer_norm({x}, ({channels},), eps=1e-2) * (1 + {scale}[:, None]) + {shift}.unsqueeze(1)", REDUCTION
    )
    scope.let(f"{x} + {gate}.unsqueeze(1) * {linear(scope, y, channels)}", ARITHMETIC)


def embedded(scope: Scope) -> None:
    """Tokens and their positions looked up; positions counted from the mask."""
    draw = scope.draw
    batch, length, channels = draw.choose([1, 2]), draw.choose([1, 3, 6]), draw.choose([4, 8])
    dtype = draw.choose(scope.dtypes)
    ids = scope.let(f"{scope.fresh([batch, length], torch.int64)}.abs() % 7", STEP)
    padding = ", padding_idx=0" if draw.chance(2) else ""
    words = scope.let(f"F.embedding({ids}, {weight(scope, [7, channels], dtype)}{padding})", MOVE)
    mask = scope.let(f"{ids}.ne(1).int()", STEP)
    places = scope.let(f"(torch.cumsum({mask}, dim=1) * {mask}).long()", STEP)
    if draw.chance(2):
        places = scope.let(f"torch.arange({length}).unsqueeze(0).expand({batch}, -1)", STEP)
    where = scope.let(f"F.embedding({places}, {weight(scope, [length + 1, channels], dtype)})", MOVE)
    y = last_norm(scope, scope.let(f"{words} + {where}", ARITHMETIC))
    pooling = scope.let(f"{mask}[:, :, None].to({words}.dtype)", ARITHMETIC)
    if draw.chance(2):
        scope.let(f"({y} * {pooling}).sum(1) / {pooling}.sum(1).clamp(min=1)", REDUCTION)


def experts(scope: Scope) -> None:
    """Each token to the best of its experts, weighted by how good they are."""
    x = tokens(scope)
    batch, length, channels = x.shape
    count, chosen = scope.draw.choose([2, 4]), scope.draw.choose([1, 2])
    rows = batch * length
    flat = scope.let(f"{x}.reshape(-1, {channels})", MOVE)
    logits = scope.fresh([rows, count], x.dtype, layout="contiguous")
    # No two are equal: whose position wins would be anybody's choice.
    distinct = scope.let(f"{logits} + torch.arange({count}) * 0.03125", ARITHMETIC)
    if not distinct.exact:
        return
    values, places = scope.several(f"torch.topk({distinct}, {chosen}, dim=-1)", STEP, 2)
    shares = scope.let(f"F.softmax({values}, dim=-1)", REDUCTION)
    if scope.draw.chance(2):
        dense = scope.let(f"torch.zeros_like({distinct}).scatter(1, {places}, {shares})", MOVE)
    else:
        dense = scope.let(f"(F.one_hot({places}, {count}) * {shares}[..., None]).sum(1)", REDUCTION)
    banks = weight(scope, [count, channels, channels], x.dtype, channels)
    form = scope.draw.integer(0, 2)
    if form == 0:
        out = scope.let(f"torch.einsum('nc,ecd,ne->nd', {flat}, {banks}, {dense})", REDUCTION)
    elif form == 1:
        every = scope.let(f"torch.bmm({flat}.expand({count}, {rows}, {channels}), {banks})", REDUCTION)
        out = scope.let(f"({every} * {dense}.t().unsqueeze(-1)).sum(0)", REDUCTION)
    else:
        out = scope.let(f"torch.zeros_like({flat})", MOVE)
        for expert in range(count):
            scope.several(f"{out}.add_(({flat} @ {banks}[{expert}]) * {dense}[:, {expert}, None])", REDUCTION, 0)
    residual(scope, x, scope.let(f"{out}.view({batch}, {length}, {channels})", MOVE))


def recurrent(scope: Scope) -> None:
    """Steps of an LSTM or a GRU, written out or by PyTorch's cells, their states stacked."""
    x = tokens(scope)
    batch, length, channels = x.shape
    width, gates = scope.draw.choose([1, 2, 4]), scope.draw.choose([3, 4])
    first, second = (
        weight(scope, [gates * width, channels], x.dtype, channels),
        weight(scope, [gates * width, width], x.dtype, width),
    )
    bias = weight(scope, [gates * width], x.dtype)
    hidden = scope.let(f"{x}.new_zeros({batch}, {width})", MOVE)
    cell = scope.let(f"torch.zeros_like({hidden})", MOVE)
    written_out = not scope.draw.chance(3)
    states = []
    for step in range(min(length, 3)):
        now = scope.let(f"{x}[:, {step}]", MOVE)
        if gates == 4 and written_out:
            sums = scope.let(f"F.linear({now}, {first}, {bias}) + F.linear({hidden}, {second})", REDUCTION)
            i, f, g, o = scope.several(f"{sums}.chunk(4, 1)", MOVE, 4)
            cell = scope.let(f"torch.sigmoid({f}) * {cell} + torch.sigmoid({i}) * torch.tanh({g})", SMOOTH)
            hidden = scope.let(f"torch.sigmoid({o}) * torch.tanh({cell})", SMOOTH)
        elif gates == 4:
            hidden, cell = scope.several(
                f"torch.lstm_cell({now}, ({hidden}, {cell}), {first}, {second}, {bias}, {bias})", REDUCTION, 2
            )
        elif written_out:
            r, z, n = scope.several(f"F.linear({now}, {first}, {bias}).chunk(3, -1)", REDUCTION, 3)
            hr, hz, hn = scope.several(f"F.linear({hidden}, {second}).split({width}, -1)", REDUCTION, 3)
            update = scope.let(f"torch.sigmoid({z} + {hz})", SMOOTH)
            new = scope.let(f"torch.tanh({n} + torch.sigmoid({r} + {hr}) * {hn})", SMOOTH)
            hidden = scope.let(f"(1 - {update}) * {new} + {update} * {hidden}", ARITHMETIC)
        else:
            hidden = scope.let(f"torch.gru_cell({now}, {hidden}, {first}, {second}, {bias}, {bias})", REDUCTION)
        states.append(f"{hidden}")
    scope.let(f"torch.stack(({', '.join(states)},), dim=1)", MOVE)


def state_space(scope: Scope) -> None:
    """A causal convolution by channel, and a scan over time whose steps depend on the input."""
    x = tokens(scope)
    batch, length, channels = x.shape
    y = scope.let(f"{x}.transpose(1, 2)", MOVE)
    filters = weight(scope, [channels, 1, 3], x.dtype, 3)
    y = scope.let(f"F.silu(F.conv1d({y}, {filters}, None, padding=2, groups={channels})[..., :{length}])", REDUCTION)
    delta = scope.let(f"F.softplus({linear(scope, scope.let(f'{y}.mT', MOVE), channels)})", SMOOTH)
    decay = scope.let(f"torch.exp(-{delta}.unsqueeze(-1) * torch.arange(1, 3))", SMOOTH)
    state = scope.let(f"{x}.new_zeros({batch}, {channels}, 2)", MOVE)
    outputs = []
    for step in range(min(length, 3)):
        state = scope.let(f"{decay}[:, {step}] * {state} + {y}[:, :, {step}, None]", ARITHMETIC)
        outputs.append(scope.let(f"{state}.sum(-1)", REDUCTION).name)
    scope.let(f"torch.stack(({', '.join(outputs)},), dim=-1)", MOVE)


def speech(scope: Scope) -> None:
    """Convolutions over time with a norm of the channels, and the result as tokens."""
    x = tokens(scope)
    channels = x.shape[2]
    y = scope.let(f"{x}.transpose(1, 2)", MOVE)
    width = scope.draw.choose([2, 4])
    filters = weight(scope, [width, channels, 3], x.dtype, 3 * channels)
    if scope.draw.chance(3):  # the norm of the weights taken apart from their direction
        filters = scope.let(
            f"{weight(scope, [width, 1, 1], x.dtype)} * {filters} / ({filters}.norm(dim=(1, 2), keepdim=True) + 0.5)",
            REDUCTION,
        )
    y = scope.let(f"F.conv1d({y}, {filters}, None, {scope.draw.integer(1, 2)}, 1)", REDUCTION)
    y = activation(scope, channel_norm(scope, y))
    if scope.draw.chance(2):
        scope.let(f"F.glu(torch.cat(({y}, {y}), 1), dim=1).transpose(1, 2)", SMOOTH)
    else:
        last_norm(scope, scope.let(f"{y}.transpose(1, 2)", MOVE))


def fields(scope: Scope) -> None:
    """A recommender's bags of embeddings, and how they go together."""
    draw = scope.draw
    dtype = draw.choose([d for d in scope.dtypes if d in (torch.float32, torch.float64)] or [torch.float32])
    rows, size = draw.choose([1, 2, 4]), draw.choose([2, 4, 8])
    parts = []
    for _ in range(draw.integer(2, 3)):
        table = weight(scope, [9, size], dtype)
        length = draw.choose([1, 3])
        ids = scope.let(f"{scope.fresh([rows * length], torch.int64)}.abs() % 9", STEP)
        mode = draw.choose(["sum", "mean", "max"])
        offsets = f"torch.arange({rows}) * {length}"
        texts = [
            f"F.embedding_bag({ids}, {table}, {offsets}, mode='{mode}')",
            f"F.embedding_bag({ids}.view({rows}, {length}), {table}, mode='{mode}')",
            f"F.embedding({ids}.view({rows}, {length}), {table}).sum(1)",
            f"F.embedding_bag({ids}, {table}, {offsets}, mode='sum', per_sample_weights={scope.fresh([rows * length], dtype)})",
        ]
        parts.append(scope.let(draw.choose(texts), REDUCTION))
    names = ", ".join(map(str, parts))
    stacked = scope.let(f"torch.stack(({names},), dim=1)", MOVE)
    form = draw.integer(0, 2)
    if form == 0:
        products = scope.let(f"torch.bmm({stacked}, {stacked}.transpose(1, 2))", REDUCTION)
        lower = f"torch.tril_indices({len(parts)}, {len(parts)}, -1)"
        scope.let(f"torch.cat(({parts[0]}, {products}[:, {lower}[0], {lower}[1]]), dim=1)", MOVE)
    elif form == 1:
        scope.let(f"0.5 * ({stacked}.sum(1).pow(2) - {stacked}.pow(2).sum(1)).sum(1, keepdim=True)", REDUCTION)
    else:
        flat = scope.let(f"{stacked}.flatten(1)", MOVE)
        crossed = linear(scope, flat, 1, bias=False)
        scope.let(f"{flat} * {crossed} + {weight(scope, [flat.shape[1]], dtype)} + {flat}", ARITHMETIC)


def losses(scope: Scope) -> None:
    """Cross entropy by hand over a sequence, what is padded left out."""
    x = tokens(scope)
    labels = scope.let(f"{scope.fresh(x.shape[:2], torch.int64)} % {x.shape[2]}", STEP)
    likely = scope.let(f"F.log_softmax({x}, dim=-1).gather(-1, {labels}.unsqueeze(-1)).squeeze(-1)", REDUCTION)
    kept = scope.let(f"{labels} != 0", STEP)
    scope.let(f"-({likely} * {kept}).sum() / {kept}.sum().clamp(min=1)", REDUCTION)


TEMPLATES = (
    (attention, 5),
    (packed_attention, 3),
    (relative_attention, 1),
    (cached_attention, 2),
    (gated, 2),
    (perceptron, 2),
    (modulated, 2),
    (embedded, 2),
    (experts, 2),
    (recurrent, 3),
    (state_space, 2),
    (speech, 2),
    (fields, 2),
    (losses, 1),
)
