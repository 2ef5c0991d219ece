"""Views, copies, joins, cuts and indexing."""

from __future__ import annotations

import math

import torch

from tests.random_programs.noise import ARITHMETIC, MOVE, SUM
from tests.random_programs.scope import Scope, Step, Value
from tests.random_programs.vocabulary.pointwise import is_integer


def _any(scope: Scope, rank: int = 1, most: int = 5) -> Value | None:
    return scope.pick(lambda v: rank <= v.rank <= most)


def view(scope: Scope) -> Step | None:
    a = _any(scope)
    return None if a is None else view_of(scope, a)


def view_of(scope: Scope, a: Value) -> Step:
    """A view of a value of one dimension or more (a copy, where `reshape` needs one)."""
    rank, draw = a.rank, scope.draw
    d, e = draw.integer(-rank, rank - 1), draw.integer(-rank, rank - 1)
    n = a.shape[d]
    start, stop = sorted((draw.integer(0, n), draw.integer(0, n)))
    order = sorted(range(rank), key=lambda _: draw.integer(0, 99))
    texts = [
        f"{a}.transpose({d}, {e})",
        f"{a}.permute({tuple(order)})",
        f"{a}.unsqueeze({d})",
        f"{a}.squeeze({d})",
        f"{a}.squeeze()",
        f"{a}.narrow({d}, {start}, {stop - start})",
        f"{a}[..., ::2]",
        f"{a}[1:]",
        f"{a}[:-1]" if rank else "",
        f"{a}[..., {draw.integer(0, max(0, a.shape[-1] - 1))}]",
        f"{a}.select({d}, {draw.integer(0, max(0, n - 1))})",
        f"{a}.flatten()",
        f"{a}.flatten({min(d % rank, e % rank)}, {max(d % rank, e % rank)})",
        f"{a}.diagonal(dim1={d}, dim2={e})",
        f"{a}.unsqueeze({d}).expand({_expansion(scope, a, d)})",
        f"{a}.mT" if rank >= 2 else "",
        f"{a}.reshape({_reshaped(scope, a)})",
        f"{a}.reshape({_reshaped(scope, a)})",
        f"{a}.unfold({d}, {max(1, min(3, n))}, {draw.integer(1, 2)})",
        f"{a}.view({a.shape[:-1]} + ({a.shape[-1]}, 1))",
        f"{a}.movedim({d}, {e})",
        f"{a}.t()" if rank == 2 else "",
        f"torch.atleast_3d({a})",
        f"{a}.unflatten({d}, {_factors(scope, n)})",
        f"{a}.chunk(2, {d})[-1]",
        f"{a}.split({max(1, n // 2)}, {d})[0]",
        f"{a}.swapaxes({d}, {e})",
        f"{a}.unsqueeze({d}).squeeze({e})",
        f"{a}.expand(1, *{a}.shape)",
        *_of_size_one(scope, a, d),
    ]
    return Step(draw.choose([text for text in texts if text]), MOVE)


def _of_size_one(scope: Scope, a: Value, d: int) -> list[str]:
    """Views with a dimension of size 1: its stride is what the cut or the expansion has left there."""
    n = a.shape[d]
    at = scope.draw.integer(0, max(0, n - 1))
    return [
        f"{a}.narrow({d}, {at}, 1)",
        f"{a}.select({d}, {at}).unsqueeze({d})",
        f"{a}[-1:]",
        f"{a}[..., :1]",
        f"{a}[..., ::{max(1, a.shape[-1])}]",
        f"{a}[None].transpose(0, {d})",
        f"{a}.unfold({d}, {n}, 1)",
        f"{a}[..., None].expand(*{a}.shape, 2)[..., 1:]",
    ]


def _expansion(scope: Scope, a: Value, d: int) -> tuple[int, ...]:
    shape = [-1] * (a.rank + 1)
    shape[d] = scope.draw.integer(1, 3)
    return tuple(shape)


def _factors(scope: Scope, n: int) -> tuple[int, int]:
    first = scope.draw.choose([k for k in range(1, n + 1) if n % k == 0] or [1])
    return first, n // first


