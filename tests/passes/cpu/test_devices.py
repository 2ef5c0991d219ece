"""Passes for kernels of the CPU leave other devices' operators alone, also in a graph that has both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fake_devices import FakeDevices
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.pipeline import PASSES, run_passes


class Resampled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 1))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries(x) @ self.keys(x).t()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 1), nn.Conv2d(4, 32, 1)
        self.last = nn.Conv2d(32, 5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.relu(self.first(x)).mean((2, 3)), self.last(functional.relu(self.second(x)))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("bucket", torch.zeros(4, 7, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = functional.embedding(self.bucket, self.table).permute(2, 0, 1)
        return torch.where(x > 0, bias.unsqueeze(0), -1.0).contiguous().cumsum(-1)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(64, 32, dtype=torch.uint8))
        self.register_buffer("moves", torch.ones(2, 64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, 32, self.moves)


SUBJECTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resample_last": (Resampled, (1, 8, 4, 4)),
    "transposed_convolutions": (lambda: nn.ConvTranspose2d(4, 4, 4, 2, 1), (1, 4, 5, 5)),
    "volume_convolutions": (lambda: nn.Conv3d(2, 3, 3, padding=1), (1, 2, 4, 5, 5)),
    "dilated_convolutions": (lambda: nn.Conv2d(96, 96, 3, padding=2, dilation=2), (1, 96, 12, 12)),
    "unpack_int4": (Packed, (3, 64)),
    "merge_siblings": (Siblings, (4, 8)),
    "merge_convolutions": (Branches, (1, 4, 8, 8)),
    "contiguous_tables": (Table, (2, 3, 4, 7)),
}


def operators(
    devices: FakeDevices, passes: Sequence[Any], function: Callable[..., Any], *inputs: torch.Tensor
) -> dict[str, list[str]]:
    """The operators on each device, in order, after the passes."""
    captured = devices.captured(function, *inputs)
    graph_module = run_passes(captured.graph_module, PassContext.of(captured), passes)
    found: dict[str, list[str]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            found.setdefault(str(device_of(node)), []).append(str(node.target))
    return found


def test_every_pass_has_a_subject() -> None:
    """A pass for one device has a graph here that it would rewrite."""
    assert [graph_pass.__name__ for graph_pass, only, _ in PASSES if only] == list(SUBJECTS)


@pytest.mark.parametrize("name", SUBJECTS)
def test_only_operators_of_the_cpu_are_rewritten(name: str) -> None:
    """Two copies of a model in one graph, on the CPU and on a GPU: the first is rewritten as it is alone, the second is not."""
    make, shape = SUBJECTS[name]
    devices = FakeDevices()
    here, there = devices.move(make().eval(), "cpu"), devices.move(make().eval(), "cuda:0")
    x, y = (devices.tensor(*shape, device=device) for device in ("cpu", "cuda:0"))
    canonical = [entry for entry in PASSES if not entry[1]]
    with_it = [entry for entry in PASSES if not entry[1] or entry[0].__name__ == name]

    (before,) = operators(devices, canonical, here, x).values()
    (after,) = operators(devices, with_it, here, x).values()
    assert after != before
    assert operators(devices, with_it, there, y) == {"cuda:0": before}
    both = operators(devices, with_it, lambda x, y: (here(x), there(y)), x, y)
    assert both == {"cpu": after, "cuda:0": before}
