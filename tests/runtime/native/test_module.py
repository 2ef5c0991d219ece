"""The C++ runtime as a Python module: found in any mode, and done without where it does not fit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.runtime.plans import Draft
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.constants import LiveConstants
from torch_hybrid_backend.runtime.native import module, ops, tensor_states
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.native.ops import Binding, Guard, Plan

N = 4096  # as in conftest.py


def doubling(kernels: str) -> tuple[Plan, Binding]:
    """o = 2 x over N elements, twice: into the arena, then into a fresh tensor."""
    draft = Draft()
    x, between, out = (
        draft.add_value(kind, 0, torch.float32, [N], [1])
        for kind in (ValueKind.INPUT, ValueKind.ARENA, ValueKind.FRESH)
    )
    draft.add_kernel(kernels, "double", [x, between])
    draft.add_kernel(kernels, "double", [between, out])
    plan = draft.seal(1, 0, 4 * N, [out])
    return plan, Binding(plan, Guard([]), {}, {})


@pytest.mark.parametrize(
    "mode",
    [contextlib.nullcontext, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta"), torch.no_grad],
    ids=["none", "inference", "fake", "default device", "no grad"],
)
def test_the_layout_is_learned_in_any_mode(mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    """Whatever mode the first call is made in, plain tensors are what is looked at."""
    with mode():
        assert module.native_module.__wrapped__() is not None


def test_a_torch_of_another_layout_is_read_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants follow their parameters as before where the C++ tensor is not found in its Python object."""
    monkeypatch.setattr(module, "payload_offset", lambda: None)
    monkeypatch.setattr(tensor_states, "native_module", module.native_module.__wrapped__)
    weight = torch.randn(4)
    assert tensor_states.snapshot([weight], [0], frozenset([0])) is None
    constants: LiveConstants[torch.Tensor] = LiveConstants([0], [0], lambda inputs, _: inputs[0] * 2)
    kept = constants.get([weight])
    assert constants.get([weight]) is kept
    weight.mul_(2)
    torch.testing.assert_close(constants.get([weight]), weight * 2)


def test_results_are_the_dispatchers(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The direct way and the dispatcher's return equal, fresh, plain tensors, under inference mode inference tensors."""
    plan, binding = doubling(kernels)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = torch.randn(N)
            results = [plan.run(binding, [given]) for given in (x, torch.nn.Parameter(x, requires_grad=False))]
            monkeypatch.setattr(plan, "_run_directly", ops._not_implemented)
            results.append(plan.run(binding, [x]))
            monkeypatch.undo()
        for [result] in results:
            torch.testing.assert_close(result, 4 * x, rtol=0, atol=0)
            assert type(result) is torch.Tensor
            assert result.is_inference() == (mode is torch.inference_mode)
            assert result._base is None
        assert len({result.data_ptr() for [result] in results}) == len(results)


def test_inputs_that_are_no_plain_tensors_go_through_the_dispatcher(kernels: str) -> None:
    """A subclass is taken as before; what is no tensor at all is refused by name."""

    class Labelled(torch.Tensor):
        """Overrides nothing."""

    plan, binding = doubling(kernels)
    x = torch.randn(N)
    results: Any = plan.run(binding, [x.as_subclass(Labelled)])
    torch.testing.assert_close(results[0].as_subclass(torch.Tensor), 4 * x)
    with pytest.raises(HybridError, match="Tensor"):
        plan.run(binding, [None])  # type: ignore[list-item]


def test_errors_of_a_plan_arrive(kernels: str) -> None:
    """A wrong shape, a wrong number of inputs, and objects that are gone: HybridError or TypeError with the reason, no crash."""
    plan, binding = doubling(kernels)
    with pytest.raises(HybridError, match="input 0 is float32"):
        plan.run(binding, [torch.randn(N + 1)])
    with pytest.raises(HybridError, match="takes 1 inputs, not 2"):
        plan.run(binding, [torch.randn(N)] * 2)
    native = module.native_module()
    assert native is not None
    with pytest.raises(RuntimeError, match="no plan has the handle"):
        native.run(0, binding.handle, [torch.randn(N)])
    with pytest.raises(TypeError, match="a plan, a binding and one list or two"):
        native.run(plan.handle)
    with pytest.raises(TypeError):
        native.run("plan", binding.handle, [])
    assert native.run(plan.handle, binding.handle, (torch.randn(N),)) is NotImplemented


def test_a_stale_binding_is_told(kernels: str) -> None:
    """Samples are compared in this way, too."""
    plan, _ = doubling(kernels)
    watched = torch.zeros(8)
    binding = Binding(plan, Guard([watched]), {}, {})
    assert plan.run(binding, [torch.randn(N)]) is not None
    watched.data.fill_(1)
    assert plan.run(binding, [torch.randn(N)]) is None


def test_references_are_given_back(kernels: str) -> None:
    """Inputs and results have, after a hundred calls, no more references than before."""
    plan, binding = doubling(kernels)
    inputs = [torch.randn(N)]
    counts = []
    for _ in range(100):
        results = plan.run(binding, inputs)
        assert results is not None
        counts.append(
            (sys.getrefcount(inputs), sys.getrefcount(inputs[0]), sys.getrefcount(results), sys.getrefcount(results[0]))
        )
    assert len(set(counts)) == 1
    assert results is not None
    assert results[0]._use_count() == 1


class Interruption(BaseException):
    """An interruption that a user's Ctrl-C might raise."""


def test_what_a_callback_raises_is_raised() -> None:
    """Eager's operators run in this way too, and their exceptions pass unchanged, again in the next call."""
    error = Interruption("stop")

    def fails(_: object) -> list[torch.Tensor]:
        raise error

    for callback in (lambda inputs: [inputs[0] * 2], fails):
        draft = Draft([callback])
        x = draft.add_value(ValueKind.RAW_INPUT, 0, torch.float32, [4], [1])
        out = draft.add_value(ValueKind.RETURNED, 0, torch.float32, [4], [1])
        draft.add_callback(0, [x], [out])
        plan = draft.seal(1, 0, 0, [out])
        binding = Binding(plan, Guard([]), {}, {})
        for _ in range(2):
            if callback is fails:
                with pytest.raises(Interruption) as caught:
                    plan.run(binding, [torch.ones(4)])
                assert caught.value is error
            else:
                results: Any = plan.run(binding, [torch.ones(4)])
                assert results[0].tolist() == [2.0] * 4
