"""Guards on modules: a change is seen wherever the steps pass, and no address of what is gone is read."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.runtime.native.module_guard import (
    DICTIONARY,
    MODULE,
    OWN_TENSOR,
    TENSOR,
    ModuleGuard,
    Step,
    module_guard,
)
from torch_hybrid_backend.torch_private import FakeTensorMode, negative_view

# (the model), its modules, the first of these, that one's parameters.
STEPS: tuple[Step, ...] = (
    (0, None, 0, MODULE),
    (0, "_modules", 0, DICTIONARY),
    (1, None, 0, MODULE),
    (2, "_parameters", 0, DICTIONARY),
)


def model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Dynamo:
    """Stands for its guards. answer: what they say."""

    def __init__(self) -> None:
        self.answer: Any = True

    def check(self, local_variables: Any) -> Any:
        return self.answer() if callable(self.answer) else self.answer


class Watch:
    """A guard on one module, as a local variable `m`."""

    def __init__(self, module: Any, steps: tuple[Step, ...], others: tuple[str, ...] = ()) -> None:
        make = module_guard()
        assert make is not None
        self.dynamo = Dynamo()
        self.guard: ModuleGuard = make((("m", None, steps),), others, self.dynamo)
        self.sees_change(m=module)

    def sees_change(self, **local_variables: Any) -> bool:
        """True if Dynamo's guards are asked."""
        before = self.guard.counts()[0]
        assert self.guard.check(local_variables) == self.dynamo.answer
        return self.guard.counts()[0] != before


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="later Pythons may number no states")
def test_this_python_has_guards() -> None:
    assert module_guard() is not None


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
def test_change_is_seen(change: str) -> None:
    module = model()
    watch = Watch(module, STEPS)
    assert not watch.sees_change(m=module)
    CHANGES[change](module)
    gc.collect()
    assert watch.sees_change(m=module)


def test_what_steps_do_not_pass_is_not_seen() -> None:
    module = model()
    watch = Watch(module, STEPS)
    module[1].inplace = True
    with torch.no_grad():
        module[0].weight.zero_()
    assert not watch.sees_change(m=module)


def test_another_module_is_another() -> None:
    module, other = model(), model()
    watch = Watch(module, STEPS)
    assert watch.sees_change(m=other)
    other.__dict__ = module.__dict__
    assert watch.sees_change(m=other)
    assert watch.sees_change(m=None)


def test_layer_that_was_replaced_is_not_read() -> None:
    """Its memory holds something else by then."""
    module = model()
    for _ in range(200):
        watch = Watch(module, STEPS)
        module[0] = nn.Linear(2, 2)
        gc.collect(0)
        fill = [bytearray(b"\xff" * 64) for _ in range(64)]
        assert watch.sees_change(m=module)
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
def test_module_that_is_not_as_the_steps_say(steps: tuple[Step, ...]) -> None:
    module = model()
    assert Watch(module, steps).sees_change(m=module)


def test_wrong_arguments_are_refused() -> None:
    make = module_guard()
    assert make is not None
    with pytest.raises(ValueError, match="begins at one before it"):
        Watch(model(), ((0, None, 0, MODULE), (1, "_modules", 0, DICTIONARY)))
    with pytest.raises(ValueError, match="tensors come last"):
        Watch(model(), ((0, None, 0, MODULE), (0, "training", 0, TENSOR), (0, "_modules", 0, DICTIONARY)))
    with pytest.raises(ValueError, match="of kind 0 to 3"):
        Watch(model(), ((0, None, 0, 4),))
    with pytest.raises(ValueError, match="the first step is the module"):
        Watch(model(), ((0, None, 0, DICTIONARY),))
    with pytest.raises(TypeError):
        Watch(model(), ((0, None),))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make((("m",),), (), Dynamo())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        native_module().ModuleGuard()  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="takes no named arguments"):
        native_module().ModuleGuard(guards=Dynamo())  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="a dictionary"):
        Watch(model(), STEPS).guard.check(None)  # type: ignore[arg-type]


def test_change_is_seen_once() -> None:
    module = model()
    watch = Watch(module, STEPS)
    module.eval()
    assert watch.sees_change(m=module)
    assert not watch.sees_change(m=module)
    watch.guard.forget()
    assert watch.sees_change(m=module)


def test_module_for_which_dynamos_guards_fail_is_not_noted() -> None:
    module = model()
    watch = Watch(module, STEPS)
    watch.dynamo.answer = False
    module.eval()
    assert watch.sees_change(m=module)
    assert watch.sees_change(m=module)


def test_change_while_dynamos_guards_are_asked() -> None:
    module = model()
    watch = Watch(module, STEPS)
    module.eval()
    watch.dynamo.answer = lambda: module.train() is not None
    assert watch.guard.check({"m": module})
    watch.dynamo.answer = True
    assert watch.sees_change(m=module)


def test_errors_of_dynamos_guards_are_its_own() -> None:
    module = model()
    watch = Watch(module, STEPS)
    module.eval()
    watch.dynamo.answer = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        watch.guard.check({"m": module})
    watch.dynamo.answer = True
    assert watch.sees_change(m=module)
    assert not watch.sees_change(m=module)


def test_guards_that_ask_themselves() -> None:
    """A signal's handler may call the model."""
    module = model()
    watch = Watch(module, STEPS)
    module.eval()

    def again() -> bool:
        watch.dynamo.answer = True
        return watch.guard.check({"m": module})

    watch.dynamo.answer = again
    assert watch.guard.check({"m": module})
    watch.sees_change(m=module)
    assert not watch.sees_change(m=module)


