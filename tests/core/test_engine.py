"""The engine protocol and its bases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, Engine, EngineBase, serves
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.unavailable import UnavailableEngine


class Shortest(EngineBase):
    """No more than an engine must say."""

    name = "shortest"

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return []


class Doubled(CompiledRegionBase):
    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0] * 2]


def test_the_bases_make_whole_engines() -> None:
    """Members that a short engine leaves out have the defaults that promise least."""
    engine = Shortest()
    assert isinstance(engine, Engine)
    assert (engine.devices, engine.keep_ops, engine.keeps_deadline) == (frozenset({"cpu"}), frozenset(), False)
    assert not engine.draws
    assert engine.available()
    assert engine.compiles()
    assert (engine.version(CPU), tuple(engine.describe())) == ("", ())
    engine.prepare(7)
    region, deadline = Doubled(), Deadline(1.0)
    assert isinstance(region, CompiledRegion)
    assert region.program is None
    assert region.form == ""
    assert region.begun() is None
    assert region.refine([], 0.1, deadline) is region
    assert region.exact(deadline, 0.1) is None
    region.release()
    assert torch.equal(region([torch.ones(2)])[0], torch.full((2,), 2.0))


def test_an_engine_must_say_what_it_takes_and_how() -> None:
    """Else it cannot be made; the error names what is missing."""

    class Silent(EngineBase):
        name = "silent"

    with pytest.raises(TypeError, match=r"compile.*supports"):
        Silent()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "engine",
    [EagerEngine(), UnavailableEngine("gone", Refused(Reason.MISSING_DEPENDENCY, "no library"))],
    ids=["eager", "unavailable"],
)
def test_engines_have_every_member(engine: Engine) -> None:
    """The protocol can be checked at run time, and is not satisfied by less."""
    assert isinstance(engine, Engine)

    class Less:
        name = "less"
        supports, compile, available = engine.supports, engine.compile, engine.available

    assert not isinstance(Less(), Engine)


@pytest.mark.parametrize("device", [CPU, Device("cuda", 1), Device("meta")], ids=str)
def test_engines_serve_types_of_devices(device: Device) -> None:
    """Whatever the index; eager, which names none, serves every one."""
    assert serves(FakeEngine(devices=["cuda"]), device) == (device.type == "cuda")
    assert serves(EagerEngine(), device)