def _reshaped(scope: Scope, a: Value) -> tuple[int, ...]:
    total = math.prod(a.shape)
    if not total:
        return tuple(reversed(a.shape))
    first = scope.draw.choose([k for k in range(1, total + 1) if total % k == 0])
    second = scope.draw.choose([k for k in range(1, total // first + 1) if (total // first) % k == 0])
    return scope.draw.choose(
        [(first, total // first), (second, first, total // first // second), (total,), (-1, first)]
    )


def formats(scope: Scope) -> Step | None:
    a = _any(scope, 4)
    return None if a is None else Step(scope.draw.choose(_in_format(scope, a)), MOVE)


def copy(scope: Scope) -> Step | None:
    a = _any(scope)
    if a is None:
        return None
    rank, draw = a.rank, scope.draw
    d, n = draw.integer(-rank, rank - 1), a.shape[draw.integer(-rank, rank - 1)]
    texts = [
        f"{a}.flip({d})",
        f"{a}.flip({tuple(range(rank))})",
        f"torch.roll({a}, {draw.integer(-3, 3)}, {d})",
        f"torch.roll({a}, {draw.integer(-3, 3)})",
        f"{a}.repeat({tuple(draw.integer(1, 2) for _ in range(rank + draw.integer(0, 1)))})",
        f"{a}.repeat_interleave(2, {d})",
        f"F.pad({a}, ({draw.integer(-1, 2)}, {draw.integer(0, 3)}), value={draw.choose(['0', '1'])})",
        f"{a}.tril({draw.integer(-1, 1)})" if rank >= 2 else "",
        f"{a}.triu({draw.integer(-1, 1)})" if rank >= 2 else "",
        f"torch.rot90({a})" if rank >= 2 else "",
        f"{a}.contiguous()",
        *_in_format(scope, a),
        f"torch.diag_embed({a})" if rank <= 2 else "",
        f"torch.tile({a}, (2,))",
        f"F.pad({a}, (1, 2), mode='reflect')" if rank in (2, 3) else "",
        f"F.pad({a}, (2, 1), mode='replicate')" if rank in (2, 3) else "",
        f"F.pad({a}, (1, 0), mode='circular')" if rank == 3 else "",
        f"F.pixel_shuffle({a}, 2)" if rank == 4 else "",
        f"F.pixel_unshuffle({a}, 2)" if rank == 4 else "",
        f"F.channel_shuffle({a}, {n})" if rank == 4 else "",
        f"torch.full_like({a}, 2) + {a}",
        f"torch.zeros_like({a})",
        f"{a} + torch.arange({a.shape[-1]})" if rank else "",
        f"{a}.new_ones({a.shape}).cumsum(0)",
    ]
    text = draw.choose([text for text in texts if text])
    return Step(text, ARITHMETIC if "+" in text or "cumsum" in text else MOVE)


def _in_format(scope: Scope, a: Value) -> list[str]:
    """Copies in a memory format."""
    memory_format = {4: "torch.channels_last", 5: "torch.channels_last_3d"}.get(a.rank)
    if memory_format is None:
        return [f"{a}.clone(memory_format=torch.preserve_format)"]
    texts = [
        f"{a}.contiguous(memory_format={memory_format})",
        f"{a}.to(memory_format={memory_format})",
        f"{a}.clone(memory_format={memory_format})",
        f"torch.zeros_like({a}, memory_format={memory_format})",
        f"{a}.to(memory_format=torch.contiguous_format)",
    ]
    return [scope.draw.choose(texts) for _ in range(3)]


def join(scope: Scope) -> Step | None:
    """cat and stack, of the same value as well."""
    a = _any(scope, most=4)
    if a is None:
        return None
    draw = scope.draw
    others = scope.values(lambda v: v.shape == a.shape and v.dtype.is_floating_point == a.dtype.is_floating_point)
    parts = [a, *(draw.choose(others) for _ in range(draw.integer(0, 3)))]
    if draw.chance(2):
        parts.append(scope.fresh(a.shape, a.dtype))
    names = ", ".join(map(str, parts))
    if draw.chance(3):
        return Step(f"torch.stack(({names},), {draw.integer(-a.rank - 1, a.rank)})", MOVE)
    return Step(f"torch.cat(({names},), {draw.integer(-a.rank, a.rank - 1)})", MOVE)


def cut(scope: Scope) -> Step | None:
    """Several views of one value."""
    a = scope.pick(lambda v: v.rank >= 1 and max(v.shape) > 1)
    if a is None:
        return None
    draw = scope.draw
    d = draw.choose([i for i, n in enumerate(a.shape) if n > 1])
    n = a.shape[d]
    if draw.chance(3) and n <= 5:
        return Step(f"torch.unbind({a}, {d})", MOVE, n)
    if draw.chance(2):
        size = draw.integer(math.ceil(n / 4), n)
        pieces = math.ceil(n / size)
        return Step(f"torch.split({a}, {size}, {d}){'[0]' if pieces == 1 else ''}", MOVE, pieces)
    at = draw.integer(0, n)
    return Step(f"torch.split({a}, [{at}, {n - at}], {d})", MOVE, 2)


def index(scope: Scope) -> Step | None:
    a = scope.pick(lambda v: v.rank >= 1 and 0 not in v.shape)
    if a is None:
        return None
    draw = scope.draw
    d = draw.integer(0, a.rank - 1)
    n = a.shape[d]
    found = scope.pick(lambda v: is_integer(v) and v.rank == 1 and v.dtype is torch.int64) if draw.chance(2) else None
    where = found or scope.fresh([draw.choose(scope.sizes)], torch.int64)
    ahead = ":, " * d
    row = f"{where}.abs() % {n}"
    texts = [
        f"torch.index_select({a}, {d}, {row})",
        f"{a}[{ahead}{row}]",
        f"{a}[{ahead}{where}.clamp({-n}, {n - 1})]",
        f"{a}[{ahead}({row})[:, None]]",
        f"torch.take({a}, {row})",
    ]
    if a.rank >= 2:
        texts += [
            f"{a}[{row}, {where} * 0 + {a.shape[1] - 1}]" if d == 0 else "",
            f"{a}[..., {where}.abs() % {a.shape[-1]}]",
        ]
    if a.rank == 2 and a.dtype.is_floating_point:
        texts += [f"F.embedding({where}.abs() % {a.shape[0]}, {a})"] * 2
        texts += [f"F.embedding_bag({where}.abs()[None] % {a.shape[0]}, {a}, mode='sum')"]
    return Step(draw.choose([text for text in texts if text]), SUM)


def gather(scope: Scope) -> Step | None:
    """gather, scatter, index_add and their like: the index has the shape of the value."""
    a = scope.pick(lambda v: v.rank >= 1 and 0 not in v.shape and v.dtype is not torch.bool)
    if a is None:
        return None
    draw = scope.draw
    d = draw.integer(0, a.rank - 1)
    n = a.shape[d]
    where = scope.pick(lambda v: v.dtype is torch.int64 and v.shape == a.shape) or scope.fresh(a.shape, torch.int64)
    index = f"{where}.abs() % {n}"
    rows = f"torch.arange({n}).flip(0)"
    texts = [
        f"torch.gather({a}, {d}, {index})",
        f"torch.take_along_dim({a}, {index}, {d})",
        f"torch.scatter_add({a}, {d}, {index}, {a})",
        f"torch.scatter_reduce({a}, {d}, {index}, {a}, 'amax')",
        f"torch.scatter({a}, {d}, {where} * 0, 1)",
        f"torch.index_add({a}, {d}, {rows}, {a})",
        f"torch.index_copy({a}, {d}, {rows}, {a})",
        f"torch.index_fill({a}, {d}, {rows}, 1)",
        f"torch.slice_scatter({a}, {a}.narrow({d}, 0, {max(1, n // 2)}) * 2, {d}, 0, {max(1, n // 2)})",
        f"torch.select_scatter({a}, {a}.select({d}, 0) + 1, {d}, {n - 1})",
        f"torch.index_put({a}, (torch.zeros(2, dtype=torch.int64),), {a}[0], accumulate=True)",
    ]
    return Step(draw.choose(texts), SUM)


TEMPLATES = ((view, 10), (formats, 1), (copy, 4), (join, 4), (cut, 3), (index, 3), (gather, 2))
