"""Graphs with control flow are one plan: every way through them is in the file, whichever way the call took that was exported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops import scan, while_loop

from tests.artifact.control_flow_models import MODELS, Branches, Counted, Nested, leaves
from tests.artifact.exported_for_tests import FAST, exported, manifest_of
from torch_hybrid_backend import export
from torch_hybrid_backend.errors import ArgumentError, NotExportableError


@pytest.mark.parametrize("name", MODELS)
def test_every_way_through_control_flow(name: str, tmp_path: Path) -> None:
    """The file computes what eager and the compiled model do, in calls that take other ways than the exported one, and needs no PyTorch."""
    make, calls = MODELS[name]
    model = make().eval()
    report, loaded = exported(copy.deepcopy(model), calls()[0], tmp_path)
    assert report.python_parts == ()
    assert not report.needs_torch
    live = torch.compile(copy.deepcopy(model), backend="hybrid", options=FAST)
    with torch.no_grad():
        for args in calls():
            found = leaves(loaded(*args))
            for one, other in zip(found, leaves(model(*args)), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            for one, other in zip(found, leaves(live(*args)), strict=True):
                assert torch.equal(one, other)


def test_inputs_stay_as_they_are(tmp_path: Path) -> None:
    """Results are no input's memory, even where a loop runs no iteration: writes to them do not reach the input."""
    for name in ("until small", "counted", "tables"):
        make, calls = MODELS[name]
        _, loaded = exported(make().eval(), calls()[0], tmp_path)
        for args in calls():
            before = [each.clone() for each in args]
            for result in leaves(loaded(*args)):
                result.zero_()
            assert all(map(torch.equal, args, before))


@pytest.mark.parametrize("model", [Branches, Nested, Counted])
def test_many_sizes(model: type[nn.Module], tmp_path: Path) -> None:
    """A file serves all sizes of a range, in branches and loops too."""
    made = model().eval()
    rest = (torch.tensor(3),) if model is Counted else ()
    calls = [(torch.randn(n, 16) + shift, *rest) for n in (5, 2, 9) for shift in (3.0, 0.1, -3.0)]
    shapes = ({0: torch.export.Dim("n", min=2, max=16)}, *(None for _ in rest))
    report, loaded = exported(made, calls[0], tmp_path, dynamic_shapes=shapes)
    assert report.sizes == ("x with 2 to 16 in dimension 0",)
    with torch.no_grad():
        for args in calls:
            for one, other in zip(leaves(loaded(*args)), leaves(made(*args)), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="exported for 2 to 16"):
        loaded(torch.randn(17, 16), *rest)


def test_weights_of_branches_are_stored_packed(tmp_path: Path) -> None:
    """Weights that branches read packed are in the file in that form alone, also in another precision than as written."""
    (x,) = MODELS["branches"][1]()[0]
    for options in ({}, {"precision": "int8", "precision_tolerance": 1.0}):
        report, loaded = exported(Branches().eval(), (x,), tmp_path, options=options)
        sizes = [constant.sizes for constant in manifest_of(report.path).constants]
        assert (16, 16) not in sizes, sizes
        assert loaded(-x).shape == x.shape


def test_both_branches_are_explained(tmp_path: Path) -> None:
    """The report has the plan of the graph and those of both branches."""
    report, loaded = exported(Branches().eval(), MODELS["branches"][1]()[0], tmp_path)
    graphs = {plan.graph for plan in report.explanation.plans}
    assert graphs == {"Branches", "Branches.true_graph_0", "Branches.false_graph_0"}
    assert {plan.graph for plan in loaded.explain().plans} == graphs


class _Sorts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def if_true(x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x * 2, dim=0)[0]

        return torch.cond(x.sum() > 0, if_true, lambda x: x - 1, (x,)) + torch.sort(x, dim=0)[0]  # type: ignore[no-any-return]


def test_operators_of_pytorchs_within_branches(tmp_path: Path) -> None:
    """Operators that no kernel computes run in a branch as they do outside, and the report tells of them."""
    x = torch.randn(4, 8).abs()
    report, loaded = exported(_Sorts().eval(), (x,), tmp_path)
    assert report.needs_torch or report.python_parts
    for each in (x, -x):
        torch.testing.assert_close(loaded(each), _Sorts()(each))


class _Scans(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scan(lambda c, x: (c + x, c * x), x[0], x, dim=0)[1]  # type: ignore[no-any-return]


class _Maps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return map_rows(lambda row: row.relu() + 1, x)  # type: ignore[no-any-return]


class _CountsInPython(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + 1), (0, x))[1]  # type: ignore[no-any-return]


class _WritesInBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def if_true(x: torch.Tensor) -> torch.Tensor:
            self.total.add_(1)
            return x + 1

        return torch.cond(x.sum() > 0, if_true, lambda x: x - 1, (x,)) + self.total  # type: ignore[no-any-return]


class _Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Looks into a table, where x is in it."""
        return torch.cond(x.amax() < 1, lambda x: torch.arange(3.0)[x.long()], torch.sin, (x * 100,))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_Scans, "control flow cannot be written, scan.*: a file holds torch.cond and while_loop"),
        (_Maps, "control flow cannot be written, map_impl.*: a file holds torch.cond and while_loop"),
        (_CountsInPython, "while_loop.*: it carries a number from one iteration to the next: carry a tensor"),
        (_Looks, r"does not run true_graph_0, which fails on that call's tensors \(.*\): export with a call"),
        (_WritesInBranch, "writes to a tensor that it is given, or to a buffer: return the new value"),
    ],
)
def test_refusals(model: type[nn.Module], said: str, tmp_path: Path) -> None:
    """Refusals of what no file can hold say what to write instead."""
    args: tuple[Any, ...] = (torch.ones(4),)
    with pytest.raises(NotExportableError, match=said):
        export(model().eval(), args, tmp_path / "model.hybrid", options=FAST)
    assert not list(tmp_path.iterdir())
