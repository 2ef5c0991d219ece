"""The name of what Dynamo traces."""

from __future__ import annotations

import torch
from torch import nn

from torch_hybrid_backend.capture.model_name import model_name


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)


class Unusual(nn.Module):
    def forward(me, x: torch.Tensor) -> torch.Tensor:  # noqa: N805
        return torch.sin(x)


def _names(model: object) -> list[str]:
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        found.append(model_name())
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(3))  # type: ignore[call-overload]
    return found


def test_a_module_has_the_name_of_its_class() -> None:
    """Those of torch.nn too. Where a function calls it, the function is traced; after a graph break the rest of a frame."""
    assert _names(nn.Sequential(nn.Linear(3, 3))) == ["Sequential"]
    assert _names(Unusual()) == ["Unusual"]
    assert _names(Halves()) == ["Halves", "forward from line 14"]
    layer = nn.Linear(3, 3)

    def squared(x: torch.Tensor) -> torch.Tensor:
        return layer(x) ** 2

    assert _names(squared) == ["squared"]


def test_nothing_is_traced() -> None:
    """A backend that is called by hand."""
    assert model_name() == "a graph"
