"""Compiled regions with something around each call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from tests.test_errors import accelerator_error
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.errors import HybridError, RegionError
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.partition.wrapped_region import checked, reported

X = torch.randn(8, 8)
EXPECTED = (X @ X).sin()


@pytest.fixture
def region() -> Region:
    (segment,) = partition_graph(trace(lambda x: (x @ x).sin(), X), [FakeEngine()], Config()).graph.segments
    return segment.region


class Whole(FakeRegion):
    """Has all members of the protocol, and tells in `asked` what it was asked."""

    def __init__(self, region: Region, offset: float = 0.0) -> None:
        super().__init__(region, lambda outputs: [output + offset for output in outputs])
        self.asked: list[object] = []
        self.others: list[Whole] = []

    def refine(self, inputs: Sequence[torch.Tensor], budget_s: float, deadline: Deadline) -> CompiledRegion:
        self.asked.append((inputs, budget_s, deadline))
        return self.others.pop()

    def exact(self, deadline: Deadline, error: float) -> CompiledRegion | None:
        self.asked.append(deadline)
        return self.others.pop() if self.others else None

    def release(self) -> None:
        self.asked.append("release")


@pytest.mark.parametrize("kind", ["reported", "checked"])
def test_a_wrapper_forwards_the_whole_protocol(kind: str, region: Region) -> None:
    """A question to the wrapper is asked of the region inside; what becomes of that is wrapped again."""

    def wrapped(compiled: CompiledRegion) -> CompiledRegion:
        return reported(compiled) if kind == "reported" else checked(region, "fake", compiled, strict=True)

    inside, deadline = Whole(region), Deadline(1.0)
    outside = wrapped(inside)
    assert isinstance(outside, CompiledRegion)
    assert outside.program is None
    assert torch.equal(outside([X])[0], EXPECTED)
    assert outside.exact(deadline, 0.1) is None
    inside.others = [Whole(region, 1.0), Whole(region, 1.0)]
    refined, exact = outside.refine([X], 0.5, deadline), outside.exact(deadline, 0.1)
    outside.release()
    assert inside.asked == [deadline, ([X], 0.5, deadline), deadline, "release"]
    for other in (refined, exact):
        assert type(other) is type(outside)
        assert other is not None
        if kind == "checked":
            with pytest.raises(RegionError, match="accuracy"):
                other([X])
        else:
            assert torch.equal(other([X])[0], EXPECTED + 1)


def test_errors_of_a_region_are_told_apart(region: Region) -> None:
    """Whatever its engine raises is a HybridError with the exception's own words; one that is already stays as it is."""
    raised: list[Exception] = [ValueError("bad\nstrides"), HybridError("as it is")]

    def fail(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise raised[0]

    with pytest.raises(HybridError, match=r"^ValueError: bad strides$") as error:
        reported(FakeRegion(region, fail))([X])
    assert error.value.__cause__ is raised.pop(0)
    with pytest.raises(HybridError, match=r"^as it is$") as same:
        reported(FakeRegion(region, fail))([X])
    assert same.value is raised[0]


@pytest.mark.parametrize("kind", ["reported", "checked"])
def test_what_leaves_a_device_unusable_is_raised_as_it_is(kind: str, region: Region) -> None:
    """Not as a HybridError, which would be recovered from."""
    error = accelerator_error("CUDA error: device-side assert triggered", 710)

    def fail(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise error

    compiled = FakeRegion(region, fail)
    outside = reported(compiled) if kind == "reported" else checked(region, "fake", compiled, strict=False)
    with pytest.raises(torch.AcceleratorError) as raised:
        outside([X])
    assert raised.value is error


def test_verify_always_compares_each_call(caplog: pytest.LogCaptureFixture, region: Region) -> None:
    """An engine that goes wrong later is found then: one warning, eager's answer, and eager from then on, with nothing held any more."""
    offset = 0.0
    compiled = Whole(region)
    compiled.change = lambda outputs: [output + offset for output in outputs]
    always = checked(region, "fake", compiled, strict=False)
    assert torch.equal(always([X])[0], EXPECTED)
    assert not compiled.asked
    offset = 1.0
    assert torch.equal(always([X])[0], EXPECTED)
    assert torch.equal(always([X])[0], EXPECTED)
    assert compiled.calls == 2
    assert compiled.asked == ["release"]
    assert len(caplog.records) == 1
    with pytest.raises(RegionError, match="accuracy"):
        checked(region, "fake", compiled, strict=True)([X])
