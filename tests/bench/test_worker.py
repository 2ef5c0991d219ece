"""Checks of results, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.work_for_tests import SmallWork
from torch_hybrid_backend.bench import worker
from torch_hybrid_backend.bench.peers import by_name
from torch_hybrid_backend.bench.worker import Prepare, Reference, State, compare
from torch_hybrid_backend.errors import HybridError


def _reference(*expected: torch.Tensor) -> dict[str, object]:
    return {"expected": list(expected), "exact": [value.double() for value in expected]}


def test_answers_as_written_are_eagers_but_for_rounding() -> None:
    """NaN is right where eager has it. Another shape, or an element that is off, is wrong."""
    expected = torch.tensor([1.0, float("nan"), 3.0])
    right = compare(_reference(expected), [expected + 1e-7])
    assert right[0] == ""
    assert compare(_reference(torch.ones(3)), [torch.ones(3) + torch.tensor([0, 0, 0.5])])[0].startswith(
        "wrong answer: up to 0.5"
    )
    assert "shapes [(2,)], eager's are [(3,)]" in compare(_reference(torch.ones(3)), [torch.ones(2)])[0]


def test_gradients_are_judged_together() -> None:
    """Gradients are compared as one tensor, as some are zero up to rounding, such as that of a bias before a normalization."""
    gradients = [torch.ones(100), torch.full((4,), 1e-9)]
    off = [gradients[0] + 1e-6, -gradients[1]]
    assert compare(_reference(*gradients), off)[2] == pytest.approx(2.0)
    assert compare(_reference(*gradients), off, together=True)[2] == pytest.approx(1e-6, rel=0.1)


def test_answers_in_another_precision_are_nearer_than_zeros() -> None:
    """In another precision, only a result as far from eager's as zeros are is wrong."""
    assert compare(_reference(torch.ones(3)), [torch.ones(3) * 1.1], "int8")[0] == ""
    assert "times eager's root mean square" in compare(_reference(torch.ones(3)), [-torch.ones(3)], "int8")[0]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (RuntimeError("x raised:\nno compiler\nmore"), "RuntimeError: x raised: no compiler"),
        (HybridError("a sentence"), "a sentence"),
        (KeyError(), "KeyError"),
    ],
)  # fmt: skip
def test_errors_in_one_line(error: Exception, line: str) -> None:
    """The line names the error's class, unless the error is this package's own."""
    assert worker._in_one_line(error) == line


def test_a_reference_of_another_model_is_refused(tmp_path: Path) -> None:
    """All processes must make the same weights and inputs."""
    work = SmallWork(threads=torch.get_num_threads(), folder=tmp_path)
    Reference(work).answer(State())
    values = torch.load(work.reference)
    torch.save(values | {"made": [value + 1 for value in values["made"]]}, work.reference)
    with pytest.raises(HybridError, match="have the factory seed its random numbers"):
        Prepare(work, by_name()["eager"], tmp_path / "files").answer(State())
