"""Functions that only Python can run, as text and back."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.artifact.functions import functions_from_text, functions_to_text
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import OperatorCall, TensorArgument
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.runtime.steps_in_python import call_operator


def test_a_graph() -> None:
    """A segment of eager's with a list of results and an argument that is a dtype."""
    x = torch.randn(3, 4)
    graph = make_fx(lambda x: torch.sort(x.to(torch.float64), dim=-1), tracing_mode="fake")(x)
    (function,) = functions_from_text(functions_to_text({5: EagerGraph(graph)})).values()
    values, indices = function([x])
    assert torch.equal(values, torch.sort(x.double(), dim=-1).values)
    assert torch.equal(indices, torch.sort(x.double(), dim=-1).indices)


def test_an_operator() -> None:
    call = OperatorCall(
        "aten::_to_copy", (TensorArgument(3), torch.float64, None, None, None, False, None), (7,), "cast"
    )
    found = functions_from_text(functions_to_text({0: functools.partial(call_operator, call)}))
    assert found[0]([torch.ones(2)])[0].dtype == torch.float64


def test_random_numbers() -> None:
    taken = Taken(CPU, (2, 3))
    assert functions_from_text(functions_to_text({1: taken})) == {1: taken}


def test_what_has_no_text_is_refused() -> None:
    with pytest.raises(NotExportableError, match="bound to this process"):
        functions_to_text({0: lambda tensors: tensors})


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"0": {"code": "import os"}}',
        b'{"0": {"operator": ["os::system", "", [], []]}}',
        b'{"0": {"graph": "{}"}}',
    ],
)
def test_other_text_is_refused(text: bytes) -> None:
    """Only operators of ATen and graphs of them are made of a text."""
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, RuntimeError)):
        functions_from_text(text)[0]([])
