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
from torch_hybrid_backend.runtime.native.module_watch import DICTIONARY, MODULE, TENSOR, Step, Watches, watches

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
    with pytest.raises(ValueError, match="of kind 0, 1 or 2"):
        native.watch_module(24, model(), ((0, None, 0, 3),))
    with pytest.raises(ValueError, match="Capsule"):
        native.module_unchanged(object(), model())
    with pytest.raises(TypeError, match="a watch and a module"):
        native.module_unchanged(object())


def test_tensors_are_known_again(found: Watches) -> None:
    module = model()
    watch = found.take(module, (*STEPS, (3, "weight", 0, TENSOR), (3, None, 1, TENSOR)))
    assert found.holds(watch, module[0].weight)
    assert found.holds(watch, module[0].bias)
    assert not found.holds(watch, module[0].weight.detach())
    assert not found.holds(watch, None)
