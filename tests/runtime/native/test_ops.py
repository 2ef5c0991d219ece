"""The C++ plan, guard and binding, driven directly."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.runtime.plans import Draft
from torch_hybrid_backend.config import CUDA_DRIVER
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.program import DeviceLaunch, OperatorArgument, OperatorCall, TensorArgument
from torch_hybrid_backend.errors import CacheError, HybridError
from torch_hybrid_backend.runtime.native import ops
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.native.ops import (
    CALLS_PER_ROUND,
    Binding,
    Guard,
    GuardKind,
    Plan,
    huffman_decode,
    huffman_encode,
    use_cuda_driver,
    watches_writes,
)
from torch_hybrid_backend.storage.store import Store

N = 4096  # as in conftest.py
META, CUDA = Device("meta"), Device("cuda")
F32 = torch.float32


def flat(draft: Draft, kind: ValueKind, payload: int = 0, elements: int = N) -> int:
    return draft.add_value(kind, payload, F32, [elements], [1])


def unbound(plan: Plan) -> Binding:
    return Binding(plan, Guard([]), {}, {})


def chain(kernels: str) -> Plan:
    """out = scratch(2 x) + x, with two buffers in the arena."""
    draft = Draft()
    x = flat(draft, ValueKind.INPUT)
    doubled, plus_one = flat(draft, ValueKind.ARENA, 0), flat(draft, ValueKind.ARENA, 4 * N)
    out = flat(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "double", [x, doubled])
    draft.add_kernel(kernels, "scratch", [doubled, plus_one])
    draft.add_kernel(kernels, "add", [plus_one, x, out])
    return draft.seal(1, 0, 8 * N, [out])


@pytest.mark.usefixtures("threads")
def test_kernels_run_over_arena_workspace_and_fresh_outputs(kernels: str) -> None:
    """A plan chains kernels through the arena; each call returns a tensor of its own."""
    plan = chain(kernels)
    binding = unbound(plan)
    x = torch.randn(N)
    [first] = plan.run(binding, [x])
    [second] = plan.run(binding, [x + 1])
    torch.testing.assert_close(first, 3 * x + 1)
    torch.testing.assert_close(second, 3 * (x + 1) + 1)


def test_threads_share_a_plan(kernels: str) -> None:
    """Four threads run one plan at once, each with an arena of its own."""
    plan = chain(kernels)
    binding = unbound(plan)

    def work(seed: int) -> bool:
        x = torch.full((N,), float(seed))
        return all(bool((plan.run(binding, [x])[0] == 3 * seed + 1).all()) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_kernel_inside_a_parallel_region_still_runs(kernels: str) -> None:
    """A callback runs a plan of its own while the outer plan runs: re-entrant on one thread, too."""
    inner = chain(kernels)
    inner_binding = unbound(inner)
    outer = Draft([lambda inputs: inner.run(inner_binding, [inputs[0]])])
    x = flat(outer, ValueKind.RAW_INPUT)
    out = flat(outer, ValueKind.RETURNED)
    outer.add_callback(0, [x], [out])
    plan = outer.seal(1, 0, 0, [out])
    given = torch.randn(N)
    torch.testing.assert_close(plan.run(unbound(plan), [given])[0], 3 * given + 1)


def test_ranges_are_shown_by_a_profiler(kernels: str) -> None:
    """Under torch.profiler the steps of a range, kernels by their symbols, lie inside it; without one nothing is recorded."""
    draft = Draft([lambda inputs: [inputs[0] * 3]])
    x, middle = flat(draft, ValueKind.INPUT), flat(draft, ValueKind.FRESH)
    out = flat(draft, ValueKind.RETURNED)
    draft.add_range("first")
    draft.add_kernel(kernels, "double", [x, middle])
    draft.add_range("nothing runs here")
    draft.add_range("second")
    draft.add_callback(0, [middle], [out])
    plan = draft.seal(1, 0, 0, [out])
    binding, given = unbound(plan), torch.randn(N)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.testing.assert_close(plan.run(binding, [given])[0], 6 * given)
    torch.testing.assert_close(plan.run(binding, [given])[0], 6 * given)
    parents = {event.name: event.cpu_parent.name for event in profiler.events() if event.cpu_parent is not None}
    assert parents["double"] == "first"
    assert parents["torch_hybrid_backend::run_segment"] == "second"
    assert parents["first"] == parents["second"] == "torch_hybrid_backend::plan_run"
    assert [event.name for event in profiler.events()].count("first") == 1


def test_inputs_with_other_strides_are_copied(kernels: str) -> None:
    """A kernel sees the strides it was built for, whatever the strides of the input."""
    draft = Draft()
    x = draft.add_value(ValueKind.INPUT, 0, F32, [64, 64], [64, 1])
    out = draft.add_value(ValueKind.FRESH, 0, F32, [64, 64], [1, 64])
    draft.add_kernel(kernels, "double", [x, out])
    plan = draft.seal(1, 0, 0, [out])
    given = torch.randn(64, 64)
    [result] = plan.run(unbound(plan), [given.t()])
    assert result.stride() == (1, 64)
    torch.testing.assert_close(result.t(), 2 * given.t())


def test_an_output_may_alias_an_input_or_another_output(kernels: str) -> None:
    """Aliases share memory with what they alias and have their own shape."""
    draft = Draft()
    x = flat(draft, ValueKind.INPUT)
    out = flat(draft, ValueKind.FRESH)
    view_of_x = draft.add_value(ValueKind.ALIAS, x, F32, [64, 64], [64, 1])
    view_of_out = draft.add_value(ValueKind.ALIAS, out, F32, [2, N // 2], [N // 2, 1])
    draft.add_kernel(kernels, "double", [x, out])
    plan = draft.seal(1, 0, 0, [x, view_of_x, out, view_of_out])
    given = torch.randn(2 * N)[N:]
    same, input_view, result, result_view = plan.run(unbound(plan), [given])
    assert same is given
    assert input_view.data_ptr() == given.data_ptr()
    assert input_view.shape == (64, 64)
    assert result_view.data_ptr() == result.data_ptr()
    torch.testing.assert_close(result_view, 2 * given.view(2, -1))


def test_inputs_that_do_not_fit_are_refused(kernels: str) -> None:
    """Another shape, dtype or number of inputs is an error that names both sides."""
    plan = chain(kernels)
    binding = unbound(plan)
    with pytest.raises(HybridError, match=r"input 0 is float32\(3\).*built for float32\(4096\)"):
        plan.run(binding, [torch.randn(3)])
    with pytest.raises(HybridError, match="input 0 is float64"):
        plan.run(binding, [torch.randn(N, dtype=torch.float64)])
    with pytest.raises(HybridError, match="takes 1 inputs, not 2"):
        plan.run(binding, [torch.randn(N), torch.randn(N)])


def test_a_failing_kernel_is_named(kernels: str) -> None:
    """A kernel that gets no scratch memory fails by name and status; the plan, and other kernels, can run on."""
    draft = Draft()
    x, out = flat(draft, ValueKind.INPUT), flat(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "starve", [x, out])
    plan = draft.seal(1, 0, 0, [out])
    given = torch.randn(N)
    for _ in range(2):
        with pytest.raises(HybridError, match=r"kernel starve failed with status -1: .* too little memory"):
            plan.run(unbound(plan), [given])
    working = chain(kernels)
    torch.testing.assert_close(working.run(unbound(working), [given])[0], 3 * given + 1)


def test_missing_libraries_and_kernels_are_named(kernels: str, tmp_path: Path) -> None:
    """A deleted library, one that is none, and an unknown symbol are errors when the plan is built."""

    def build(library: str, symbol: str) -> Plan:
        draft = Draft()
        draft.add_kernel(library, symbol, [flat(draft, ValueKind.INPUT)])
        return draft.seal(1, 0, 0, [])

    with pytest.raises(HybridError, match=r"cannot open the kernel library .*gone\.so"):
        build(str(tmp_path / "gone.so"), "double")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(HybridError, match=r"cannot open the kernel library .*text\.so"):
        build(str(tmp_path / "text.so"), "double")
    with pytest.raises(HybridError, match='has no kernel "halve"'):
        build(kernels, "halve")


def test_operators_read_constants_and_are_read_by_kernels(kernels: str) -> None:
    """An operator's tensors are inputs and constants, oneDNN's packed ones included; kernels read its result."""
    x, weight = torch.randn(64, 32), torch.randn(64, 32)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)
    draft = Draft()
    given = draft.add_value(ValueKind.INPUT, 0, F32, [64, 32], [32, 1])
    constant = flat(draft, ValueKind.CONSTANT, 0, 64 * 32)
    product = draft.add_value(ValueKind.RETURNED, 0, F32, [64, 64], [64, 1])
    out = flat(draft, ValueKind.FRESH)
    arguments = (TensorArgument(given), TensorArgument(constant), None, "none", (), None)
    draft.add(OperatorCall("mkldnn::_linear_pointwise", arguments, (product,), "linear"))
    draft.add_kernel(kernels, "double", [product, out])
    plan = draft.seal(1, 1, 0, [out])
    [result] = plan.run(Binding(plan, Guard([]), {0: packed}, {}), [x])
    torch.testing.assert_close(result, (2 * x @ weight.t()).flatten())
    with pytest.raises(HybridError, match="constant slot 0 is borrowed"):
        plan.run(Binding(plan, Guard([]), {}, {0: 0}), [x])


def test_operators_read_borrowed_constants_where_they_lie() -> None:
    """A tensor is made over the address of each binding, with the sizes and strides that the plan has for it."""
    draft = Draft()
    given = draft.add_value(ValueKind.INPUT, 0, F32, [4, 32], [32, 1])
    constant = draft.add_value(ValueKind.CONSTANT, 0, F32, [8, 32], [1, 8])
    product = draft.add_value(ValueKind.RETURNED, 0, F32, [4, 8], [8, 1])
    arguments = (TensorArgument(given), TensorArgument(constant), None)
    draft.add(OperatorCall("aten::linear", arguments, (product,), "linear"))
    plan = draft.seal(1, 1, 0, [product])
    x, weights = torch.randn(4, 32), [torch.randn(32, 8) for _ in range(2)]
    for weight in (*weights, *weights):
        [result] = plan.run(Binding(plan, Guard([]), {}, {0: weight.data_ptr()}), [x])
        torch.testing.assert_close(result, x @ weight)


def test_operators_that_fail_say_so() -> None:
    """Operators that could never run are refused while building; what the operator raises, and another result than expected, by the run."""

    def plan_of(name: str, *others: OperatorArgument, tensors: int = 1) -> Plan:
        draft = Draft()
        values = [flat(draft, ValueKind.INPUT, position) for position in range(tensors)]
        result = flat(draft, ValueKind.RETURNED)
        draft.add(OperatorCall(name, (*map(TensorArgument, values), *others), (result,), ""))
        return draft.seal(tensors, 0, 0, [result])

    draft = Draft()
    arena, result = flat(draft, ValueKind.ARENA), flat(draft, ValueKind.RETURNED)
    draft.add(OperatorCall("aten::abs", (TensorArgument(arena),), (result,), ""))
    with pytest.raises(HybridError, match="must be a tensor"):
        draft.seal(0, 0, 4 * N, [])
    draft = Draft()
    fresh, result = flat(draft, ValueKind.FRESH), flat(draft, ValueKind.RETURNED)
    draft.add(OperatorCall("aten::abs", (TensorArgument(result),), (fresh,), ""))
    with pytest.raises(HybridError, match="only returned values"):
        draft.seal(0, 0, 0, [])
    a, b = torch.randn(N), torch.randn(N)
    plan = plan_of("aten::maximum", tensors=2)
    torch.testing.assert_close(plan.run(unbound(plan), [a, b])[0], torch.maximum(a, b))
    plan = plan_of("aten::diagflat", 1)
    with pytest.raises(HybridError, match=r"the result of aten::diagflat is .* instead of"):
        plan.run(unbound(plan), [a])
    plan = plan_of("aten::narrow_copy", 7, 0, 1)
    with pytest.raises(HybridError):
        plan.run(unbound(plan), [a])


def test_plans_that_could_never_run_are_refused(kernels: str) -> None:
    """Building checks what running would trip over."""

    def refused(
        match: str, add: Callable[[Draft, int], object], outputs: bool = False, arena_bytes: int = 4 * N
    ) -> None:
        draft = Draft([lambda inputs: inputs])
        arena = flat(draft, ValueKind.ARENA)
        add(draft, arena)
        with pytest.raises(HybridError, match=match):
            draft.seal(0, 0, arena_bytes, [arena] if outputs else [])

    refused("no value 9", lambda draft, arena: draft.add_kernel(kernels, "double", [arena, 9]))
    refused("must be a tensor", lambda draft, arena: draft.add_callback(0, [arena], []))
    refused("must be a tensor", lambda draft, arena: None, outputs=True)
    refused("outside the arena", lambda draft, arena: None, arena_bytes=4 * N - 64)
    refused("fit in it", lambda draft, arena: draft.add_value(ValueKind.ALIAS, arena, F32, [N + 1], [1]))
    refused("reads an input", lambda draft, arena: draft.add_value(ValueKind.INPUT, 0, F32, [N], [1]))


class EagerError(ValueError):
    """An error of the user's own."""


