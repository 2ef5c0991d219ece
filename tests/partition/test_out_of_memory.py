"""Memory that really is not there, in processes that may take little more than they have: an outcome of its own, never one about accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit on address space is Linux's")

_START = """
import logging, resource
import torch
from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.errors import is_out_of_memory
from torch_hybrid_backend.partition.accuracy import compare
from torch_hybrid_backend.partition.placement import Pricing, choose
from torch_hybrid_backend.partition.regions import partition_graph

torch.set_num_threads(1)
MIB = 1 << 20
CONFIG = Config(placement="estimate")

def outer(x):  # (n,) -> (n,), through n * n elements
    return (x[:, None] * x).sum(1)

def region_of(x):
    (segment,) = partition_graph(trace(outer, x), [FakeEngine()], Config()).graph.segments
    return segment.region

def allow(mib):
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + mib * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

class Engine(FakeRegion):
    def __init__(self, region, factor):
        super().__init__(region, lambda outputs: outputs)
        self.factor = factor

    def __call__(self, inputs):
        return [inputs[0] * inputs[0].sum() * self.factor]

x = torch.linspace(0, 1, 4096)  # 64 MiB of products in float32, 128 in float64
region = region_of(x)
expected = region.eager([x])
"""


def _run(script: str) -> str:
    """Run a script in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", _START + script],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        # Else glibc reserves 64 MiB for a second arena when the first one is refused memory.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_float64_run_that_would_take_much_memory() -> None:
    """Outputs that rounding may or may not explain: what they are off by alone decides, and the error is told."""
    out = _run("""
assert compare(region, [x], expected, [expected[0] * 1.01]).code is Reason.ACCURACY
allow(100)
assert compare(region, [x], expected, [expected[0] * 1.01]).code is Reason.ACCURACY
assert compare(region, [x], expected, [expected[0] * 1.000001]).why == ""  # allclose needs none
choice = choose(region, {"fake": Engine(region, 1.01)}, [x], CONFIG, Pricing())
assert choice.decision.engine == "eager", choice.decision
assert [r.code for r in choice.decision.refusals] == [Reason.ACCURACY], choice.decision.refusals
assert torch.equal(choice.outputs[0], expected[0])
""")
    assert out.count("accuracy") == 1


def test_no_memory_for_eager() -> None:
    """An engine that needs less runs the region, unchecked, with one warning; where none does, the user sees the allocator's error."""
    out = _run("""
allow(40)
choice = choose(region, {"fake": Engine(region, 1.0)}, [x], CONFIG, Pricing())
assert choice.decision.engine == "fake" and choice.decision.max_error is None, choice.decision
assert [(r.engine, r.code) for r in choice.decision.refusals] == [("eager", Reason.OUT_OF_MEMORY)]
assert torch.allclose(choice.outputs[0], expected[0], rtol=1e-4)
try:
    choose(region, {}, [x], CONFIG, Pricing())
except RuntimeError as error:
    assert is_out_of_memory(error) and "DefaultCPUAllocator" in str(error), error
else:
    raise AssertionError("memory was there")
""")
    assert out.count("unchecked") == 1


def test_no_memory_for_the_engine() -> None:
    """Eager runs the region; the refusal says what was missing."""
    out = _run("""
class Hungry(Engine):
    def __call__(self, inputs):
        torch.empty(500 * MIB, dtype=torch.uint8)
        return super().__call__(inputs)

allow(200)
choice = choose(region, {"fake": Hungry(region, 1.0)}, [x], CONFIG, Pricing())
assert choice.decision.engine == "eager"
assert [r.code for r in choice.decision.refusals] == [Reason.OUT_OF_MEMORY]
""")
    assert out.count("out_of_memory") == 1
