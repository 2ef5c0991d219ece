"""KV cache: keys or values of a cache with one new position, recognised from the scalar expression, whatever operators made it.

    where(position == t, new, cache[..., t, ...])          as `index_copy`, `index_put` and `slice_scatter` of one position are lowered

A decoder's cache is large, and a token adds little to it: attention reads the cache and the new part where they lie, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid_backend.loops.index import LoopVar
from torch_hybrid_backend.loops.ir import Call, Expr, FromIndex, Load, Value, domain_vars, indices, parts


@dataclass(frozen=True, slots=True, eq=False)
class CacheUpdate:
    """`new`, which lies in memory, at the position `position`, an integer that may lie outside; elsewhere `cache`.

    Neither of the first two depends on the position that is read.
    """

    position: Expr
    new: Load
    cache: Load


def cache_update(e: Expr, key: LoopVar) -> CacheUpdate | None:
    """The update of which a scalar is an element, along the positions `key`; None for any other scalar."""
    match e:
        case Call(
            op="where", args=(Call(op="eq", args=(position, FromIndex() as here)), Load() as new, Load() as cache)
        ):
            is_key = here.index.terms == ((key, 1),) and here.index.const == 0
            if is_key and not _depends(position, key) and not _depends(new, key):
                return CacheUpdate(position, new, cache)
    return None


def is_cache_update(value: Value) -> bool:
    """True if each element of keys or values, (B, H, T, D) in float32, is an element of an updated cache."""
    index = domain_vars(value.shape)
    if value.dtype != "float32" or len(index) != 4 or not index[2].terms:
        return False
    key = index[2].terms[0][0]
    if not isinstance(key, LoopVar):
        return False
    found = cache_update(value.at(index), key)
    return found is not None and found.cache.buffer.dtype == "float32"


def _depends(e: Expr, variable: LoopVar) -> bool:
    every = parts([e], within_indices=True)
    return any(variable in index.leaves() for part in every for index in indices(part))
