"""Caches with a new position, recognised by what a scalar computes."""

from __future__ import annotations

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.cache_updates import cache_update, is_cache_update
from torch_hybrid_backend.loops.index import Index, LoopVar, as_index, index_of
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, Map

CACHE = Buffer((1, 2, 8, 4), "float32", "cache")
NEW = Buffer((1, 2, 1, 4), "float32", "new")
AT = Buffer((1,), "int64", "at")


def updated(b: Index, h: Index, t: Index, d: Index) -> Expr:
    is_new = ops.call("eq", AT.at((as_index(0),)), ops.from_index(t))
    return ops.where(is_new, NEW.at((b, h, as_index(0), d)), CACHE.at((b, h, t, d)))


def test_a_position_is_recognised() -> None:
    """A new position is recognised: where it is, and of which cache; also where heads are read twice."""
    b, h, t, d = (LoopVar(name, size) for name, size in zip("bhtd", (1, 4, 8, 4), strict=True))
    found = cache_update(updated(index_of(b), index_of(h) // 2, index_of(t), index_of(d)), t)
    assert found is not None
    assert found.cache.buffer is CACHE
    assert isinstance(found.new, Load)
    assert isinstance(found.position, Load)
    assert (found.new.buffer, found.position.buffer) == (NEW, AT)
    assert found.new.index == (index_of(b), index_of(h) // 2, as_index(0), index_of(d))
    assert is_cache_update(Map((1, 2, 8, 4), "float32", lambda i: updated(*i)))


def test_what_is_none() -> None:
    """A plain cache, a position of another dimension or a moved one, what is new and computed or depends on the position, other dtypes."""
    half = Buffer((1, 2, 8, 4), "bfloat16", "half")

    def elsewhere(i: tuple[Index, ...], at: Index, new: Expr, cache: Buffer = CACHE) -> Expr:
        return ops.where(ops.call("eq", AT.at((as_index(0),)), ops.from_index(at)), new, cache.at(i))

    def fresh(i: tuple[Index, ...]) -> Expr:
        return NEW.at((i[0], i[1], as_index(0), i[3]))

    others = [
        CACHE.at,
        lambda i: updated(i[0], i[1], i[2] + 1, i[3]),
        lambda i: elsewhere(i, i[3], fresh(i)),
        lambda i: elsewhere(i, i[2], CACHE.at(i)),
        lambda i: elsewhere(i, i[2], ops.call("neg", fresh(i))),
        lambda i: elsewhere(i, i[2], fresh(i), half),
    ]
    for other in others:
        assert not is_cache_update(Map((1, 2, 7, 4), "float32", other))
    assert not is_cache_update(Map((1, 2, 1, 4), "float32", lambda i: updated(*i)))
    assert not is_cache_update(NEW)
    assert not is_cache_update(Buffer((1,), "float32", "vector"))
