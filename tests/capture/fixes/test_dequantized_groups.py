"""`dequantize_per_channel_group` with sizes known only at run time: a product with a weight says how long rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode

from torch_hybrid_backend.capture.fixes.dequantized_groups import plain_sizes_of_groups

OPERATOR = torch.ops.quantized_decomposed.dequantize_per_channel_group.default


def _dequantized(
    x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, size: int = 8
) -> torch.Tensor:
    result: torch.Tensor = OPERATOR(x, scales, zero_points, -127, 127, torch.int8, size, torch.float32)
    return result


@pytest.mark.parametrize("has_zero_points", [False, True])
def test_rows_that_a_weight_multiplies_are_as_long_as_it(recorder: Any, has_zero_points: bool) -> None:
    """The whole graph knows it: what is behind the operator, and the operator's input."""
    weight = torch.nn.Linear(16, 4, bias=False)

    def run(x: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
        return weight(torch.relu(_dequantized(x, scales, zero_points)))

    x = torch.randint(-127, 127, (64, 16), dtype=torch.int8)
    given = x, torch.rand(64, 2), torch.ones(64, 2, dtype=torch.int8) if has_zero_points else None
    with torch.no_grad():
        torch.testing.assert_close(recorder.compile(run, (OPERATOR,), dynamic=True)(*given), run(*given))
    nodes = list(recorder.graphs[0].graph_module.graph.nodes)
    (node,) = [node for node in nodes if node.target is OPERATOR]
    for value in (node, node.args[0], *node.users):
        rows, columns = map(str, value.meta["val"].shape)  # to compare a symbol with 16 would make it 16
        assert columns == "16"
        assert not rows.isdigit()


def test_what_is_raised() -> None:
    """The error is raised as the operator raises it, and only meanwhile by another kernel than PyTorch's."""
    with FakeTensorMode(), enable_python_dispatcher(), plain_sizes_of_groups(), plain_sizes_of_groups():
        x = torch.empty(4, 16, dtype=torch.int8)
        assert _dequantized(x.t(), torch.empty(16, 1), None).stride() == (4, 1)
        assert _dequantized(x, torch.empty(4, 1), None, 32).shape == (4, 16)
        with pytest.raises(AssertionError, match="divisible"):
            _dequantized(x, torch.empty(4, 2), None, 5)
    assert torch._C.DispatchKey.Meta not in OPERATOR.py_kernels
