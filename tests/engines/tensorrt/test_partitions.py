"""Models of the zoo, captured for a GPU that does not exist, and cut into regions of TensorRT and of eager. Some regions are built."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Golden
from tests.engines.tensorrt.regions_for_tests import engine, has_golden_release
from tests.fake_devices import FakeDevices
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest, SerializedEngine, build
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.partition.regions import Partition, partition_graph

pytestmark = pytest.mark.tensorrt


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        q, k, v = (each.view(batch, rows, self.heads, -1).transpose(1, 2) for each in self.qkv(x).split(width, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, width))
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(2)
        )
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(x + self.second(self.first(x)))
        return self.head(x.mean((2, 3))).softmax(-1)


class Positions(nn.Module):
    """Models compute with int64 values: that many operators stay outside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(64, 32), nn.Linear(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.table((tokens * 3 + 1) % 64)).relu().sort(-1)[0]


MODELS: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {
    "attention": (Attention, (2, 16, 64), torch.float32),
    "attention-bfloat16": (Attention, (2, 16, 64), torch.bfloat16),
    "residual": (Residual, (2, 16, 16, 16), torch.float32),
    "positions": (Positions, (2, 16), torch.int64),
}


def partition(name: str) -> Partition:
    make, shape, dtype = MODELS[name]
    model = make().eval()
    devices = FakeDevices()
    if dtype.is_floating_point:
        model = model.to(dtype)
    captured = devices.captured(devices.move(model, "cuda"), devices.tensor(*shape, device="cuda", dtype=dtype))
    made = engine()
    made.devices = frozenset({"cuda"})
    return partition_graph(captured.graph_module, [made], Config(min_region_nodes=1))


@pytest.mark.parametrize("name", MODELS)
def test_regions_and_refusals_of_models(name: str, golden: Golden) -> None:
    """Regions and refusals of models; every region has its engine."""
    cut = partition(name)
    lines = []
    for segment in cut.graph.segments:
        operators = [node for node in cut.nodes if node.region == segment.region.name]
        counts = collections.Counter(node.operator for node in operators)
        shown = ", ".join(f"{operator} x{count}" for operator, count in sorted(counts.items()))
        lines.append(
            f"{segment.region.name} {segment.engine_hint}: {len(segment.inputs)} in, {len(segment.outputs)} out: {shown}"
        )
    for node in cut.nodes:
        lines += [f"refused {node.operator}: {refusal.code}: {refusal.why}" for refusal in node.refusals]
    if has_golden_release():
        golden.check("\n".join(lines))
    _check_built(cut.graph)


def _check_built(graph: PartitionedGraph) -> None:
    for segment in graph.segments:
        if segment.engine_hint == "tensorrt":
            request = BuildRequest.of(segment.region, ranges_of(segment.region))
            made = SerializedEngine.from_bytes(build(request.to_bytes(), lambda done: True))
            assert len(made.outputs) == len(segment.outputs)
            assert len(made.layers) < max(5, len(segment.region.node_names))
