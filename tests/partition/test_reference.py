"""Eager's outputs of a region, or why there are none."""

from __future__ import annotations

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.errors import HybridError, OperatorRefusedError
from torch_hybrid_backend.partition.reference import reference, run_eager, unable_to_run
from torch_hybrid_backend.partition.regions import partition_graph


@pytest.fixture
def region() -> Region:
    """A product and a sum."""
    (segment,) = partition_graph(trace(lambda x: x @ x + 1, torch.ones(3, 3)), [FakeEngine()], Config()).graph.segments
    return segment.region


def test_outputs_are_eagers_and_record_nothing(region: Region) -> None:
    """Both ways of running it give PyTorch's result, without gradients, though the input is a parameter."""
    x = torch.nn.Parameter(torch.randn(3, 3))
    for run in (run_eager, reference):
        (output,) = run(region, [x])
        assert not output.requires_grad
        torch.testing.assert_close(output, x.detach() @ x.detach() + 1)


def test_a_fault_of_the_values_is_the_users() -> None:
    """An error that PyTorch raises for a place outside of a tensor comes through as it is."""
    x, places = torch.randn(3, 3), torch.tensor([0, 7])
    module = trace(lambda x, i: torch.index_select(x, 0, i) + 1, x, torch.tensor([0, 1]))
    (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
    for run in (run_eager, reference):
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):
            run(segment.region, [x, places])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OperatorRefusedError("aten.sort.default", NotImplementedError("no kernel")), Reason.RUNTIME_ERROR),
        (OperatorRefusedError("aten.mm.default", RuntimeError("dtypes differ"), is_mistake=True), None),
        (MemoryError(), Reason.OUT_OF_MEMORY),
        (HybridError("other"), None),
        (NotImplementedError("no kernel"), None),
        (IndexError("index 7 is out of bounds"), None),
    ],
    ids=repr,
)
def test_only_what_lies_in_the_form_of_the_inputs_is_excused(error: Exception, code: Reason | None) -> None:
    """An operator that PyTorch refuses for such inputs, and missing memory, are reasons; any other error may be about the values."""
    if code is not None:
        assert unable_to_run(error).code == code
        return
    raised = error.error if isinstance(error, OperatorRefusedError) else error
    with pytest.raises(type(raised)) as caught:
        unable_to_run(error)
    assert caught.value is raised