def test_callbacks_run_between_kernels(kernels: str) -> None:
    """A callback reads fresh tensors, and kernels read what it returns."""
    seen: list[torch.Tensor] = []

    def callback(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        seen.append(inputs[0])
        return (inputs[0] - 5,)

    draft = Draft([callback])
    x, doubled = flat(draft, ValueKind.INPUT), flat(draft, ValueKind.FRESH)
    returned, out = flat(draft, ValueKind.RETURNED), flat(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "double", [x, doubled])
    draft.add_callback(0, [doubled], [returned])
    draft.add_kernel(kernels, "double", [returned, out])
    plan = draft.seal(1, 0, 0, [out])
    binding = unbound(plan)
    given = torch.randn(N)
    torch.testing.assert_close(plan.run(binding, [given])[0], 4 * given - 10)
    plan.run(binding, [given + 1])
    torch.testing.assert_close(seen[0], 2 * given)


@pytest.mark.parametrize("profiled", [False, True])
def test_callbacks_get_conjugated_views_as_they_are(profiled: bool) -> None:
    """A lazily conjugated or negated tensor reaches a callback with its bit, in its own memory, and comes back so."""
    seen: list[torch.Tensor] = []

    def callback(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(inputs)
        return [inputs[0].mT]

    draft = Draft([callback])
    given = [
        draft.add_value(ValueKind.RAW_INPUT, 0, "complex64", [2, 3], [3, 1]),
        draft.add_value(ValueKind.RAW_INPUT, 1, "float32", [2], [2]),
    ]
    out = draft.add_value(ValueKind.RETURNED, 0, "complex64", [3, 2], [1, 3])
    draft.add_callback(0, given, [out])
    plan = draft.seal(2, 0, 0, [out])
    z = torch.randn(2, 3, dtype=torch.complex64).conj()
    x = torch.randn(2, dtype=torch.complex64).conj().imag
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        found = plan.run(unbound(plan), [z, x])
    assert found is not None
    for a, b in zip((*seen, *found), (z, x, z.mT), strict=True):
        assert (a.is_conj(), a.is_neg(), a.data_ptr()) == (b.is_conj(), b.is_neg(), b.data_ptr())


def test_conjugated_constants_are_guarded_where_they_lie() -> None:
    """Not in a copy of their values, which nobody keeps."""
    memory = torch.randn(16, dtype=torch.complex64)
    guard = Guard([memory.conj()], GuardKind.EVERY_BYTE)
    assert not guard.is_stale()
    memory.numpy()[3] += 1
    assert guard.is_stale()


def test_what_a_callback_returns_is_checked_and_restrided() -> None:
    """Strides are restored by a copy; another shape or number of tensors is an error."""
    returns: list[torch.Tensor] = []
    draft = Draft([lambda inputs: returns])
    out = draft.add_value(ValueKind.RETURNED, 0, F32, [2, 3], [3, 1])
    draft.add_callback(0, [], [out])
    plan = draft.seal(0, 0, 0, [out])
    binding = unbound(plan)
    with pytest.raises(HybridError, match="segment 0 returned 0 values instead of 1"):
        plan.run(binding, [])
    returns.append(torch.randn(3, 2).t())
    [result] = plan.run(binding, [])
    assert result.stride() == (3, 1)
    torch.testing.assert_close(result, returns[0])
    returns[0] = torch.randn(2, 2)
    with pytest.raises(HybridError, match=r"output 0 of segment 0 is float32\(2, 2\)"):
        plan.run(binding, [])


def test_values_that_are_not_on_the_cpu() -> None:
    """Callbacks read and return them, aliases and outputs share them, and other strides are restored where they are."""
    seen: list[torch.Tensor] = []

    def callback(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(inputs)
        return [torch.empty(3, 2, device="meta").t(), inputs[0] + 1]

    draft = Draft([callback])
    x = draft.add_value(ValueKind.RAW_INPUT, 0, F32, [2, 3], [3, 1], device=META)
    restrided = draft.add_value(ValueKind.RETURNED, 0, F32, [2, 3], [3, 1], device=META)
    returned = draft.add_value(ValueKind.RETURNED, 0, F32, [2, 3], [3, 1], device=META)
    flattened = draft.add_value(ValueKind.ALIAS, returned, F32, [6], [1], device=META)
    draft.add_callback(0, [x], [restrided, returned])
    plan = draft.seal(1, 0, 0, [x, restrided, returned, flattened])
    given = torch.empty(2, 3, device="meta")
    outputs = plan.run(unbound(plan), [given])
    assert outputs is not None
    assert seen[0] is outputs[0] is given
    assert [(str(o.device), tuple(o.shape), o.stride()) for o in outputs[1:]] == [
        ("meta", (2, 3), (3, 1)),
        ("meta", (2, 3), (3, 1)),
        ("meta", (6,), (1,)),
    ]
    with pytest.raises(
        HybridError, match=r"input 0 is float64.* on another device than the CPU .*, but the plan was built for"
    ):
        plan.run(unbound(plan), [given.double()])


def test_kernels_stay_on_the_cpu(kernels: str) -> None:
    """A plan whose kernels would read or write another device's memory is not built, and its inputs and results cannot be moved there."""
    draft = Draft()
    elsewhere = draft.add_value(ValueKind.INPUT, 0, F32, [N], [1], device=META)
    draft.add_kernel(kernels, "double", [elsewhere, flat(draft, ValueKind.FRESH)])
    with pytest.raises(HybridError, match=r"a kernel on the CPU cannot read a value that is elsewhere"):
        draft.seal(1, 0, 0, [])
    draft = Draft()
    draft.add_value(ValueKind.ARENA, 0, F32, [N], [1], device=META)
    with pytest.raises(HybridError, match="outside the arena"):
        draft.seal(0, 0, 4 * N, [])
    draft = Draft([lambda inputs: [torch.empty(N, device="meta")]])
    x, out, returned = (flat(draft, kind) for kind in (ValueKind.INPUT, ValueKind.FRESH, ValueKind.RETURNED))
    draft.add_kernel(kernels, "double", [x, out])
    draft.add_callback(0, [], [returned])
    plan = draft.seal(1, 0, 0, [out, returned])
    with pytest.raises(HybridError, match=r"input 0 is .* on another device than the CPU"):
        plan.run(unbound(plan), [torch.empty(N, device="meta")])
    with pytest.raises(HybridError, match=r"output 0 of segment 0 is .* on another device than the CPU .* instead of"):
        plan.run(unbound(plan), [torch.randn(N)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")
def test_launches_need_a_gpu(tmp_path: Path) -> None:
    """The driver loads a plan's modules when the plan is made: without one, that says so. Its library is the one that was told."""
    (tmp_path / "fill.cubin").write_bytes(b"a cubin")
    draft = Draft()
    out = draft.add_value(ValueKind.FRESH, 0, F32, [N], [1], device=CUDA)
    draft.add(DeviceLaunch(str(tmp_path / "fill.cubin"), "fill", (out,), 1, (1, 1, 1), 128), CUDA)
    use_cuda_driver("/nowhere/libcuda.so")
    with pytest.raises(HybridError, match=r"without NVIDIA's driver: /nowhere/libcuda\.so"):
        draft.seal(0, 0, 0, [out])
    use_cuda_driver(CUDA_DRIVER)
    with pytest.raises(HybridError, match=r"without NVIDIA's driver: libcuda\.so\.1|failed: CUDA_ERROR_"):
        draft.seal(0, 0, 0, [out])


# A driver whose functions all succeed and do nothing.
_NOTHING = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
_FIND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(lambda _: ctypes.cast(_NOTHING, ctypes.c_void_p).value)


@dataclass(frozen=True, slots=True)
class IdleLaunch(DeviceLaunch):
    """A launch on the CPU by that driver."""

    def describe(self) -> dict[str, Any]:
        return {**DeviceLaunch.describe(self), "driver": ctypes.cast(_FIND, ctypes.c_void_p).value}


def test_modules_are_verified(tmp_path: Path) -> None:
    """Modules are verified as libraries are: the opened one is the one that was put into the store."""
    module = Store(tmp_path / "cache").put("kernels", "key", b"a cubin", ".cubin")

    def build(path: str) -> Plan:
        draft = Draft()
        out = draft.add_value(ValueKind.FRESH, 0, F32, [N], [1])
        draft.add(IdleLaunch(path, "fill", (out,), 1, (1, 1, 1), 128))
        return draft.seal(0, 0, 0, [out])

    plan = build(str(module))
    plan.run(unbound(plan), [])
    module.write_bytes(b"another")
    assert build(str(module)), "what is open already is not read again"
    del plan
    gc.collect()
    with pytest.raises(CacheError):
        build(str(module))
    with pytest.raises(HybridError, match=r"cannot open the module .*gone\.cubin"):
        build(str(tmp_path / "gone.cubin"))


def test_new_tensors_are_made_on_their_device() -> None:
    """A copy between strides of a value that is not on the CPU stays where it is."""
    draft = Draft()
    x = draft.add_value(ValueKind.INPUT, 0, F32, [2, 3], [3, 1], device=META)
    out = draft.add_value(ValueKind.FRESH, 0, F32, [2, 3], [1, 2], device=META)
    draft.add_copy(x, out)
    plan = draft.seal(1, 0, 0, [out])
    [result] = plan.run(unbound(plan), [torch.empty(2, 3, device="meta")])
    assert (result.device.type, result.stride()) == ("meta", (1, 2))


def test_a_callbacks_exception_arrives_unchanged() -> None:
    """The user's exception comes through C++ with its type, message and traceback; the plan can run on."""
    raising = [True]

    def callback(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if raising[0]:
            raise EagerError("eager failed")
        return inputs

    draft = Draft([callback])
    x, out = flat(draft, ValueKind.RAW_INPUT), flat(draft, ValueKind.RETURNED)
    draft.add_callback(0, [x], [out])
    plan = draft.seal(1, 0, 0, [out])
    binding = unbound(plan)
    with pytest.raises(EagerError, match="eager failed") as raised:
        plan.run(binding, [torch.randn(N)])
    assert raised.traceback[-1].name == "callback"
    raising[0] = False
    assert plan.run(binding, [torch.randn(N)]) is not None


def test_bindings_fill_constant_slots(kernels: str) -> None:
    """Owned and borrowed constants reach the kernels; a slot left empty or filled twice is refused."""
    draft = Draft()
    a, b = flat(draft, ValueKind.CONSTANT, 0), flat(draft, ValueKind.CONSTANT, 1)
    out = flat(draft, ValueKind.FRESH)
    draft.add_kernel(kernels, "add", [a, b, out])
    plan = draft.seal(0, 2, 0, [out])
    owned, borrowed = torch.randn(N), torch.randn(N)
    binding = Binding(plan, Guard([]), {1: owned}, {0: borrowed.data_ptr()})
    torch.testing.assert_close(plan.run(binding, [])[0], owned + borrowed)
    with pytest.raises(HybridError, match="every constant slot"):
        Binding(plan, Guard([]), {1: owned}, {})
    with pytest.raises(HybridError, match="filled twice"):
        Binding(plan, Guard([]), {0: owned, 1: owned}, {0: borrowed.data_ptr()})


KINDS = pytest.mark.parametrize("kind", GuardKind)


def sees(guard: Guard, asked: int = CALLS_PER_ROUND) -> bool:
    """True if the guard sees a change when it is asked so often."""
    return any(guard.is_stale() for _ in range(asked))


@pytest.mark.usefixtures("threads")
@KINDS
def test_every_tensor_of_many_is_guarded(kind: GuardKind) -> None:
    """A change is seen in the next call wherever it is, also by several threads that ask at once."""
    for changed in (0, 63, 64, 150, 300):
        tensors = [torch.zeros(31) for _ in range(301)]
        guard = Guard(tensors, kind)
        assert not sees(guard)
        tensors[changed].data[30] = 1
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(lambda _, g=guard: g.is_stale(), range(30)))


@pytest.mark.usefixtures("threads")
@KINDS
@pytest.mark.parametrize("element", [1, 100_003, 3_999_999])
def test_one_element_of_a_large_tensor(kind: GuardKind, element: int) -> None:
    """A change of one element among millions is seen: at once where the kernel watches, else within a round, and then it says so."""
    tensor = torch.zeros(4_000_000)
    guard = Guard([tensor], kind)
    assert not sees(guard)
    tensor.numpy()[element] = 1
    if kind == GuardKind.LIVE_UNWATCHED:
        assert sees(guard)
        assert guard.is_late() or element == tensor.numel() - 1  # the last element is a sample
    elif kind == GuardKind.EVERY_BYTE or watches_writes():
        assert guard.is_stale()
        assert not guard.is_late()
    assert guard.is_stale(), "once stale, always stale"


def test_the_kernel_watches() -> None:
    """On a kernel that can watch writes, and may, it does: the tests of watching test something."""
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if platform.system() != "Linux" or platform.machine() != "x86_64" or release < (6, 7):
        pytest.skip("Linux 6.7 is the first to watch writes")
    userfaultfd, user_mode_only = 323, 1
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(userfaultfd, os.O_CLOEXEC | user_mode_only)
    if descriptor < 0:
        pytest.skip(f"this process may not watch writes: {os.strerror(ctypes.get_errno())}")
    os.close(descriptor)
    assert watches_writes()


@KINDS
def test_what_neighbours_write_does_not_count(kind: GuardKind) -> None:
    """Writes to the same pages but not to the tensor, and writes of what was there already, change nothing."""
    whole = torch.zeros(64, 1000)
    guarded = whole[:, 3:500]
    guard = Guard([guarded], kind)
    whole[:, 2] = 1
    whole[:, 500:] = 1
    guarded.data.copy_(guarded.clone())
    assert not sees(guard)
    whole[63, 499] = 1
    assert sees(guard)


@KINDS
def test_a_page_that_others_write_to_all_the_time(kind: GuardKind) -> None:
    """A weight beside busy memory is guarded all the same, however often the neighbour was written to."""
    whole = torch.zeros(100_000)
    guarded = whole[5000:90_000]
    for changed in (0, 40_000, 84_999):
        guard = Guard([guarded], kind)
        for _ in range(20):
            whole[4998:5000] += 1
            whole[90_000:90_002] += 1
            assert not guard.is_stale()
        guarded.data[changed] += 1
        assert sees(guard)
        assert guard.is_stale()


@KINDS
@pytest.mark.parametrize("flip", [slice(None), slice(1, None, 2), slice(0, 1)])
def test_signs_count(kind: GuardKind, flip: slice) -> None:
    """Weights whose signs alone change are seen, of all or of every second one."""
    tensor = torch.ones(70_000)
    guard = Guard([tensor], kind)
    tensor[flip].neg_()
    assert sees(guard)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_shared_memory_is_compared() -> None:
    """Memory that other processes may write to is not left to the kernel's watch, which sees this process only."""
    tensor = torch.zeros(300_000).share_memory_()
    guard = Guard([tensor])
    assert not sees(guard)
    child = os.fork()
    if child == 0:
        tensor.numpy()[123_457] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert sees(guard)


def test_a_guard_of_a_forked_child() -> None:
    """A guard made before a fork is stale in the child, where it cannot know what was written; its parent's goes on."""
    tensor = torch.zeros(300_000)
    guard = Guard([tensor])
    child = os.fork()
    if child == 0:
        tensor[100_001] = 1
        os._exit(0 if sees(guard) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not sees(guard)


def test_tensors_of_other_devices_are_not_read() -> None:
    """Tensors on another device are guarded by address and version alone, which others compare."""
    assert not sees(Guard([torch.empty(1000, device="meta"), torch.ones(3)]))


def test_a_stale_guard_stops_a_run(kernels: str) -> None:
    """A run with a stale binding returns None instead of results."""
    plan = chain(kernels)
    weight = torch.randn(5, 7).t()
    binding = Binding(plan, Guard([weight]), {}, {})
    assert plan.run(binding, [torch.randn(N)]) is not None
    weight.data.mul_(2)
    assert plan.run(binding, [torch.randn(N)]) is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (100, 3), (0, 2)])
@KINDS
def test_guards_see_the_last_element(dtype: torch.dtype, shape: tuple[int, ...], kind: GuardKind) -> None:
    """A change of the last element is seen for every dtype and shape, strided ones too."""
    tensor = torch.zeros(shape, dtype=dtype)
    strided = torch.zeros((*shape, 2), dtype=dtype)[..., 1]
    for guarded in (tensor, strided):
        guard = Guard([guarded], kind)
        assert not guard.is_stale()
        if guarded.numel() == 0:
            continue
        index = tuple(size - 1 for size in shape)
        guarded[index] = 1
        assert guard.is_stale()


def test_handles_are_freed() -> None:
    """Plans, guards and bindings free their C++ side and their callbacks when they are collected."""
    draft = Draft([lambda inputs: inputs])
    guard = Guard([torch.ones(3)])
    plan = draft.seal(0, 0, 0, [])
    handle, guard_handle = plan.handle, guard.handle
    assert plan.run(unbound(plan), []) == []
    del plan, guard
    gc.collect()
    with pytest.raises(RuntimeError, match="no plan has the handle"):
        torch.ops.torch_hybrid_backend.plan_time(handle, 0, [], False)
    with pytest.raises(RuntimeError, match="no guard has the handle"):
        torch.ops.torch_hybrid_backend.guard_is_stale(guard_handle)
    assert handle not in ops._callbacks


def test_finalizers_leave_no_trace() -> None:
    """Objects that are collected while a graph is traced are freed, and are no part of that graph."""
    plan, guard = Draft().seal(0, 0, 0, []), Guard([torch.ones(3)])
    garbage = [plan, guard, Binding(plan, guard, {}, {})]
    handle, guard_handle = plan.handle, guard.handle
    del plan, guard

    def collects(x: torch.Tensor) -> torch.Tensor:
        garbage.clear()
        gc.collect()
        return x + 1

    traced = make_fx(collects)(torch.ones(2))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [torch.ops.aten.add.Tensor]
    with pytest.raises(RuntimeError, match="no plan has the handle"):
        torch.ops.torch_hybrid_backend.plan_time(handle, 0, [], False)
    with pytest.raises(RuntimeError, match="no guard has the handle"):
        torch.ops.torch_hybrid_backend.guard_is_stale(guard_handle)


def test_a_missing_runtime_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error tells how to build _runtime.so where it is absent or broken."""
    monkeypatch.setattr(ops, "_ops", ops._ops.__wrapped__)
    monkeypatch.setattr(ops, "_LIBRARY", tmp_path / "_runtime.so")
    with pytest.raises(HybridError, match=r"missing.*pip install \."):
        ops.load()
    (tmp_path / "_runtime.so").write_text("no library")
    with pytest.raises(HybridError, match="cannot be loaded into torch"):
        ops.load()


def test_bytes_are_coded_and_decoded() -> None:
    """By words of given lengths; what is no code, and what are no bytes on the CPU, is refused with the reason."""
    lengths = torch.zeros(256, dtype=torch.uint8)
    lengths[:3] = torch.tensor([1, 2, 2])
    symbols, coded, found = torch.tensor([0, 1, 2, 0, 0], dtype=torch.uint8), *torch.zeros(2, 5, dtype=torch.uint8)
    huffman_encode(symbols, lengths, coded[:1])
    assert coded[0] == 0b0011010  # 0, 10, 11, 0, 0, their first bits lowest
    huffman_decode(coded[:1], lengths, found)
    assert found.equal(symbols)
    with pytest.raises(HybridError, match="too few words"):
        huffman_decode(coded[:1], torch.zeros(256, dtype=torch.uint8), found)
    with pytest.raises(HybridError, match="each of the 256 symbols"):
        huffman_decode(coded[:1], lengths[:255], found)
    for wrong in (found.int(), torch.zeros(10, dtype=torch.uint8)[::2], found.to("meta")):
        with pytest.raises(HybridError, match="contiguous tensor of uint8 on the CPU"):
            huffman_decode(coded[:1], lengths, wrong)


def test_the_description_of_a_plan_is_freed() -> None:
    """LibTorch's C interface keeps strings that operators are called with: 100 plans of 1 MB would be 100 MB."""

    class Described:
        def text(self, opened: object) -> str:
            plan = {
                "version": 1,
                "values": [],
                "steps": [],
                "ranges": [],
                "arenas": [],
                "inputs": 0,
                "constants": 0,
                "outputs": [],
            }
            return json.dumps({**plan, "unread": "x" * 1_000_000})

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    for _ in range(10):
        Plan(Described())  # type: ignore[arg-type]
    before = resident_mib()
    for _ in range(100):
        Plan(Described())  # type: ignore[arg-type]
    assert resident_mib() < before + 20
