"""The compilation of one graph of Dynamo's: which graphs are priced whole, and what is kept of a compilation."""

from __future__ import annotations

import copy
import functools
import gc
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import CallDecision, Plan
from torch_hybrid_backend.driver.graph_compilation import GraphCompilation, Listeners, is_priced_whole
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.session import open_session
from torch_hybrid_backend.partition import training_call
from torch_hybrid_backend.partition.whole_call import PLAN


@pytest.mark.parametrize(
    ("change", "priced"),
    [
        (lambda captured, config: (captured, config), True),
        (lambda captured, _: (captured, Config(placement="estimate")), False),
        (lambda captured, _: (captured, Config(verify="always")), False),
        (lambda captured, config: (CapturedGraph(captured.graph_module, "forward", frozenset(), False), config), False),
        (
            lambda captured, config: (CapturedGraph(captured.graph_module, "inference", frozenset(), True), config),
            False,
        ),
        (lambda _, config: (_captured(lambda x: (x.sin() + torch.rand_like(x),)), config), False),
    ],
    ids=[
        "inference",
        "nothing is timed",
        "all is compared anyway",
        "training",
        "it writes to inputs",
        "it draws numbers",
    ],
)
def test_what_is_priced_whole(
    change: Callable[[CapturedGraph, Config], tuple[CapturedGraph, Config]], priced: bool
) -> None:
    """Only calls that can be repeated unnoticed, and where something is timed at all."""
    captured, config = change(_captured(lambda x: (x.sin() + 1,)), Config())
    assert is_priced_whole(captured, config) is priced


def _captured(function: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> CapturedGraph:
    return CapturedGraph(trace(function, torch.randn(4)), "inference", frozenset(), False)


@pytest.mark.parametrize("winner", [PLAN, EAGER])
def test_training_goes_on_where_the_faster_takes_over(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed step runs for both, and changes neither gradients nor statistics nor random numbers: four steps are eager's."""

    def price(key: str, plans: Sequence[Plan], calls: Mapping[str, Callable[[], object]], *_: object) -> CallDecision:
        assert [plan.kind for plan in plans] == ["forward", "backward"]
        for run in calls.values():
            run()
        return CallDecision(winner, (), ())

    monkeypatch.setattr(training_call, "price_call", price)
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 16, 4))
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    plans: list[Plan] = []
    config = Config.from_env({**os.environ, "HYBRID_PLACEMENT": "measure"})
    fast = torch.compile(twin, backend=functools.partial(compile_graph, config=config, on_plan=plans.append))
    ends = []
    for module, forward in ((model, model), (twin, fast)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(forward(torch.randn(5, 3, 8, 8)), torch.tensor([0, 1, 2, 3, 0])).backward()
            optimizer.step()
        ends.append({**module.state_dict(), "drawn next": torch.rand(3)})
    torch.testing.assert_close(ends[1], ends[0])
    assert [plan.kind for plan in plans] == ["forward", "backward"] * 2
    assert [plan.call.engine for plan in plans[2:] if plan.call] == [winner] * 2


@pytest.mark.parametrize("background", [False, True])
def test_example_inputs_are_let_go(background: bool, tmp_path: Path) -> None:
    """The compiled graph does not hold the inputs that it was compiled for."""
    config = Config(cache_dir=tmp_path, engines=("eager",), background=background)
    graph = torch.fx.symbolic_trace(lambda x: (x.sin() + 1,))
    x = torch.randn(4)
    compilation = GraphCompilation(graph, [x], config, open_session(config), Ready("graph", config), Listeners())
    compiled, seen = compilation.compiled([x]), weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    assert compiled is not None
