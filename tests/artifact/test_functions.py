"""Functions that only Python can run, as text and back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.artifact.functions import functions_from_text, functions_to_text
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import OperatorCall, TensorArgument
from torch_hybrid_backend.core.tensor_spec import dim
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.runtime.plan_layout import NumbersTaken
from torch_hybrid_backend.runtime.steps_in_python import call_operator
from torch_hybrid_backend.runtime.symbolic_executor import WithSizes


def test_a_graph() -> None:
    """A segment of eager's with a list of results and an argument that is a dtype."""
    x = torch.randn(3, 4)
    graph = make_fx(lambda x: torch.sort(x.to(torch.float64), dim=-1), tracing_mode="fake")(x)
    (function,) = functions_from_text(functions_to_text({5: EagerGraph(graph)}))(()).values()
    values, indices = function([x])
    assert torch.equal(values, torch.sort(x.double(), dim=-1).values)
    assert torch.equal(indices, torch.sort(x.double(), dim=-1).indices)


def test_an_operator() -> None:
    call = OperatorCall(
        "aten::_to_copy", (TensorArgument(3), torch.float64, None, None, None, False, None), (7,), "cast"
    )
    found = functions_from_text(functions_to_text({0: functools.partial(call_operator, call)}))(())
    assert found[0]([torch.ones(2)])[0].dtype == torch.float64


def test_random_numbers() -> None:
    taken = Taken(CPU, (2, 3))
    assert functions_from_text(functions_to_text({1: taken}))(()) == {1: taken}


def test_for_many_sizes() -> None:
    """A graph with sizes among its inputs, arguments and outputs is one of tensors alone at each set of sizes; random numbers are counted."""

    def sorted_rows(x: torch.Tensor) -> list[Any]:
        rows = x.shape[0]
        return [torch.sort(x.view(-1))[0][: rows * 2], rows, x.new_ones(rows + 1)]

    graph = make_fx(sorted_rows, tracing_mode="symbolic")(torch.randn(4, 3))
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    n, columns = map(dim, placeholder.meta["val"].shape)
    functions = {0: WithSizes(EagerGraph(graph), (None,), (0, 2)), 1: NumbersTaken(CPU, (3, n * 2))}
    at = functions_from_text(functions_to_text(functions), [str(n), str(columns)])
    for rows in (2, 4, 9):
        found, x = at([rows, 3]), torch.randn(rows, 3)
        expected = sorted_rows(x)
        for one, other in zip(found[0]([x]), (expected[0], expected[2]), strict=True):
            assert torch.equal(one, other)
        assert found[1] == Taken(CPU, (3, rows * 2))


def test_sizes_that_depend_on_data_are_refused() -> None:
    graph = make_fx(lambda x: torch.sort(x.nonzero())[0], tracing_mode="symbolic")(torch.ones(3))
    with pytest.raises(NotExportableError, match="depends on data"):
        functions_to_text({0: EagerGraph(graph)})


def test_what_has_no_text_is_refused() -> None:
    with pytest.raises(NotExportableError, match="bound to this process"):
        functions_to_text({0: lambda tensors: tensors})


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"sizes": [], "functions": {"0": {"graph": "{\\"nodes\\": [{\\"$size\\": 7}]}"}}}',
        b'{"sizes": [], "functions": {"0": {"code": "import os"}}}',
        b'{"sizes": [], "functions": {"0": {"operator": ["os::system", "", [], []]}}}',
        b'{"sizes": [], "functions": {"0": {"graph": "{}"}}}',
    ],
)
def test_other_text_is_refused(text: bytes) -> None:
    """Only operators of ATen and graphs of them are made of a text."""
    with pytest.raises((ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)):
        functions_from_text(text)(())[0]([])
