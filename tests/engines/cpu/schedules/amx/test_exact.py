"""Products in float32 by vectors: of numbers as they are, from parts and from plain panels, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tvm import tirx

from tests.engines.cpu.schedule_runner import run_body
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS, PANEL
from torch_hybrid_backend.engines.cpu.operands.packing import pack_tiles
from torch_hybrid_backend.engines.cpu.schedules.amx.exact import ExactProducts
from torch_hybrid_backend.engines.cpu.tir.builder import Builder, Stmt, TirBuffer, TirExpr
from torch_hybrid_backend.engines.cpu.tir.printer import Printer
from torch_hybrid_backend.loops.index import Index, as_index

_K, _LENGTH = 40, 64  # two steps, the second one not full
_FORM = FORMATS["float32"]


def products(b: Builder, a: TirBuffer, packed: TirBuffer, sums: TirBuffer, *, is_plain: bool, adds: bool) -> Stmt:
    """a (32, 64) by a packed panel of 40 rows, to sums (32, 32)."""
    exact = ExactProducts(_LENGTH, b, Printer(b, {}))

    def row(line: Index) -> Stmt:
        vectors = [
            exact.row(line, as_index(at), 16, lambda lane, at=at: b.load(a, line * _LENGTH + at + lane))
            for at in range(0, _LENGTH, 16)
        ]
        return b.seq(*vectors)

    def words(step: Index, number: int, at: Index) -> TirExpr:
        start = step * (_FORM.parts * _FORM.panel_elements) + number * _FORM.panel_elements
        return tirx.reinterpret("uint32x16", b.load_vector(packed, start + at, 32))

    return b.seq(
        b.alloc(exact.a),
        b.alloc(exact.b),
        b.loop(PANEL, row),
        exact.columns(_FORM, 2, words, is_plain),
        exact.products(_K, sums, as_index(0), tirx.IntImm("bool", 1) if adds else None),
    )


def run(a: torch.Tensor, b: torch.Tensor, *, is_plain: bool, adds: bool) -> torch.Tensor:
    """a (32, 40) @ b (40, 32), added to sevens or in place of them."""
    rows = torch.full((PANEL, _LENGTH), float("nan"))
    rows[:, :_K] = a
    sums = torch.full((PANEL * PANEL,), 7.0)
    run_body(
        partial(products, is_plain=is_plain, adds=adds), rows.flatten(), pack_tiles(b[None], _FORM).flatten(), sums
    )
    return sums.view(PANEL, PANEL)


@pytest.mark.parametrize("adds", [False, True])
def test_of_parts(adds: bool) -> None:
    """The three parts of a number are put together again; what A has behind the last k is not read."""
    torch.manual_seed(0)
    a, b = torch.randn(PANEL, _K), torch.randn(_K, PANEL)
    got = run(a, b, is_plain=False, adds=adds)
    scale = a.double().abs() @ b.double().abs() + 7 * adds
    error = (got.double() - a.double() @ b.double() - 7 * adds).abs() / scale
    assert (
        error.max() < (_K + 1) * 2**-24
    )  # a rounding for each product, where A or B rounded to 16 bits would be 2**-9 off


def test_of_a_plain_panel() -> None:
    """Numbers that have no three parts, of A and of B: products are eager's in float32."""
    torch.manual_seed(0)
    a, b = torch.rand(PANEL, _K) + 1, torch.rand(_K, PANEL)
    a[5, 3], b[3, 1], b[7, 2], b[:, 4] = 3e38, 1e-38, float("inf"), 1e-40
    b[9, 3] = float("nan")
    got, want = run(a, b, is_plain=True, adds=False).double(), a.double() @ b.double()
    assert torch.equal(got.isnan(), want.isnan())
    assert want.isnan().sum() == PANEL
    assert got[:, 2].isposinf().all()
    finite = want.isfinite() & (want < 3e38)
    torch.testing.assert_close(got[finite], want[finite], rtol=3e-6, atol=1e-44)
    assert (got[:, 4] > 0).all()  # denormals are not taken for zero
