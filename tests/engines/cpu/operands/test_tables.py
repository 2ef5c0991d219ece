"""Tables of quantized embeddings: how they are packed, and that a tied layer's weight is one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch import nn

from tests.artifact.exported_for_tests import exported, manifest_of
from tests.codegen.regions_for_tests import region_of
from tests.passes.cpu.test_quantize_weights import by_hand
from torch_hybrid_backend.codegen.assemble import RegionKernels, assemble
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.operands.packing import pack_nibbles
from torch_hybrid_backend.engines.cpu.target import Target

quantized = torch.ops.quantized_decomposed
FORMS = ["int8-weights", "int4-weights"]
ROWS, WIDTH, GROUP = 150, 128, 32
_AVX512 = Target("x86-64-v4", "x", ("avx512f",), 16, 2, 48 << 10, 1 << 20)


def assembled(function: Callable[..., object], *inputs: torch.Tensor, changing: int = 1) -> RegionKernels:
    """The kernels of a region whose inputs behind the first `changing` are constants: those of the graph are in the order of their use."""
    region = region_of(function, *inputs)
    fixed = {str(tuple(each.shape)) for each in inputs[changing:]}
    named = tuple(replace(i, is_constant=i.spec is not None and str(i.spec.shape) in fixed) for i in region.inputs)
    return assemble(replace(region, inputs=named), TvmBackend(_AVX512))


def table(q: torch.Tensor, scales: torch.Tensor, bounds: tuple[int, int] = (-8, 7)) -> torch.Tensor:
    """q (ROWS, WIDTH) with scales for each GROUP, dequantized."""
    result: torch.Tensor = quantized.dequantize_per_channel_group(
        q, scales, None, *bounds, q.dtype, GROUP, torch.float32
    )
    return result


@pytest.mark.parametrize(("low", "dtype"), [(-8, torch.int8), (0, torch.uint8)])
def test_rows_of_4_bits(low: int, dtype: torch.dtype) -> None:
    """The integers of a table are packed row by row, half a byte each; those that lie outside of their bounds, clamped."""

    def rows(ids: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, table(q, scales, (low, low + 15))).relu()

    q = torch.randint(low, low + 19, (ROWS, WIDTH), dtype=dtype)
    found = assembled(rows, torch.tensor([3, 7]), q, torch.rand(ROWS, WIDTH // GROUP))
    (packed,) = found.packed
    inside = q.clamp(low, low + 15).to(torch.int32) - (low + 8)
    assert torch.equal(packed.pack(q), pack_nibbles(inside.t()[None], 1))
    read = {argument.buffer for kernel in found.kernels for argument in kernel.reads}
    assert packed.source not in read


def test_a_tied_layer_and_its_embedding_read_one_table() -> None:
    """The product packs integers and scales, and the embedding reads these; no kernel reads them unpacked."""

    def tied(ids: torch.Tensor, x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> Sequence[torch.Tensor]:
        w = table(q, scales)
        return nn.functional.embedding(ids, w).relu(), torch.mm(x, w.t())

    q = torch.randint(-8, 8, (ROWS, WIDTH), dtype=torch.int8)
    scales = torch.rand(ROWS, WIDTH // GROUP)
    found = assembled(tied, torch.tensor([3, 7]), torch.randn(2, WIDTH), q, scales, changing=2)
    assert len(found.packed) == 2
    reads = [{a.buffer for a in kernel.reads if a.buffer.constant} for kernel in found.kernels]
    packed = {packed.buffer for packed in found.packed}
    assert [each for each in reads if each] == [packed, packed]


def test_bytes_and_other_clamps_stay() -> None:
    """A table of 8 bits is read where it lies."""

    def rows(ids: torch.Tensor, q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, table(q, scales, (-128, 127))).relu()

    q = torch.randint(-128, 127, (ROWS, WIDTH), dtype=torch.int8)
    assert not assembled(rows, torch.tensor([3, 7]), q, torch.rand(ROWS, WIDTH // GROUP)).packed


class Language(nn.Module):
    """A language model of one layer. `tied`: its last layer multiplies by the table of its embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(1000, 256), nn.LayerNorm(256)
        self.head = nn.Linear(256, 1000, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.table(ids)))
        return logits

    def exact(self, ids: torch.Tensor, precision: str) -> torch.Tensor:
        """In float64, with the weights that the precision's document describes."""
        rows, head = (by_hand(weight.detach(), precision) for weight in (self.table.weight, self.head.weight))
        return nn.functional.layer_norm(rows[ids], (256,)) @ head.T


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("length", [1, 40])
@torch.no_grad()
def test_results_and_bytes_of_a_file(tied: bool, precision: str, length: int, tmp_path) -> None:
    """Results are those of the dequantized table. A file holds every table once, in its bits and its scales' and no more."""
    model = Language(tied).eval()
    ids = torch.randint(0, 1000, (2, length))
    options = {"precision": precision, "activation_bits": 32}
    report, loaded = exported(model, (ids,), tmp_path, options=options)
    assert not report.python_parts
    for given in (ids, ids.flip(0), torch.tensor([0, 999]).repeat_interleave(length).view(2, length)):
        got, want = loaded(given).double(), model.exact(given, precision)
        assert (got - want).norm() < 1e-4 * want.norm()  # float64 rounds one weight of 8 bits the other way
    weights = sum(segment.size for segment in manifest_of(report.path).segments if segment.kind == "weights")
    table_bytes = 1000 * 256 * (1 if precision == "int8-weights" else 4.5 / 8) + 4 * 1000 * (
        precision == "int8-weights"
    )
    samples = 2 * length * 1000 * 4 + 2 * length * 8
    # Panels of columns are whole.
    assert weights - samples < (1 if tied else 2) * table_bytes * 1.04 + 8192


@torch.no_grad()
def test_indices_outside_raise() -> None:
    """Indices behind the last row are an error, as in eager."""
    model = Language(tied=True).eval()
    compiled = torch.compile(model, backend="hybrid", options={"precision": "int4-weights", "precision_tolerance": 1.0})
    compiled(torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 1000]))


@torch.no_grad()
def test_tables_are_live() -> None:
    """A table that changes is quantized anew."""
    model = Language(tied=True).eval()
    options = {"precision": "int4-weights", "activation_bits": 32, "precision_tolerance": 1.0, "placement": "estimate"}
    compiled = torch.compile(model, backend="hybrid", options=options)
    ids = torch.tensor([[5, 999, 0]])
    for _ in range(2):
        for _ in range(2):
            torch.testing.assert_close(compiled(ids).double(), model.exact(ids, "int4-weights"), rtol=1e-4, atol=1e-4)
        model.table.weight.mul_(-1.5)
