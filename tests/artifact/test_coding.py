"""Coding of segments of weights: what is coded, how small it becomes, and that files of it are what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import exported, manifest_of
from torch_hybrid_backend.artifact.coding import BLOCK_BYTES, coded
from torch_hybrid_backend.artifact.manifest import Manifest, Segment
from torch_hybrid_backend.artifact.writer import Writer
from torch_hybrid_backend.compression.shared_weights import compress


def _few(values: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(values)[torch.randint(values, (count,))].to(dtype)


# Tensor -> the share of its bytes that are left, at most.
_CODED = {
    "16 values of float32": (_few(16, 1 << 17), 4.1 / 32),
    "200 values of float32": (_few(200, 1 << 17), 8.2 / 32),
    "16 values of bfloat16": (_few(16, 1 << 17, torch.bfloat16), 4.1 / 16),
    "half zeros of float32": (torch.randn(1 << 17).relu(), 0.65),
    "zeros": (torch.zeros(1 << 17), 1 / 40),
    "one value": (torch.full((1000,), 3.0), 0.1),
    "few bytes": (torch.randint(4, (1001,), dtype=torch.int8), 0.45),
    "zeros, then noise": (torch.cat([torch.zeros(3 * BLOCK_BYTES // 4), torch.randn(BLOCK_BYTES // 4)]), 0.3),
}


@pytest.mark.parametrize("case", _CODED)
def test_few_values_take_few_bits(case: str) -> None:
    """A segment becomes about as small as its values tell."""
    tensor, most = _CODED[case]
    content = tensor.view(torch.uint8).numpy().tobytes()
    short = coded(content)
    assert short is not None
    assert len(short) <= most * len(content)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1 << 16),
        torch.randn(1 << 16).bfloat16(),
        (torch.randn(1 << 16) * 30).clamp(-127, 127).to(torch.int8),
        torch.empty(0),
    ],
    ids=["float32", "bfloat16", "int8", "nothing"],
)
def test_other_weights_stay(tensor: torch.Tensor) -> None:
    """Weights that are not compressed stay in the memory that processes share."""
    assert coded(tensor.view(torch.uint8).numpy().tobytes()) is None


def test_a_file_says_what_is_coded(tmp_path: Path) -> None:
    """The manifest has the decoded size of a coded segment, and of others none."""
    made = Writer()
    made.add_tensor(_few(16, 1 << 17))
    made.add_segment("report", "report", b"{}" + b" " * 10000)

    def manifests(segments: tuple[Segment, ...]) -> list[Manifest]:
        return [Manifest("0", "0", "Net", segments, (), (), made.constants, (), (), (), "report")]

    made.write(tmp_path / "a.hybrid", manifests)
    report, weights = manifest_of(tmp_path / "a.hybrid").segments
    assert (report.encoding, report.decoded) == ("none", None)
    assert (weights.encoding, weights.decoded) == ("huffman", 1 << 19)
    assert weights.size < 1 << 17


class Layers(nn.Module):
    """An embedding, a convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.convolution, self.linear = nn.Embedding(2000, 64), nn.Conv1d(64, 256, 5), nn.Linear(256, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.convolution(self.table(ids).mT).relu().amax(2))
        return result


@torch.no_grad()
def test_files_of_compressed_models(tmp_path: Path) -> None:
    """A compressed model's file is a fraction of what its weights take in float32; it computes what the model does."""
    torch.manual_seed(0)
    model = compress(Layers().eval(), sparsity=0.5, clusters=16)
    ids = torch.randint(0, 2000, (2, 40))
    report, loaded = exported(model, (ids,), tmp_path)
    ids = torch.randint(0, 2000, (2, 40))
    torch.testing.assert_close(loaded(ids), model(ids), rtol=1e-4, atol=1e-4)
    weights = [each for each in manifest_of(report.path).segments if each.kind == "weights"]
    in_float32 = sum(value.nbytes for value in Layers().state_dict().values())
    assert sum(each.size for each in weights) < 0.15 * in_float32
