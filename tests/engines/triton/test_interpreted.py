"""Triton programs through everything, run by Triton's interpreter: capture, partition, printing, artifacts, the plan."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import same

import torch_hybrid_backend
from benchmarks.models import ZOO, tensors
from tests.compiling import by_estimate, fresh_dynamo
from tests.operators.execution import Bench
from tests.operators.selection import SELECTION, check
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton import interpreted as module
from torch_hybrid_backend.engines.triton.interpreted import libdevice
from torch_hybrid_backend.errors import HybridError

__all__ = ["by_estimate", "fresh_dynamo"]

pytest.importorskip("triton")

_MODELS = ("resnet50", "minilm")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="hybrid"` has the Triton engine in place of TVM; what fails raises."""
    monkeypatch.setattr(session, "_sessions", {})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HYBRID_ENGINES", "triton")
    monkeypatch.setenv("HYBRID_STRICT", "1")
    monkeypatch.setenv("HYBRID_PLACEMENT", "estimate")


# One of each path; `make test-full` has the others. Modules are those of `_MODELS`, and the strided operators' index arithmetic is TVM's.
_KINDS = ("float32", "bfloat16", "bool", "complex64 lazy")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _MODELS else pytest.mark.full) for name in ZOO]
)
def test_models_equal_eager(name: str, interpreted: None) -> None:
    """The first call and the second, on other inputs, give eager's results or are as near to float64's; no region falls back."""
    entry = ZOO[name]
    model = entry.build("small")
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        for seed in (1, 2):
            inputs = entry.inputs("small", 1, seed=seed)
            wide = exact(*(value.double() if value.is_floating_point() else value for value in inputs))
            assert same(tensors(model(*inputs)), tensors(compiled(*inputs)), tensors(wide))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    path: Path = tmp_path_factory.mktemp("kernels")
    return Bench(path, compilers=2, modes=("triton",))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in _KINDS else pytest.mark.full) for kind in SELECTION]
)
def test_operators_equal_eager(kind: str, bench: Bench) -> None:
    """The operators and modules that TVM's kernels are tested with: each has a few samples, forced through Triton's programs."""
    check(kind, bench)


def test_built_off_the_call(interpreted: None) -> None:
    """Eager answers while Triton's programs are built in the builder's thread; then they run, and dropout's numbers are eager's all along."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.4), torch.nn.GELU()).train()
    x = torch.randn(4, 16)
    options = {"background": True}
    compiled = torch.compile(model, backend="hybrid", options=options)
    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(model, x, options=options)
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = model(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(compiled(x), expected)
            assert torch_hybrid_backend.wait_for_builds(60)
    assert explanation.compiling == 1
    assert "triton" in {region.engine for region in explanation.updated().plans[0].regions}


def test_sizes_known_at_run_time(interpreted: None) -> None:
    """A compilation serves all sizes, rows of multiples of 16 elements and others; the grid is each call's own."""
    compiled = torch.compile(lambda x: (x.softmax(-1), x.sum(0)), backend="hybrid", dynamic=True)
    for shape in ((5, 7), (18, 16), (3, 40)):  # the interpreter takes a tenth of a second for a row or a column
        x = torch.randn(shape)
        with torch.no_grad():
            for got, wanted in zip(compiled(x), (x.softmax(-1), x.sum(0)), strict=True):
                torch.testing.assert_close(got, wanted)


def test_training(interpreted: None) -> None:
    """Forward and backward graphs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.GELU(), torch.nn.LayerNorm(30), torch.nn.Linear(30, 5)
    )
    twin = copy.deepcopy(model)
    x = torch.randn(16, 20)
    torch.compile(model, backend="hybrid")(x).square().mean().backward()
    twin(x).square().mean().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_what_the_interpreter_lacks_is_named() -> None:
    with pytest.raises(HybridError, match=r"no substitute for libdevice\.cyl_bessel_i0"):
        libdevice.cyl_bessel_i0  # noqa: B018


def test_a_kernel_that_fails_is_named(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The region falls back to eager, and the program is in the log."""
    monkeypatch.setenv("HYBRID_STRICT", "0")
    monkeypatch.setitem(module._UNARY, "tan", None)  # type: ignore[arg-type]
    x = torch.randn(50)
    torch.testing.assert_close(torch.compile(torch.tan, backend="hybrid")(x), torch.tan(x))
    assert "libdevice.tan" in caplog.text


def test_the_plan_says_so(interpreted: None) -> None:
    """The engine is named."""
    x = torch.randn(5, 7)
    plan = torch_hybrid_backend.explain(lambda x: torch.softmax(x + 1, -1), x).plans[0]
    assert {region.engine for region in plan.regions} == {"triton"}
