"""Graphs on other devices than the CPU, from capture to the lowering of their regions, with fake CUDA tensors: no GPU is needed.

What has never run on a GPU is all that comes after: kernels, memory and streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional

from benchmarks.models import ZOO
from tests.fake_devices import FakeDevices
from tests.partition.engines_for_tests import LoopsEngine
from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.core.region import Region, Segment
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.loops.graph import lower_region
from torch_hybrid_backend.loops.ir import LoopOp, ReduceOp, Value, domain_vars
from torch_hybrid_backend.partition.placement import decide
from torch_hybrid_backend.partition.plan_builder import make_plan
from torch_hybrid_backend.partition.regions import Partition, partition_graph
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs
from torch_hybrid_backend.passes.pipeline import PASSES, run_passes

aten = torch.ops.aten
CUDA, SECOND = Device("cuda", 0), Device("cuda", 1)
CANONICAL = tuple(entry for entry in PASSES if not entry[1])


@pytest.fixture
def devices() -> FakeDevices:
    return FakeDevices()


class Block(nn.Module):
    """The basic block of a ResNet, with its head: convolutions to fold batch norms into, a skip, a mean over pixels, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[0](self.first(x)))
        y = functional.relu(self.norms[1](self.second(y)) + x)
        result: torch.Tensor = self.head(y.mean((2, 3)))
        return result


