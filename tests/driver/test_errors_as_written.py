"""Errors of a compiled call are those of the user's code, with the line that they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torch_hybrid_backend.driver.errors_as_written import as_written, raising_as_written
from torch_hybrid_backend.errors import HybridError


def _graph(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The graph that Dynamo hands a backend."""
    kept: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        kept.append(gm)
        return gm.forward

    torch.compile(function, backend=keep)(*inputs)
    return kept[0]


def _loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x * 2, target)


X, TARGET, WRONG = torch.randn(3, 4), torch.tensor([0, 1, 3]), torch.tensor([0, 7, 3])


def _raising(error: Exception) -> Callable[..., Any]:
    def planned(*_: object) -> Any:
        raise error

    return planned


def test_the_error_is_eagers() -> None:
    """Its class and text are those of the operator that the user called; a note tells the user's line, and which indices it was given."""
    call = raising_as_written(_raising(RuntimeError("index 7 is out of bounds")), _graph(_loss, X, TARGET))
    with pytest.raises(IndexError) as caught:
        call(X, WRONG)
    assert str(caught.value) == "Target 7 is out of bounds."
    (note,) = caught.value.__notes__
    assert "test_errors_as_written.py" in note
    assert "functional.cross_entropy(x * 2, target)" in note
    assert "float32 (3, 4)" in note
    assert "int64 (3,) of 0 to 7" in note
    assert caught.value.__context__ is None


def test_a_fault_that_eager_does_not_have_is_not_hidden() -> None:
    """Eager has nothing against the call: what the compiled graph raised reaches the user as it is."""
    error = RuntimeError("made of nothing")
    call = raising_as_written(_raising(error), _graph(_loss, X, TARGET))
    with pytest.raises(RuntimeError) as caught:
        call(X, TARGET)
    assert caught.value is error


@pytest.mark.parametrize("error", [HybridError("a kernel failed"), torch.OutOfMemoryError("no memory"), MemoryError()])
def test_what_is_not_the_users_comes_through(error: Exception) -> None:
    """Errors of this package and of the machine: eager is not asked."""
    call = raising_as_written(_raising(error), _graph(_loss, X, TARGET))
    with pytest.raises(type(error)) as caught:
        call(X, WRONG)
    assert caught.value is error


def test_as_written_records_gradients() -> None:
    """The graph as written records gradients, as the user's own code does."""
    x = X.clone().requires_grad_()
    (loss,) = as_written(_graph(_loss, x, TARGET))(x, TARGET)
    loss.backward()
    assert x.grad is not None


def test_hooks_on_saved_tensors_see_one_call() -> None:
    """Errors of a hook come out of the call, which is not made again."""
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        raise KeyError("mine")

    torch.compiler.reset()
    layer = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend="hybrid")
    x = torch.randn(4, 8, requires_grad=True)
    layer(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), pytest.raises(KeyError, match="mine"):
        layer(x)
    assert len(packed) == 1


def test_checkpoint_around_a_compiled_module() -> None:
    """A checkpoint ends its second forward by an error that it raises in a hook: gradients are eager's, in every step."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    layer = torch.compile(model, backend="hybrid")
    for _ in range(4):
        x = torch.randn(8, 16, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        found, x.grad = x.grad, None
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        torch.testing.assert_close(found, x.grad)
