"""Arguments and results of models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from torch_hybrid_backend.bench.calls import FunctionModule, Inputs, as_tensors_only, tensors
from torch_hybrid_backend.errors import ArgumentError


@dataclass
class _Output:
    logits: torch.Tensor
    states: list[torch.Tensor]
    loss: None = None


def test_tensors_of_outputs_of_any_form() -> None:
    """Tensors in nested dicts, tuples and dataclasses are found in a stable order; other values are left out."""
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = tensors({"out": _Output(a, [b]), "more": (c, 3, None)})
    assert [value.numel() for value in found] == [1, 2, 3]


def test_a_batch_is_repeated_or_cut() -> None:
    """Rows of every input are repeated or cut, also in nested inputs. Tensors with one row or no dimension stay."""
    x = torch.arange(6.0).reshape(3, 2)
    inputs = Inputs((x, {"mask": x[:, 0] > 1}), {"positions": torch.arange(2)[None], "scale": torch.tensor(2.0)})
    more, fewer = inputs.batched(5), inputs.batched(2)
    assert (inputs.batch, more.batch, fewer.batch) == (3, 5, 2)
    assert torch.equal(more.args[0], x[[0, 1, 2, 0, 1]])
    assert torch.equal(fewer.args[1]["mask"], x[:2, 0] > 1)
    assert more.kwargs["positions"].shape == (1, 2)
    assert more.kwargs["scale"].ndim == 0


def test_a_batch_keeps_the_memory_format() -> None:
    """A batch keeps the memory format, so that a channels-last image is timed as such."""
    image = torch.randn(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert Inputs((image,)).batched(2).args[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("given", "shapes"), [((torch.zeros(2, 4), torch.zeros(3)), r"\(2, 4\), \(3,\)"), ((torch.tensor(1.0),), r"\(\)")]
)
def test_inputs_without_a_batch_dimension_are_refused(given: tuple[torch.Tensor, ...], shapes: str) -> None:
    """The error names the shapes and says what to do."""
    with pytest.raises(ArgumentError, match=f"--batch 8 needs .* {shapes}; give the factory a parameter `batch`"):
        Inputs(given).batched(8)


class _Model(nn.Module):
    def forward(self, x: torch.Tensor, times: int, *, bias: dict[str, torch.Tensor]) -> _Output:
        return _Output(x * times, [bias["b"] + x])


def test_a_model_of_tensors_alone() -> None:
    """Names, nesting and numbers become part of the model, and torch.export accepts the model."""
    inputs = Inputs((torch.ones(2), 3), {"bias": {"b": torch.full((2,), 5.0)}})
    model, flat = as_tensors_only(_Model().eval(), inputs)
    assert not model.training
    expected = [torch.full((2,), 3.0), torch.full((2,), 6.0)]
    exported = torch.export.export(model, flat.args).module()
    for found in (flat.call(model), flat.call(exported)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_inputs_in_another_dtype() -> None:
    """Only floating-point tensors change."""
    found = Inputs((torch.zeros(1), torch.zeros(1, dtype=torch.long)), {"n": 3}).floats(torch.float64)
    assert [value.dtype for value in found.tensors()] == [torch.float64, torch.int64]
    assert found.kwargs == {"n": 3}


def test_a_function_as_a_module() -> None:
    """A function becomes a module in evaluation mode."""
    module = FunctionModule(lambda a, b: a * b)
    assert Inputs((2,), {"b": 3}).call(module) == 6
    assert not module.training  # no note about training mode for a function
