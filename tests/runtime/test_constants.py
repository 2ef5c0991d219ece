"""Live constants: what is made of parameters follows them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.constants import (
    DividedFold,
    FoldPart,
    LiveConstants,
    ViewOfInput,
    main_inputs,
    refresh,
    run_fold,
    without_owning,
)
from torch_hybrid_backend.runtime.native.ops import CALLS_PER_ROUND, Guard, GuardKind


def doubling(guarded: bool = True) -> tuple[LiveConstants[torch.Tensor], list[int]]:
    """A cache of twice the only constant, input 0, and the count of times it was made."""
    made = [0]

    def make(inputs: Any, guard: object) -> torch.Tensor:
        made[0] += 1
        doubled: torch.Tensor = inputs[0] * 2
        return doubled

    return LiveConstants([0], [0] if guarded else [], make), made


def sgd(module: torch.nn.Linear) -> None:
    module(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()


def write_numpy(module: torch.nn.Linear) -> None:
    module.weight.detach().numpy()[:] = 7


def replace_data(module: torch.nn.Linear) -> None:
    module.weight.data = torch.randn(4, 4)


CHANGES: dict[str, Callable[[torch.nn.Linear], object]] = {
    "optimizer": sgd,
    "load_state_dict": lambda module: module.load_state_dict(torch.nn.Linear(4, 4).state_dict()),
    "in place": lambda module: module.weight.requires_grad_(False).add_(1),
    "one element": lambda module: module.weight.requires_grad_(False)[1, 2].fill_(9),
    "data in place": lambda module: module.weight.data.mul_(2),
    "numpy": write_numpy,
    "other data": replace_data,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_seen(change: Callable[[torch.nn.Linear], object]) -> None:
    """Every usual way of changing a parameter makes the next call make its constants again."""
    module = torch.nn.Linear(4, 4)
    constants, made = doubling()
    constants.compared([module.weight])
    constants.compared([module.weight])
    assert made == [1]
    change(module)
    torch.testing.assert_close(constants.compared([module.weight]), module.weight.detach() * 2)
    assert made == [2]


def test_unguarded_contents_do_not_matter() -> None:
    """A change in place makes nothing anew where only the address matters, another address does."""
    weight = torch.nn.Parameter(torch.randn(4))
    constants, made = doubling(guarded=False)
    constants.compared([weight])
    weight.data.mul_(2)
    constants.compared([weight])
    assert made == [1]
    weight.data = torch.randn(4)
    constants.compared([weight])
    assert made == [2]


def test_instances_have_constants_of_their_own() -> None:
    """Two modules share one compiled graph and alternate without repacking; a detached parameter is the same one."""
    a, b = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(4))
    constants, made = doubling()
    for _ in range(3):
        torch.testing.assert_close(constants.compared([a]), a.detach() * 2)
        torch.testing.assert_close(constants.compared([b.detach()]), b.detach() * 2)
    assert made == [2]
    assert len(constants) == 2


def test_constants_die_with_their_parameters() -> None:
    """Nothing made from a parameter outlives it."""
    weight = torch.nn.Parameter(torch.randn(4))
    constants, _ = doubling()
    constants.get([weight])
    assert len(constants) == 1
    del weight
    gc.collect()
    assert len(constants) == 0


def test_the_least_recently_used_go_first() -> None:
    """At most `capacity` sets are kept."""
    weights = [torch.randn(4) for _ in range(4)]
    made: list[int] = []
    constants = LiveConstants([0], [0], lambda inputs, guard: made.append(id(inputs[0])), capacity=2)
    for index in (0, 1, 0, 2, 0, 1):
        constants.get([weights[index]])
    assert made == [id(weights[index]) for index in (0, 1, 2, 1)]
    assert len(constants) == 2


def test_constants_elsewhere_are_known_by_version() -> None:
    """Contents on another device are not read; those that count no versions either are made anew in each call."""
    constants, made = doubling()
    weight = torch.empty(3, device="meta")
    for _ in range(3):
        assert constants.compared([weight]).is_meta
    assert made == [1]
    weight.add_(1)
    constants.compared([weight])
    constants.compared([weight])
    assert made == [2]
    with torch.inference_mode():
        uncounted = torch.empty(3, device="meta")
    constants.compared([uncounted])
    constants.compared([uncounted])
    assert made == [4]


def test_inference_tensors_are_guarded_by_contents() -> None:
    """Tensors made under inference_mode count no versions; their contents are still watched."""
    with torch.inference_mode():
        weight = torch.randn(4)
    constants, made = doubling()
    constants.compared([weight])
    constants.compared([weight])
    assert made == [1]
    with torch.inference_mode():
        weight.mul_(2)
    torch.testing.assert_close(constants.compared([weight]), weight * 2)


def test_no_constants_are_made_once() -> None:
    """A graph without parameters has one set, for ever."""
    made: list[int] = []
    constants: LiveConstants[None] = LiveConstants([], [], lambda inputs, guard: made.append(1))
    constants.compared([torch.ones(1)])
    constants.compared([torch.ones(2)])
    assert made == [1]


def test_folded_views_of_parameters_do_not_keep_them_alive() -> None:
    """A fold that returns a view is remembered as a view, with its lazy bits; other results as they are."""
    hoisted = HoistedInputs((CallInput(0), FoldedValue(0), FoldedValue(1), FoldedValue(2)), (1,))
    weight = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
    inputs = [torch.ones(1), weight]
    folded = run_fold(hoisted, lambda raw: [raw[0].t()[1:], raw[0] + 1, raw[0].conj()], inputs)
    kept = without_owning(folded, hoisted, inputs)
    assert kept[0] == ViewOfInput(1, (3, 3), (1, 4), 1, LazyBits())
    assert kept[2] == ViewOfInput(1, (3, 4), (4, 1), 0, LazyBits(conjugate=True))
    x, view, plus_one, conjugate = main_inputs(hoisted, kept, inputs)
    assert conjugate.is_conj()
    assert torch.equal(conjugate, weight.detach().conj())
    assert x is inputs[0]
    torch.testing.assert_close(view, weight.detach().t()[1:])
    assert view.data_ptr() == weight[:, 1:].data_ptr()
    torch.testing.assert_close(plus_one, weight.detach() + 1)


def _scaled(*scales: float) -> DividedFold:
    """A fold whose results are the first parameter times each of these; its parts are named by that."""
    parts = (
        FoldPart((0,), (number,), lambda raw, by=scale: [raw[0] * by], f"times {scale}")  # type: ignore[misc]
        for number, scale in enumerate(scales)
    )
    return DividedFold(tuple(parts))


def test_folds_of_the_same_parameters_share_equal_parts_alone() -> None:
    """Two graphs may read the same parameters in the same order, and make the same of them or different values."""
    hoisted, weight = HoistedInputs((FoldedValue(0), FoldedValue(1)), (0,)), torch.randn(3, 4)
    first, second = (run_fold(hoisted, _scaled(*scales), [weight]) for scales in ((2.0, 0.5), (3.0, 0.5)))
    torch.testing.assert_close(torch.stack(first), torch.stack([weight * 2, weight * 0.5]))
    torch.testing.assert_close(torch.stack(second), torch.stack([weight * 3, weight * 0.5]))
    assert second[1] is first[1]


def test_folded_values_need_a_fold() -> None:
    """A main graph that reads folded values without a fold function is an error."""
    with pytest.raises(HybridError, match="no function to fold"):
        run_fold(HoistedInputs((FoldedValue(0),), ()), None, [])


def write_one(module: torch.nn.Linear) -> None:
    module.weight.detach().numpy()[700, 5] += 1


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards as they are where the kernel does not watch memory."""

    def guard(tensors: Sequence[torch.Tensor]) -> Guard:
        return Guard(tensors, GuardKind.LIVE_UNWATCHED)

    monkeypatch.setattr("torch_hybrid_backend.runtime.constants.Guard", guard)


