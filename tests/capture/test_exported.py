"""Programs of torch.export become graphs with what happens around them as data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_hybrid_backend.capture.exported import (
    Copied,
    ExportedGraph,
    GraphInput,
    GraphOutput,
    Rows,
    ViewOf,
    capture_exported,
)
from torch_hybrid_backend.errors import NotExportableError


def _captured(model: nn.Module, *args: torch.Tensor) -> ExportedGraph:
    with torch.no_grad():
        return capture_exported(torch.export.export(model.eval(), args), frozenset())


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("rows", torch.zeros(8, 3))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.total.add_(x * self.weight)
        self.rows.index_copy_(0, at, (x * 2)[None])
        return self.total + 1, x, x[1:], self.rows.sum(0)


def test_updates_and_results() -> None:
    """A small write stays one, another change is a copy; results that are inputs or views of them are not computed."""
    graph = _captured(_Buffers(), torch.ones(3), torch.tensor([2]))
    names = [name for name, _ in graph.tensors]
    assert sorted(names) == ["rows", "total", "weight"]
    assert graph.arguments == (0, 1)
    rows, total = names.index("rows"), names.index("total")
    copied = next(update for update in graph.updates if isinstance(update, Copied))
    written = next(update for update in graph.updates if isinstance(update, Rows))
    assert (copied.position, written.position, written.dim) == (total, rows, 0)
    assert written.index == GraphInput(4)
    x = len(names)
    assert isinstance(graph.results[0], GraphOutput)
    assert graph.results[1] == GraphInput(x)
    view = graph.results[2]
    assert isinstance(view, ViewOf)
    assert view.origin == GraphInput(x)
    assert (view.view.size, view.view.offset) == ((2,), 1)
    assert captured_static(graph) == {"weight"}


def captured_static(graph: ExportedGraph) -> set[str]:
    """The names of the tensors that the graph takes for constants."""
    placeholders = [node.name for node in graph.captured.graph_module.graph.find_nodes(op="placeholder")]
    return {
        name
        for (name, _), node in zip(graph.tensors, placeholders, strict=False)
        if node in graph.captured.static_inputs
    }


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x)) * torch.tensor([1.0, 2.0, 3.0])


def test_a_tensor_of_several_names_is_one_input() -> None:
    """Tensors that the code makes of numbers are inputs as well."""
    graph = _captured(_Tied(), torch.ones(2, 3))
    assert len(graph.tensors) == 4
    assert len({tensor.data_ptr() for _, tensor in graph.tensors}) == 4


class _Reshapes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + 1


def test_a_change_of_shape_is_refused() -> None:
    with pytest.raises(NotExportableError, match="shape or strides"):
        _captured(_Reshapes(), torch.ones(2, 3))