def test_modes_of_the_thread() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    module = model()
    watch = Watch(module, STEPS)
    with torch.no_grad():  # other guards of Dynamo's ask for it
        assert not watch.sees_change(m=module)
    with torch.inference_mode():
        assert watch.sees_change(m=module)
        assert not watch.sees_change(m=module)
    assert watch.sees_change(m=module)
    with Mode():
        assert watch.sees_change(m=module)
        assert watch.sees_change(m=module)


def test_own_tensors_are_no_others() -> None:
    module = model()
    watch = Watch(module, (*STEPS, (3, "weight", 0, OWN_TENSOR), (3, "bias", 0, TENSOR)), others=("x",))
    x = torch.ones(1)
    assert watch.sees_change(m=module, x=x)
    assert not watch.sees_change(m=module, x=x)
    assert not watch.sees_change(m=module, x=module[0].bias)
    assert watch.sees_change(m=module, x=module[0].weight)
    assert watch.sees_change(m=module)


def test_global_module() -> None:
    make = module_guard()
    assert make is not None
    namespace = {"m": model()}
    guard = make((("m", namespace, STEPS),), (), Dynamo())
    for _ in range(3):
        assert guard.check({"m": None})
    assert guard.counts() == (1, False)
    namespace["m"] = model()
    guard.check({})
    assert guard.counts() == (2, False)


def test_module_that_always_changes_is_left_to_dynamo() -> None:
    module = model()
    watch = Watch(module, STEPS)
    for _ in range(63):
        module.count = object()
        watch.sees_change(m=module)
    assert not watch.guard.counts()[1]
    for _ in range(16):
        assert not watch.sees_change(m=module)
    for _ in range(66):  # the last watch served
        module.count = object()
        watch.sees_change(m=module)
    assert watch.guard.counts()[1]
    assert watch.sees_change(m=module)


def test_guard_is_freed_with_what_it_knows() -> None:
    namespace: dict[str, Any] = {"m": model()}
    make = module_guard()
    assert make is not None
    dynamo = Dynamo()
    gone = weakref.ref(dynamo)
    namespace["guard"] = make((("m", namespace, STEPS),), (), dynamo)  # a cycle
    namespace["guard"].check({})
    del dynamo, namespace
    gc.collect()
    assert gone() is None


def test_threads_that_change_forget_and_ask() -> None:
    module = model()
    watch = Watch(module, (*STEPS, (3, "weight", 0, TENSOR)))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            module[0] = nn.Linear(2, 2)
            watch.guard.forget()
            gc.collect(0)

    others = [threading.Thread(target=change) for _ in range(2)]
    for other in others:
        other.start()
    for _ in range(5000):
        assert watch.guard.check({"m": module})
    stop.set()
    for other in others:
        other.join()
    watch.sees_change(m=module)
    assert watch.guard.counts()[1] or not watch.sees_change(m=module)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: setattr(m[0].weight, "data", torch.ones(3, 2)),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.T),
        lambda m: m.half(),
        lambda m: torch._dynamo.mark_dynamic(m[0].weight, 0),
        lambda m: torch._dynamo.mark_static(m[0].weight),
        lambda m: torch._dynamo.maybe_mark_dynamic(m[0].weight, 0),
        lambda m: setattr(m[0].weight, "data", torch.ones(2, 2, dtype=torch.complex64)),
        lambda m: setattr(m[0].weight, "data", negative_view(torch.ones(2, 2))),
        lambda m: setattr(m[0].weight, "__class__", type("Own", (nn.Parameter,), {})),
    ],
)
def test_form_of_a_tensor(change: Callable[[Any], object]) -> None:
    module = model()
    watch = Watch(module, (*STEPS, (3, None, 1, TENSOR), (3, "weight", 0, TENSOR)))
    with torch.no_grad():
        module[0].weight.fill_(2)
    assert not watch.sees_change(m=module)
    change(module)
    assert watch.sees_change(m=module)


def test_inference_tensor_is_another_form() -> None:
    module = model()
    module.weights = {"a": torch.ones(2)}
    steps: tuple[Step, ...] = ((0, None, 0, MODULE), (0, "weights", 0, DICTIONARY), (1, "a", 0, TENSOR))
    watch = Watch(module, steps)
    with torch.inference_mode():
        other = torch.ones(2)
    module.weights["a"].data = other
    assert watch.sees_change(m=module) == module.weights["a"].is_inference()


def test_conjugate_is_another_form() -> None:
    module = model()
    module[0].weight.data = torch.ones(2, 2, dtype=torch.complex64)
    watch = Watch(module, (*STEPS, (3, "weight", 0, TENSOR)))
    module[0].weight.data = module[0].weight.data.clone()
    assert not watch.sees_change(m=module)
    module[0].weight.data = module[0].weight.data.conj()
    assert watch.sees_change(m=module)


def test_subclass_of_a_tensor_is_not_watched() -> None:
    module = model()
    module[0].weight.__class__ = type("Own", (nn.Parameter,), {})
    assert Watch(module, (*STEPS, (3, "weight", 0, TENSOR))).sees_change(m=module)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_modes_of_the_first_caller_do_not_matter(mode: Callable[[], Any]) -> None:
    module_guard.cache_clear()
    with mode():
        assert module_guard() is not None


def test_marked_tensor_is_not_watched() -> None:
    """Its next mark changes a set in place."""
    module = model()
    torch._dynamo.maybe_mark_dynamic(module[0].weight, 0)
    watch = Watch(module, (*STEPS, (3, "weight", 0, TENSOR)))
    torch._dynamo.maybe_mark_dynamic(module[0].weight, 1)
    assert watch.sees_change(m=module)
