"""Faults of converters: operators that fail are refused with a reason, and their replacements build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.engines.tensorrt.regions_for_tests import built, engine, region
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.partition.regions import partition_graph

pytestmark = pytest.mark.tensorrt

F = torch.nn.functional
NUMBER, MASK = torch.tensor(2.0), torch.ones(3, 4, dtype=torch.bool)
SIGNAL, IMAGE = torch.randn(2, 4, 8), torch.randn(2, 4, 8, 8)


def refusals(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> list[tuple[str, str]]:
    graph = make_fx(function, tracing_mode=mode)(*inputs)
    graph.graph.eliminate_dead_code()
    cut = partition_graph(graph, [engine()], Config(min_region_nodes=1))
    return [(refusal.code, refusal.why) for node in cut.nodes for refusal in node.refusals]


@pytest.mark.parametrize(
    ("function", "inputs", "says"),
    [
        (lambda x: x.amax(), (NUMBER,), "aten.amax.default takes no tensor without dimensions"),
        (lambda x: x.sum(), (NUMBER,), "takes no tensor without dimensions"),
        (lambda x: x.softmax(0), (NUMBER,), "takes no tensor without dimensions"),
        (lambda x: x.as_strided((1, 1), (1, 1)), (NUMBER,), "takes no tensor without dimensions"),
        (
            lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
            (IMAGE, torch.ones(4, 5, 3, 3)),
            "takes no output_padding above padding",
        ),
    ],
)
def test_what_converters_fail_for_is_refused(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], says: str
) -> None:
    """Refusals have a code and the operator's name."""
    found = refusals(function, *inputs)
    assert found
    assert all(code == Reason.ARGUMENT and says in why for code, why in found)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: x.exp() + 1, (NUMBER,)),
        (lambda x: x.as_strided((3, 2), (1, 0)) + 1, (torch.ones(3),)),
        (lambda x, y: x * y, (MASK, MASK.clone())),
        (lambda x: x.isfinite(), (IMAGE,)),
        (lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1), (SIGNAL, torch.randn(4, 5, 3))),
        (
            lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1),
            (IMAGE, torch.randn(4, 5, 3, 3)),
        ),
    ],
)
def test_what_is_near_is_taken_and_builds(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """Scalars in pointwise operators, products of bools, and transposed convolutions with weights as inputs build."""
    assert built(region(function, *inputs)).plan


def test_sizes_of_32_bits_are_exact() -> None:
    """A slice ends at a size, whose cast to int32 is exact. Releases that do not take such a slice refuse it."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        return F.glu(x, 0)

    found = refusals(halves, torch.ones(8, 4), mode="symbolic")
    assert all(code in (Reason.SYMBOLIC_SHAPE, Reason.ARGUMENT, Reason.NOT_A_TENSOR) for code, _ in found), found
    if not [code for code, _ in found if code != Reason.NOT_A_TENSOR]:
        assert built(region(halves, torch.ones(8, 4), dynamic=True)).plan
