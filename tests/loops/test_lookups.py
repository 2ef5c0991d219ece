"""Scalars that are elements of a small constant table."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.loops.index import LoopVar, index_of
from torch_hybrid_backend.loops.ir import Buffer, Load, Map
from torch_hybrid_backend.loops.lookups import is_looked_up, lookup
from torch_hybrid_backend.loops.lowerings.indexing import bounded
from torch_hybrid_backend.loops.ops import cast

_I = index_of(LoopVar("i", 64))


def element(
    size: int = 16, dtype: str = "uint8", *, table_is_constant: bool = True, places_are: bool = True, wrap: bool = False
) -> tuple[Load, Buffer, Buffer]:
    """table[places[i]], as lowerings write it."""
    table, places = (
        Buffer((size,), "float32", "table", constant=table_is_constant),
        Buffer((64,), dtype, "places", constant=places_are),
    )
    place = bounded(cast(places.at((_I,)), "int32"), size, wrap=wrap)
    return Load("float32", table, (place,)), table, places


@pytest.mark.parametrize("size", [2, 11, 16])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_elements_of_a_table(size: int, dtype: str) -> None:
    """Up to 16 values, and places of 8 bits, seen through the cast to an index and the bounds of the table."""
    e, table, places = element(size, dtype)
    found = lookup(e)
    assert found is not None
    assert (found.table, found.size, found.place.buffer) == (table, size, places)
    assert found.place.index == (_I,)


def test_others() -> None:
    """Larger tables, wider places, what changes from call to call, places that wrap, and what is read without a table."""
    others = [
        element(17),
        element(16, "int32"),
        element(table_is_constant=False),
        element(places_are=False),
        element(wrap=True),
    ]
    assert not any(lookup(e) for e, _, _ in others)
    plain = Buffer((64,), "float32", "plain", constant=True)
    assert lookup(plain.at((_I,))) is None
    assert not is_looked_up(plain)


def test_values() -> None:
    """A value is looked up where its elements are."""
    e, _, _ = element()
    assert is_looked_up(Map((64,), "float32", lambda _: e))