class Transformer(nn.Module):
    """A layer of a transformer in half precision; `attention` takes queries, keys and values of (batch, heads, tokens, columns)."""

    def __init__(self, attention: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = (layer(y).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(self.attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The operator that PyTorch chooses for the device."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def planned(
    devices: FakeDevices,
    engines: Sequence[Engine],
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    passes: Sequence[Any] = PASSES,
) -> Partition:
    """The function partitioned as the wiring does it."""
    keep = [operator for engine in engines for operator in engine.keep_ops]
    captured = devices.captured(function, *inputs, keep_ops=keep)
    inline_subgraphs(captured.graph_module)
    run_passes(captured.graph_module, PassContext.of(captured), passes)
    return partition_graph(hoist(captured.graph_module, captured.static_inputs).main, engines, Config())


def claimed(found: Partition) -> list[Segment]:
    return [segment for segment in found.graph.segments if segment.engine_hint != "eager"]


def lies_on(region: Region, device: Device) -> bool:
    """True if all that the region reads, computes and returns is on the device, its numbers left out."""
    values = [node.meta["val"] for node in region.graph_module.graph.nodes if node.op == "call_function"]
    tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]
    made = {Device.of(tensor.device) for tensor in tensors if isinstance(tensor, torch.Tensor)}
    read = {
        item.spec.device for k, item in enumerate(region.inputs) if k not in region.numbers and item.spec is not None
    }
    returned = {spec.device for spec in region.outputs if spec is not None}
    return region.device == device and made | read | returned == {device}


def loops_of(region: Region) -> list[str]:
    """The region's loop operations as text, its buffers numbered as they come."""
    numbers: dict[str, int] = {}

    def renumbered(match: re.Match[str]) -> str:
        return f"number={numbers.setdefault(match[1], len(numbers))}"

    return [re.sub(r"number=(\d+)", renumbered, _shown(op)) for op in lower_region(region, POLICY).ops]


def _shown(op: LoopOp) -> str:
    fields = [(name, getattr(op, name)) for name in type(op).__slots__]
    values = [f"{name}={value.at(domain_vars(value.shape))!r}" for name, value in fields if isinstance(value, Value)]
    numbers = [f"{name}={value!r}" for name, value in fields if isinstance(value, int | float | str | tuple)]
    body = [repr(op.body(domain_vars(op.domain)))] if isinstance(op, ReduceOp) else []
    return " ".join([type(op).__name__, repr(op.out), *numbers, *values, *body])


def half(module: nn.Module) -> nn.Module:
    return module.half().eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "resnet": (lambda: Block().eval(), (2, 16, 8, 8), torch.float32),
    "transformer": (lambda: half(Transformer(flash)), (2, 6, 32), torch.float16),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_gpu_is_a_region_of_that_gpu(devices: FakeDevices, name: str) -> None:
    """A model on a GPU is one region, of one device; each spec of the plan tells its index, and none is the CPU's."""
    make, shape, dtype = MODELS[name]
    x = devices.tensor(*shape, device="cuda:1", dtype=dtype)
    found = planned(devices, [LoopsEngine(devices=["cuda"])], devices.move(make(), "cuda:1"), x)
    (segment,) = found.graph.segments
    assert segment.engine_hint == "loops"
    assert lies_on(segment.region, SECOND)
    assert segment.region.numbers == ()
    plan = make_plan("graph", "inference", found, [decide(segment.region, "loops", None)])
    assert '"cpu' not in plan.to_json()
    assert '"cuda:1"' in plan.to_json()
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", MODELS)
def test_a_region_of_a_gpu_is_lowered_as_one_of_the_cpu(devices: FakeDevices, name: str) -> None:
    """The same loop operations, but for what passes for kernels of the CPU make of its graph."""
    make, shape, dtype = MODELS[name]
    lowered = []
    for device in ("cpu", "cuda:0"):
        x = devices.tensor(*shape, device=device, dtype=dtype)
        engine = LoopsEngine(devices=[device.split(":")[0]])
        found = planned(devices, [engine], devices.move(make(), device), x, passes=CANONICAL)
        (segment,) = found.graph.segments
        lowered.append(loops_of(segment.region))
    assert lowered[0] == lowered[1]
    assert len(lowered[0]) > 4


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_tvm_refuses_what_is_on_a_gpu(devices: FakeDevices, name: str) -> None:
    """TVM is asked about nothing on a GPU: eager has the whole graph, and the plan says why."""
    make, shape, dtype = MODELS[name]
    x = devices.tensor(*shape, device="cuda:0", dtype=dtype)
    engine = TvmEngine(Config(compile_threads=1), services())
    found = planned(devices, [engine], devices.move(make(), "cuda:0"), x)
    (segment,) = found.graph.segments
    assert segment.engine_hint == "eager"
    assert segment.region.device == CUDA
    refusals = {refusal for node in found.nodes for refusal in node.refusals}
    assert {(refusal.engine, refusal.code) for refusal in refusals} == {("tvm", Reason.DEVICE)}
    operator = {"resnet": "relu", "transformer": "gelu"}[name]
    assert f"aten.{operator}.default is on cuda:0, tvm serves cpu" in {refusal.why for refusal in refusals}


def test_a_number_on_the_cpu_enters_by_value(devices: FakeDevices) -> None:
    """An input of no dimensions and a constant of the user's, both on the CPU, are operands of a GPU's operators and of its region."""

    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.relu(x * scale + torch.tensor(3.0)).sum(0)

    x, scale = devices.tensor(4, 5, device="cuda:0"), devices.tensor(device="cpu")
    engine = LoopsEngine(devices=["cuda"])
    found = planned(devices, [engine], function, x, scale)
    (segment,) = claimed(found)
    region = segment.region
    assert lies_on(region, CUDA)
    numbers = [region.inputs[k] for k in region.numbers]
    assert [(item.spec.shape, item.spec.device) for item in numbers if item.spec is not None] == [((), CPU)] * 2
    assert [item.is_constant for item in numbers] == [False, True]
    assert {op.out.shape for op in lower_region(region, POLICY).ops} == {
        (5,)
    }  # one kernel: no buffer is made for a number


def test_two_gpus_never_share_a_region(devices: FakeDevices) -> None:
    """Two GPUs have two regions of one engine; what goes from one GPU to the other is eager's."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = functional.relu(x * 2).softmax(-1)
        w = torch.sin(y).softmax(-1)
        return (z.to("cuda:1") + w).softmax(-1), z

    engine = LoopsEngine(devices=["cuda"])
    inputs = [devices.tensor(4, 8, device=f"cuda:{index}") for index in range(2)]
    found = planned(devices, [engine], function, *inputs)
    regions = [segment.region for segment in claimed(found)]
    assert [region.device for region in regions if lies_on(region, region.device)] == [
        region.device for region in regions
    ]
    assert {region.device for region in regions} == {CUDA, SECOND}
    (moved,) = [node for node in found.nodes if node.operator == "aten._to_copy.default"]
    assert moved.engine == "eager"
    assert [(refusal.engine, refusal.code) for refusal in moved.refusals] == [("loops", Reason.DEVICE)]
    assert "goes between devices" in moved.refusals[0].why


def test_each_device_of_a_mixture_has_its_engine(devices: FakeDevices) -> None:
    """Layers on the CPU and on a GPU, with a tensor that goes there and back: TVM has the first, the GPU's engine the others."""
    here, there = devices.move(Block().eval(), "cpu"), devices.move(Block().eval(), "cuda:0")

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = here(x), there(y)
        return first.softmax(-1), (second + first.to("cuda:0")).softmax(-1), second.softmax(-1)

    engines = [TvmEngine(Config(compile_threads=1), services()), LoopsEngine("gpu", devices=["cuda"])]
    x, y = (devices.tensor(2, 16, 8, 8, device=device) for device in ("cpu", "cuda:0"))
    found = planned(devices, engines, function, x, y)
    assert {(segment.engine_hint, segment.region.device) for segment in claimed(found)} == {("tvm", CPU), ("gpu", CUDA)}
    assert all(lies_on(segment.region, segment.region.device) for segment in claimed(found))
    eager = [node.operator for node in found.nodes if node.engine == "eager"]
    assert eager == ["aten._to_copy.default"]


def test_one_engine_may_serve_both(devices: FakeDevices) -> None:
    """An engine of every device takes operators of both, in regions of their own, though nothing separates them."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x) + 1, torch.sin(y) + 1

    x, y = (devices.tensor(4, device=device) for device in ("cpu", "cuda:0"))
    found = planned(devices, [LoopsEngine()], function, x, y)
    assert sorted(str(segment.region.device) for segment in claimed(found)) == ["cpu", "cuda:0"]
    assert {node.engine for node in found.nodes} == {"loops"}


@pytest.mark.parametrize("model", ["resnet50", "convnext_tiny", "unet"])
def test_small_models_of_the_zoo(devices: FakeDevices, model: str) -> None:
    """A whole model is one region of its GPU, as it is one of the CPU."""
    module, inputs = ZOO[model].make("small").eval(), ZOO[model].inputs("small", batch=1)
    moved = [devices.tensor(*x.shape, device="cuda:0", dtype=x.dtype) for x in inputs]
    found = planned(devices, [LoopsEngine(devices=["cuda"])], devices.move(module, "cuda:0"), *moved)
    (segment,) = found.graph.segments
    assert segment.engine_hint == "loops"
    assert lies_on(segment.region, CUDA)
    assert loops_of(segment.region)
