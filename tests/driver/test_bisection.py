"""PyTorch's compiler bisector finds what is wrong in this backend, by switching off passes and operators one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import torch_hybrid_backend
from tests.ecosystem.planted_engine import PlantedEngine
from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import prepared, session
from torch_hybrid_backend.driver.bisection import OPERATORS, PASSES, bisected_engines, bisected_passes
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.passes import pipeline
from torch_hybrid_backend.passes.context import PassContext


def program(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x @ x.t()) + 1
    gate = torch.sigmoid(y - 2)
    return torch.tanh(gate * y).sum(0)


_X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def works() -> bool:
    """True if the compiled program is right."""
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
    settings.setattr(session, "ENGINES", (("planted", lambda config, services: PlantedEngine()), *session.ENGINES[-1:]))
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

    passes: tuple[tuple[Callable[..., bool], frozenset[str], str], ...] = (
        *pipeline.PASSES[:3],
        (break_sigmoid, frozenset(), "a bug"),
        *pipeline.PASSES[3:],
    )
    settings.setattr(prepared, "PASSES", passes)
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


Limit = Callable[[str, str, int], None]


@pytest.fixture
def only(settings: pytest.MonkeyPatch) -> Limit:
    """`only(backend, subsystem, n)`: a bisector that switches off all but the first n + 1 applications of a subsystem, as by hand."""
    from torch._inductor import compiler_bisector

    def limit(name: str, subsystem: str, most: int) -> None:
        settings.setenv("TORCH_BISECT_BACKEND", name)
        settings.setenv("TORCH_BISECT_SUBSYSTEM", subsystem)
        settings.setenv("TORCH_BISECT_MAX", str(most))
        settings.setattr(
            compiler_bisector, "get_env_val", os.environ.get
        )  # PyTorch reads each variable once in a process
        settings.setattr(compiler_bisector.CompilerBisector, "bisection_enabled", True)
        compiler_bisector.subsystem_call_counter.clear()

    return limit


def test_nothing_is_in_the_way_where_no_bisector_runs() -> None:
    """Passes and engines are the very ones that were given."""
    engines = [FakeEngine()]
    assert bisected_passes(pipeline.PASSES) is pipeline.PASSES
    assert bisected_engines(engines) is engines


@pytest.mark.parametrize("most", [0, 5, len(pipeline.PASSES)])
def test_the_first_passes_stay(only: Limit, most: int) -> None:
    """In their order, the same pass twice counted twice; a bisector of operators, or of another backend, leaves all of them."""
    only("hybrid", PASSES, most)
    assert list(bisected_passes(pipeline.PASSES)) == list(pipeline.PASSES[: most + 1])
    for name, subsystem in (("hybrid", OPERATORS), ("inductor", PASSES)):
        only(name, subsystem, most)
        assert list(bisected_passes(pipeline.PASSES)) == list(pipeline.PASSES)


def test_operators_that_are_switched_off_go_to_eager(only: Limit) -> None:
    """Counted are those that the engine would take: what it refuses keeps the engine's own reason; the engine is otherwise itself."""
    only("hybrid", OPERATORS, 1)
    engine = FakeEngine("engine", refuses=["sort"])
    (bisected,) = bisected_engines([engine])
    assert (bisected.name, bisected.keep_ops, bisected.available()) == ("engine", engine.keep_ops, engine.available())
    module = trace(lambda x: torch.sort(x.sin() @ x)[0].cos() @ x, torch.ones(3, 3))
    nodes = {node.name: node for node in partition_graph(module, [bisected], Config()).nodes}
    reasons = {name: [refusal.code for refusal in node.refusals] for name, node in nodes.items()}
    assert reasons["sin"] == reasons["mm"] == []
    assert reasons["sort"] == [Reason.UNKNOWN_OPERATOR]
    assert reasons["cos"] == reasons["mm_1"] == [Reason.DISABLED]
    assert nodes["mm"].engine == "engine"
    assert nodes["mm_1"].engine == "eager"


def test_a_program_that_raises_leaves_the_bisector_as_it_was() -> None:
    """The user's error comes through, and PyTorch's list of backends is the one from before."""
    from torch._inductor.compiler_bisector import BACKENDS

    before = dict(BACKENDS)

    def raises() -> bool:
        assert "hybrid" in BACKENDS
        raise KeyError("not a question of right or wrong")

    with pytest.raises(KeyError, match="not a question"):
        torch_hybrid_backend.bisect(raises)
    assert list(before.items()) == list(BACKENDS.items())
