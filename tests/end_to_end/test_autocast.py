"""Models under autocast on the CPU: layers of low precision are right, and oneDNN's operators compete for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn
from torch._dynamo.utils import same

import torch_hybrid_backend
from torch_hybrid_backend.codegen import library_probe
from torch_hybrid_backend.core.plan import Cost
from torch_hybrid_backend.core.program import OperatorCall, Program
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.partition import placement, whole_call
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


class Network(nn.Module):
    """Convolutions with batch norms, and a classifier. x: (batch, 3, 40, 40).  Returns: (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2),
            nn.ReLU(),
        )
        self.classes = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classes(self.features(x).mean((2, 3)))
        return result


X = torch.randn(
    2, 3, 40, 40, generator=torch.Generator().manual_seed(1)
)  # less work is not worth trying alternatives for


def _assert_near(result: torch.Tensor, model: nn.Module) -> None:
    """Assert that a result is as near to float64 as eager under autocast is, by the accuracy gate's rule."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(X)
    assert same(expected, result, copy.deepcopy(model).double()(X.double()), tol=1e-4)


def _multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@pytest.mark.parametrize("faster", ["operators", "kernels"])
def test_the_faster_of_operators_and_kernels_runs_a_layer(faster: str, settings: pytest.MonkeyPatch, tmp_path) -> None:
    """Results are eager's whichever wins, also after the weights changed; the plan names the operators."""
    if faster == "operators" and not _multiplies_bfloat16():
        pytest.skip("oneDNN does not multiply bfloat16 on this processor")
    settings.setenv("HYBRID_PLACEMENT", "measure")
    settings.setenv("HYBRID_STRICT", "1")
    settings.setenv("HYBRID_CACHE_DIR", str(tmp_path))

    class Timed(ProgramRunner):
        """An operator takes as long as the test says, what is around it next to nothing, and kernels without it 1000 us."""

        def __init__(self, program: Program) -> None:
            super().__init__(program)
            self._kernels = program.steps

        def kernel_us(self, inputs: Sequence[torch.Tensor]) -> list[float]:
            super().kernel_us(inputs)
            calls = [isinstance(kernel, OperatorCall) for kernel in self._kernels]
            return [operator_us if call else 1.0 if any(calls) else 1000.0 for call in calls]

    operator_us = 1.0 if faster == "operators" else 5000.0

    def costs(key: str, contenders: Mapping[str, str], *_: object) -> tuple[Cost, ...]:
        return tuple(Cost(name, float(number), "measured") for number, name in enumerate(contenders))  # eager is last

    settings.setattr(placement, "priced", costs)
    settings.setattr(whole_call, "priced", costs)
    settings.setattr(session, "ProgramRunner", Timed)
    settings.setattr(session, "_sessions", {})
    settings.setattr(library_probe, "operator_us", lambda variant, device, timer: operator_us)
    model = Network().eval()
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            explanation = torch_hybrid_backend.explain(model, X)
        compiled = torch.compile(model, backend="hybrid")
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    result = compiled(X)
                _assert_near(result, model)
            model.features[0].weight.mul_(1.5)
            model.classes.weight.mul_(0.5)
    names = {name for plan in explanation.plans for region in plan.regions for name in region.operators}
    assert any("mkldnn::" in name for name in names) == (faster == "operators"), explanation
