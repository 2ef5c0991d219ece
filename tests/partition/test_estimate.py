"""Estimates: what a roofline says of a region, without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import ExternalCall, Program
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.partition.estimate import CALLBACK_US, Roofline, eager_us, engine_us, roofline
from torch_hybrid_backend.partition.regions import partition_graph

# A flop takes a millionth of a microsecond, a byte a thousandth.
ON = Roofline(flops_per_second=1e12, bytes_per_second=1e9, operator_us=10.0, view_us=1.0, kernel_us=2.0)


def _region(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    (segment,) = partition_graph(trace(function, *inputs), [FakeEngine()], Config()).graph.segments
    return segment.region


def test_eager_pays_for_each_operator_and_its_traffic() -> None:
    """Two operators read and write 4,000 bytes each; a view costs its call."""
    region = _region(lambda x: x.view(10, 100).exp().sin(), torch.randn(1000))
    assert eager_us(region, ON) == pytest.approx(1.0 + 2 * (10.0 + 8.0))


def test_an_engine_pays_for_inputs_outputs_and_products() -> None:
    """A value between is taken to be fused. The product's operands go through memory."""
    region = _region(lambda x: x.exp().sin(), torch.randn(1000))
    compiled = FakeRegion(region, lambda outputs: outputs)
    assert engine_us(region, compiled, ON) == pytest.approx(2.0 + 8.0)
    product = _region(lambda x, w: (x @ w).relu(), torch.randn(100, 100), torch.randn(100, 100))
    compiled = FakeRegion(product, lambda outputs: outputs)
    assert engine_us(product, compiled, ON) == pytest.approx(2 * 2.0 + (3 + 3) * 40.0)
    fast_memory = Roofline(1e12, 1e15, 10.0, 1.0, 2.0)
    assert engine_us(product, compiled, fast_memory) == pytest.approx(2 * 2.0 + 2e6 / 1e6)


class Runner:
    """Runs an engine's step: by a C function, or where it has none from Python."""

    def __init__(self, native: tuple[int, int] | None) -> None:
        self.native = native

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("nothing is run")


def test_steps_that_only_python_can_run_cost_the_way_to_it() -> None:
    """Each of them; the plan runs the others by itself."""
    region = _region(lambda x: x.exp().sin(), torch.randn(1000))
    compiled = FakeRegion(region, lambda outputs: outputs)
    plain, from_python = (ExternalCall(Runner(native), (0, 1), 1, "step") for native in ((1, 1), None))
    buffers = (TensorSpec((1000,), "float32", (1,), CPU),) * 2
    for steps, calls in (((plain,), 0), ((plain, from_python), 1), ((from_python, plain, from_python), 2)):
        compiled.program = Program(buffers, (0,), (1,), (), steps)
        assert engine_us(region, compiled, ON) == pytest.approx(len(steps) * 2.0 + 8.0 + calls * CALLBACK_US)


def test_the_hosts_roofline_grows_with_pytorchs_threads() -> None:
    """Peak and bandwidth do; what calls cost does not."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = roofline(CPU)
        torch.set_num_threads(2)
        two = roofline(CPU)
    finally:
        torch.set_num_threads(threads)
    assert one is not None
    assert two == Roofline(
        2 * one.flops_per_second, 2 * one.bytes_per_second, one.operator_us, one.view_us, one.kernel_us
    )


def test_nothing_is_estimated_where_nothing_is_known() -> None:
    """Nothing is estimated for devices without numbers."""
    assert roofline(Device("cuda", 0)) is None
