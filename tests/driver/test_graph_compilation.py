"""The compilation of one graph of Dynamo's: which graphs are priced whole, and what is kept of a compilation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.driver.graph_compilation import GraphCompilation, Listeners, is_priced_whole
from torch_hybrid_backend.driver.ready import Ready
from torch_hybrid_backend.driver.session import open_session


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
