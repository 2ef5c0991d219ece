"""warmup: compiled for several inputs before a server accepts requests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.errors import ArgumentError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.softmax(self.layer(x) * scale, dim=-1)


def test_every_shape_is_compiled_ahead() -> None:
    """A plan is made for each; the calls after it compile nothing, and are right."""
    torch._dynamo.reset()
    model = Scaled().eval()
    compiled = torch.compile(model, backend="hybrid", dynamic=False)
    with torch.no_grad():
        report = torch_hybrid_backend.warmup(
            compiled, torch.randn(1, 32), (torch.randn(8, 32), 2.0), {"x": torch.randn(4, 32), "scale": 0.5}
        )
        assert [plan.kind for plan in report.plans] == ["inference"] * 3
        assert "Scaled" in str(report)
        with torch.compiler.set_stance("fail_on_recompile"):
            for args in ((torch.randn(1, 32),), (torch.randn(8, 32), 2.0), (torch.randn(4, 32), 0.5)):
                torch.testing.assert_close(compiled(*args), model(*args))
        assert torch_hybrid_backend.warmup(compiled, torch.randn(1, 32)).plans == ()


def test_a_module_compiled_in_place() -> None:
    """`model.compile()` leaves the module what it is."""
    torch._dynamo.reset()
    model = Scaled().eval()
    model.compile(backend="hybrid")
    with torch.no_grad():
        assert len(torch_hybrid_backend.warmup(model, torch.randn(2, 32)).plans) == 1


def test_builds_off_the_call_are_waited_for() -> None:
    """The report is of plans, not of what is being compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(Scaled().eval(), backend="hybrid", options={"background": True})
    with torch.no_grad():
        report = torch_hybrid_backend.warmup(compiled, torch.randn(3, 32))
    assert len(report.plans) == 1
    assert report.compiling == 0


def test_inputs_that_torch_does_not_compile_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A single warning counts them; the others are compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(Scaled().eval(), backend="hybrid", dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        report = torch_hybrid_backend.warmup(compiled, *(torch.randn(n, 32) for n in (2, 3, 4, 5)))
    assert len(report.plans) == 2
    [told] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("warmup: ")]
    assert "2 of 4 inputs are not compiled" in told


def test_inputs_that_the_model_does_not_take_raise_its_own_error() -> None:
    """Not Dynamo's report of it."""
    torch._dynamo.reset()
    compiled = torch.compile(Scaled().eval(), backend="hybrid")
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        torch_hybrid_backend.warmup(compiled, torch.randn(2, 31))
    assert type(raised.value) is RuntimeError
    assert raised.value.__context__ is None


def test_wrong_arguments_say_what_to_do() -> None:
    """A model that is not compiled, and no inputs."""
    with pytest.raises(ArgumentError, match=r"a Scaled that is not compiled; pass what torch\.compile"):
        torch_hybrid_backend.warmup(Scaled(), torch.randn(1, 32))
    with pytest.raises(ArgumentError, match="no inputs"):
        torch_hybrid_backend.warmup(torch.compile(Scaled(), backend="hybrid"))
