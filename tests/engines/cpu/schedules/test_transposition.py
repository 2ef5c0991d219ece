"""A square of vectors, transposed in registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.schedules.transposition import transposed
from torch_hybrid_backend.engines.cpu.tir.builder import Builder


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_every_element_changes_places(lanes: int) -> None:
    """Vector j of the result is element j of every row, for the vectors of every processor."""

    def body(builder: Builder, x: Any, out: Any) -> Any:
        rows = [tirx.Var(builder.fresh("row"), f"float32x{lanes}") for _ in range(lanes)]

        def place(number: int) -> list[Any]:
            return [tirx.Ramp(builder.index(number * lanes), 1, lanes)]

        loads = [tirx.stmt.Bind(row, tirx.BufferLoad(x, place(i))) for i, row in enumerate(rows)]
        stores = [tirx.BufferStore(out, value, place(j)) for j, value in enumerate(transposed(rows))]
        return builder.seq(*loads, *stores)

    x, out = torch.randn(lanes * lanes), torch.empty(lanes * lanes)
    run_body(body, x, out)
    assert torch.equal(out.view(lanes, lanes), x.view(lanes, lanes).T)
