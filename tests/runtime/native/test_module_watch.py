"""Watches of modules: a change is seen wherever the steps pass, and no address of what is gone is read."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.runtime.native.module_watch import (
    DICTIONARY,
    MODULE,
    OWN_TENSOR,
    TENSOR,
    Step,
    Watches,
    watches,
)
from torch_hybrid_backend.torch_private import FakeTensorMode, thread_key_sets

# (the model), its modules, the first of these, that one's parameters.
STEPS: tuple[Step, ...] = (
    (0, None, 0, MODULE),
    (0, "_modules", 0, DICTIONARY),
    (1, None, 0, MODULE),
    (2, "_parameters", 0, DICTIONARY),
)


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.fixture
def found() -> Watches:
    it = watches()
    assert it is not None
    return it


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="later Pythons may number no states")
def test_this_python_has_watches() -> None:
    assert watches() is not None


CHANGES: dict[str, Callable[[Any], object]] = {
    "attribute": lambda m: setattr(m, "name", 1),
    "training": lambda m: m.eval(),
    "attribute of the layer": lambda m: setattr(m[0], "in_features", 3),
    "parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "deleted parameter": lambda m: delattr(m[0], "bias"),
    "layer": lambda m: m.__setitem__(0, nn.Linear(2, 2)),
    "class": lambda m: setattr(m[0], "__class__", nn.Identity),
    "class of the model": lambda m: setattr(m, "__class__", nn.ModuleList),
    "attributes": lambda m: setattr(m[0], "__dict__", dict(vars(m[0]))),
    "all": lambda m: vars(m).clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_seen(found: Watches, change: str) -> None:
    module = model()
    watch = found.take(module, STEPS)
    assert watch is not None
    assert found.unchanged(watch, module)
    CHANGES[change](module)
    gc.collect()
    assert not found.unchanged(watch, module)


def test_what_steps_do_not_pass_is_not_seen(found: Watches) -> None:
    module = model()
    watch = found.take(module, STEPS)
    module[1].inplace = True
    with torch.no_grad():
        module[0].weight.zero_()
    assert found.unchanged(watch, module)


def test_another_module_is_another(found: Watches) -> None:
    module, other = model(), model()
    watch = found.take(module, STEPS)
    assert not found.unchanged(watch, other)
    other.__dict__ = module.__dict__
    assert not found.unchanged(watch, other)
    assert not found.unchanged(watch, None)


def test_layer_that_was_replaced_is_not_read(found: Watches) -> None:
    """Its memory holds something else by then."""
    module = model()
    for _ in range(200):
        watch = found.take(module, STEPS)
        module[0] = nn.Linear(2, 2)
        gc.collect(0)
        fill = [bytearray(b"\xff" * 64) for _ in range(64)]
        assert not found.unchanged(watch, module)
        del fill


@pytest.mark.parametrize(
    "steps",
    [
        ((0, None, 0, MODULE), (0, "nothing", 0, DICTIONARY)),
        ((0, None, 0, MODULE), (0, "_modules", 0, DICTIONARY), (1, None, 7, MODULE)),
        ((0, None, 0, MODULE), (0, "training", 0, DICTIONARY)),
        ((0, None, 0, MODULE), (0, "training", 0, MODULE)),
        (
            (0, None, 0, MODULE),
            (0, "_forward_hooks", 0, DICTIONARY),
        ),  # an OrderedDict: another class may keep its items elsewhere
    ],
)
def test_module_that_is_not_as_the_steps_say(found: Watches, steps: tuple[Step, ...]) -> None:
    assert found.take(model(), steps) is None


def test_wrong_steps_are_refused() -> None:
    native = native_module()
    assert native is not None
    with pytest.raises(ValueError, match="begins at one before it"):
        native.watch_module(24, model(), ((0, None, 0, MODULE), (1, "_modules", 0, DICTIONARY)))
    with pytest.raises(TypeError):
        native.watch_module(24, model(), ((0, None),))
    with pytest.raises(ValueError, match="tensors come last"):
        native.watch_module(
            24, model(), ((0, None, 0, MODULE), (0, "training", 0, TENSOR), (0, "_modules", 0, DICTIONARY))
        )
    with pytest.raises(ValueError, match="of kind 0 to 3"):
        native.watch_module(24, model(), ((0, None, 0, 4),))
    with pytest.raises(ValueError, match="Capsule"):
        native.module_unchanged(object(), model())
    with pytest.raises(TypeError, match="a watch and a module"):
        native.module_unchanged(object())


def test_times_are_counted(found: Watches) -> None:
    module = model()
    watch = found.take(module, STEPS)
    assert watch is not None
    for _ in range(3):
        found.unchanged(watch, module)
    assert found.times_unchanged(watch) == 3
    module.eval()
    found.unchanged(watch, module)
    assert found.times_unchanged(watch) == 3


def test_guard_asks_watches(found: Watches) -> None:
    module, evaluated = model(), []
    watch = found.take(module, (*STEPS, (3, "weight", 0, OWN_TENSOR)))
    noted = tuple(keys().raw_repr() for keys in thread_key_sets)
    state = [
        (("m", None),),
        ("x",),
        thread_key_sets,
        (watch,),
        noted,
        lambda variables: evaluated.append(variables) or False,
    ]
    check = found.guard(state)
    variables = {"m": module, "x": torch.ones(1)}
    assert check(variables)
    assert not evaluated
    for changed in ({"m": model()}, {"x": module[0].weight}, {"m": None}):
        assert check(variables | changed) is False
    with torch.inference_mode():
        assert check(variables) is False
    assert check({"m": module}) is False
    assert len(evaluated) == 5
    module.eval()
    assert check(variables) is False
    state[3] = None
    assert check(variables) is False
    assert len(evaluated) == 7


def test_guard_of_a_global_module(found: Watches) -> None:
    module = model()
    variables = {"m": module}
    noted = tuple(keys().raw_repr() for keys in thread_key_sets)
    state = [(("m", variables),), (), thread_key_sets, (found.take(module, STEPS),), noted, lambda given: False]
    assert found.guard(state)({})
    variables["m"] = model()
    assert not found.guard(state)({})


def test_wrong_state_is_refused(found: Watches) -> None:
    with pytest.raises(TypeError, match="a list of six"):
        found.guard([])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: setattr(m[0].weight, "data", torch.ones(3, 2)),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.T),
        lambda m: m.half(),
        lambda m: setattr(m[0].weight, "__class__", type("Own", (nn.Parameter,), {})),
    ],
)
def test_form_of_a_tensor(found: Watches, change: Callable[[Any], object]) -> None:
    module = model()
    watch = found.take(module, (*STEPS, (3, None, 1, TENSOR), (3, "weight", 0, TENSOR)))
    assert watch is not None
    with torch.no_grad():
        module[0].weight.fill_(2)
    assert found.unchanged(watch, module)
    change(module)
    assert not found.unchanged(watch, module)


def test_subclass_of_a_tensor_is_not_watched(found: Watches) -> None:
    module = model()
    module[0].weight.__class__ = type("Own", (nn.Parameter,), {})
    assert found.take(module, (*STEPS, (3, "weight", 0, TENSOR))) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_modes_of_the_first_caller_do_not_matter(mode: Callable[[], Any]) -> None:
    watches.cache_clear()
    with mode():
        found = watches()
    assert found is not None