@pytest.mark.usefixtures("unwatched")
def test_late_news_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without the kernel's help one element's change is seen within a round of calls, with one warning that says what to do."""
    module = torch.nn.Linear(1000, 1000)
    constants, made = doubling()
    constants.compared([module.weight])
    write_one(module)
    calls = next(n for n in range(CALLS_PER_ROUND) if constants.compared([module.weight]) is not None and made == [2])
    assert calls > 0
    torch.testing.assert_close(constants.compared([module.weight]), module.weight.detach() * 2)
    [record] = caplog.records
    assert "refresh(model)" in record.message
    assert str(CALLS_PER_ROUND) in record.message


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("what", ["module", "tensor", "tensors"])
def test_refresh(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """After `refresh` the next call has the new contents, whatever the machine sees; other models' constants stay."""
    module, other = torch.nn.Linear(1000, 1000), torch.nn.Linear(4, 4)
    constants, made = doubling()
    constants.compared([module.weight])
    constants.compared([other.weight])
    write_one(module)
    refresh({"module": module, "tensor": module.weight, "tensors": [module.weight, module.bias]}[what])
    torch.testing.assert_close(constants.compared([module.weight]), module.weight.detach() * 2)
    assert made == [3]
    constants.compared([other.weight])
    assert made == [3]
    assert not caplog.records


def test_refresh_while_constants_are_made() -> None:
    """Constants that were being made when `refresh` was called serve their own call, and none after it."""
    weight = torch.zeros(4)
    made: list[int] = []

    def make(inputs: Any, guard: object) -> None:
        made.append(1)
        if len(made) == 1:
            refresh(weight)

    constants: LiveConstants[None] = LiveConstants([0], [0], make)
    constants.compared([weight])
    constants.compared([weight])
    constants.compared([weight])
    assert made == [1, 1]


def test_refresh_takes_tensors_only() -> None:
    """Anything else raises a TypeError that says what is legal."""
    for wrong in ("model", 3, [torch.ones(1), "x"]):
        with pytest.raises(TypeError, match="refresh takes a module, a tensor or tensors"):
            refresh(wrong)


def test_of_what_is_copied_the_contents_matter() -> None:
    """Constants whose address alone counts are not made again when they change in place; unless they were copied."""
    made: list[int] = []
    constants: LiveConstants[None] = LiveConstants(
        [0],
        [],
        lambda inputs, guard: made.append(len(inputs[0])),
        copied=lambda inputs: [0] if len(inputs[0]) == 2 else [],
    )
    for x in (torch.zeros(1), torch.zeros(2)):
        for _ in range(3):
            constants.get([x])
            x.add_(1)
    assert made == [1, 2, 2, 2]
