"""PyTorch's compiler bisector finds what is wrong in this backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_hybrid_backend
from tests.ecosystem.planted_engine import PlantedEngine
from torch_hybrid_backend import backend, session
from torch_hybrid_backend.passes import pipeline
from torch_hybrid_backend.passes.context import PassContext


def program(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.t()) + 1
    gate = torch.sigmoid(y - 2)
    return torch.tanh(gate * y).sum(0)


_X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def works() -> bool:
    """Whether the compiled program is right."""
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.allclose(torch.compile(program, backend="hybrid")(_X), program(_X), rtol=1e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Settings as on a new user's machine, but that nothing is timed: regions as small as these would be eager's."""
    for name in [name for name in os.environ if name.startswith("HYBRID_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "bisected"))
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")
    torch._dynamo.reset()
    yield monkeypatch
    torch._dynamo.reset()


@pytest.fixture
def planted(settings: pytest.MonkeyPatch) -> Iterator[None]:
    """The only engine has a bug, and nobody checks results."""
    settings.setattr(session, "ENGINES", (("planted", lambda config, store: PlantedEngine()), *session.ENGINES[-1:]))
    settings.setenv("HYBRID_VERIFY", "off")
    session._sessions.clear()
    yield
    session._sessions.clear()


@pytest.mark.usefixtures("planted")
def test_finds_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """The operator that an engine computes wrongly is named, with the engine and the user's line."""
    assert not works()
    result = torch_hybrid_backend.bisect(works)
    assert result is not None
    assert (result.backend, result.subsystem) == ("hybrid", "operators")
    assert result.debug_info is not None
    assert "aten.sigmoid.default (sigmoid) on planted" in result.debug_info
    assert "gate = torch.sigmoid(y - 2)" in result.debug_info
    assert "sigmoid" in capsys.readouterr().out


def test_finds_the_pass(settings: pytest.MonkeyPatch) -> None:
    """The pass that changes what the program computes is named."""

    def break_sigmoid(gm: torch.fx.GraphModule, _: PassContext) -> bool:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            node.target = torch.ops.aten.relu.default
        return True

    passes: tuple[tuple[Callable[..., bool], str], ...] = (
        *pipeline.PASSES[:3],
        (break_sigmoid, "a bug"),
        *pipeline.PASSES[3:],
    )
    settings.setattr(backend, "PASSES", passes)
    result = torch_hybrid_backend.bisect(works)
    assert result is not None
    assert (result.backend, result.subsystem, result.debug_info) == ("hybrid", "passes", "break_sigmoid")


@pytest.mark.full  # inductor compiles, too
def test_finds_nothing_where_nothing_is_wrong() -> None:
    """A program that every backend gets right has no result, and the bisector leaves no trace."""
    from torch._inductor.compiler_bisector import BACKENDS, CompilerBisector

    assert torch_hybrid_backend.bisect(works) is None
    assert "hybrid" not in BACKENDS
    assert not CompilerBisector.bisection_enabled
    assert works()
