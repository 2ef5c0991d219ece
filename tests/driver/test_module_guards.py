"""Guards on modules (driver/module_guards.py): whatever changes, compiled code answers, and is compiled anew, as with Dynamo's guards alone."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torch_hybrid_backend.backend  # noqa: F401  (which registers what is tested)
from tests.compiling import fresh_dynamo  # noqa: F401
from torch_hybrid_backend.driver import module_guards
from torch_hybrid_backend.runtime.native.module_guard import ModuleGuard, module_guard
from torch_hybrid_backend.torch_private import negative_view


class Settings:
    """An object that is no module, held by one."""

    def __init__(self) -> None:
        self.scale = 2.0


class Layer(nn.Module):
    shift = 0.5  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.ones(4))
        self.factor = 3.0
        self.powers = [1, 2]
        self.sizes: dict[str, Any] = {"a": 1.0, "nested": {"b": 2.0}}
        self.numbered = {0: 1.0}
        self.pair = (1.0, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x)) * self.factor + self.offset + self.shift
        x = x * len(self.powers) + self.powers[0] + self.pair[1]
        return x * self.sizes["a"] + self.sizes["nested"]["b"] * self.numbered[0]


class Doubled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        self.rest = nn.Sequential(nn.ReLU(), nn.Dropout(0.0), Layer())
        self.settings = Settings()
        self.act: Any = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.rest(self.first(x)) * self.settings.scale)


def set_data(model: Network) -> None:
    model.first.linear.weight.data = torch.zeros(4, 4)


def set_class_attribute(model: Network) -> None:
    Layer.shift = Layer.shift + 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "train": lambda m: m.train(),
    "train one module": lambda m: m.rest[2].norm.train(),
    "attribute": lambda m: setattr(m.first, "factor", 4.0),
    "attribute of another type": lambda m: setattr(m.first, "factor", 4),
    "attribute and back": lambda m: vars(m.first).update(factor=4.0) or vars(m.first).update(factor=float("3")),
    "unread attribute": lambda m: setattr(m.first, "unread", 1),
    "class attribute": set_class_attribute,
    "attribute over a class's": lambda m: setattr(m.first, "shift", 7.0),
    "list": lambda m: m.first.powers.append(3),
    "item of a list": lambda m: m.first.powers.__setitem__(0, 5),
    "dictionary": lambda m: m.first.sizes.__setitem__("a", 5.0),
    "nested dictionary": lambda m: m.rest[2].sizes["nested"].__setitem__("b", 5.0),
    "numbered dictionary": lambda m: m.first.numbered.__setitem__(0, 5.0),
    "another dictionary": lambda m: setattr(m.first, "sizes", {"a": 3.0, "nested": {"b": 1.0}}),
    "tuple": lambda m: setattr(m.first, "pair", (1.0, 9.0)),
    "object": lambda m: setattr(m.settings, "scale", 5.0),
    "another object": lambda m: setattr(m, "settings", Settings()),
    "function": lambda m: setattr(m, "act", torch.sigmoid),
    "module": lambda m: setattr(m, "first", Layer().eval()),
    "module of another class": lambda m: m.rest.__setitem__(0, nn.Sigmoid()),
    "module in a dictionary": lambda m: m._modules.__setitem__("first", Layer().eval()),
    "dictionary of modules": lambda m: vars(m).__setitem__("_modules", dict(m._modules, first=Layer().eval())),
    "class of a module": lambda m: setattr(m.first, "__class__", Doubled),
    "dictionary of a module": lambda m: setattr(m.first, "__dict__", dict(vars(m.first), factor=9.0)),
    "more modules": lambda m: m.rest.append(nn.Sigmoid()),
    "fewer modules": lambda m: m.rest.__delitem__(0),
    "parameter": lambda m: setattr(m.first.linear, "weight", nn.Parameter(torch.zeros(4, 4))),
    "no parameter": lambda m: setattr(m.first.linear, "bias", None),
    "parameter in place": lambda m: m.first.linear.weight.zero_(),
    "data of a parameter": set_data,
    "frozen": lambda m: m.requires_grad_(False),
    "buffer": lambda m: setattr(m.rest[2], "offset", torch.full((4,), 3.0)),
    "buffer of another dtype": lambda m: setattr(m.rest[2], "offset", torch.ones(4, dtype=torch.float64)),
    "loaded": lambda m: m.load_state_dict({key: value * 2 for key, value in m.state_dict().items()}),
    "forward of an instance": lambda m: setattr(m.first, "forward", lambda x: x + 1),
    "hook": lambda m: m.first.register_forward_hook(lambda module, args, output: output + 1),
}


def run(change: Callable[[Network], object], shortened: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Answers before and after a change, how often the model was compiled, and whether its guards were shortened."""
    compilations: list[Any] = []
    shortened_guards: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        compilations.append(gm)
        return gm.forward

    def shorten(built: Any, *variables: Any) -> None:
        before = built.root
        if shortened:
            original(built, *variables)
        if built.root is not before:
            shortened_guards.append(built)

    original = module_guards._shorten
    monkeypatch.setattr(module_guards, "_shorten", shorten)
    monkeypatch.setattr(module_guards, "is_compiling_for", lambda package: True)
    monkeypatch.setattr(Layer, "shift", 0.5)
    torch.manual_seed(0)
    model = Network().eval()
    compiled = torch.compile(model, backend=backend)
    answers = []
    torch.compiler.reset()
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(3):
            answers.append(compiled(x))
        change(model)
        torch.manual_seed(1)
        for _ in range(3):
            answers.append(compiled(x))
    monkeypatch.undo()
    return answers, len(compilations), bool(shortened_guards)


@pytest.mark.parametrize("change", CHANGES)
def test_change_has_the_effect_it_has_with_dynamos_guards(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, compilations, _ = run(CHANGES[change], False, monkeypatch)
    answers, ours, shortened = run(CHANGES[change], True, monkeypatch)
    assert shortened
    assert ours == compilations
    for answer, other in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, other)


class Recorder:
    """Counts compilations, and keeps the guards that stand for those on modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compilations = 0
        self.guards: list[ModuleGuard] = []
        make = module_guard()
        assert make is not None

        def kept(*given: Any) -> ModuleGuard:
            self.guards.append(make(*given))
            return self.guards[-1]

        monkeypatch.setattr(module_guards, "module_guard", lambda: kept)
        monkeypatch.setattr(module_guards, "is_compiling_for", lambda package: True)

    @property
    def evaluations(self) -> int:
        return sum(guard.counts()[0] for guard in self.guards)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        self.compilations += 1
        return gm.forward

    def __deepcopy__(self, memo: object) -> Recorder:
        return self  # Dynamo copies backends where it records what to compile


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_unchanged_module_needs_none_of_dynamos_guards(recorder: Recorder) -> None:
    model = Network().eval()
    compiled = torch.compile(model, backend=recorder)
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(10):
            compiled(x)
        assert recorder.evaluations == 1  # where they were built
        model.first.factor = float("3")  # another object of the same value: the guards hold
        for _ in range(10):
            compiled(x)
    assert recorder.evaluations == 2
    assert recorder.compilations == 1


def test_inputs_keep_their_guards(recorder: Recorder) -> None:
    model = Network().eval()
    compiled = torch.compile(model, backend=recorder, dynamic=False)
    with torch.no_grad():
        for rows in (3, 5, 3, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert recorder.compilations == 2


def test_sizes_known_at_run_time_keep_their_guards(recorder: Recorder) -> None:
    model = Network().eval()
    compiled = torch.compile(model, backend=recorder, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 1, 7):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), model(x))
    assert recorder.compilations == 2  # one row is a case of its own


@pytest.mark.parametrize("calls_before", [4, 70])
def test_layers_that_share_one_compilation(recorder: Recorder, calls_before: int) -> None:
    """Their tensors are asked in each call, as by Dynamo: `requires_grad_` and `.data` change no dictionary. Dynamo decides."""
    layers = [nn.Linear(4, 4).requires_grad_(False) for _ in range(3)]
    calls = [torch.compile(layer, backend=recorder) for layer in layers]

    def step() -> list[bool]:
        x = torch.randn(3, 4, requires_grad=True)
        for call in calls:
            x = call(x)
        x.sum().backward()
        return [layer.weight.grad is not None for layer in layers]

    for _ in range(calls_before):
        assert step() == [False] * 3
    assert recorder.guards[0].counts()[1] == (calls_before == 70)
    layers[1].requires_grad_(True)
    assert step() == [False, True, False]
    layers[2].weight.data = torch.zeros(4, 4, dtype=torch.float64)
    layers[2].bias.data = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        step()


class Counting(nn.Module):
    """Counts its calls, in an attribute that the trace does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x + 0
        return self.inner(x)


def test_module_that_changes_in_every_call_is_left_to_dynamo(recorder: Recorder) -> None:
    model = Counting().eval()
    compiled = torch.compile(model, backend=recorder)
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(70):
            torch.testing.assert_close(compiled(x), model(x))
    assert recorder.compilations == 1
    assert recorder.guards[0].counts()[1]


class OwnParameter(nn.Parameter):
    """A class whose form no watch compares."""


def test_module_with_a_parameter_of_another_class_is_left_to_dynamo(recorder: Recorder) -> None:
    model = nn.Linear(4, 4).eval()
    model.bias = OwnParameter(torch.ones(4))
    compiled = torch.compile(model, backend=recorder)
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(70):
            torch.testing.assert_close(compiled(x), model(x))
    assert recorder.compilations == 1
    assert recorder.guards[0].counts()[1]


MODEL = Network()


def test_global_model(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MODEL", Network().eval())

    def function(x: torch.Tensor) -> torch.Tensor:
        return MODEL(x) + 1

    compiled = torch.compile(function, backend=recorder)
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(4):
            torch.testing.assert_close(compiled(x), function(x))
        assert recorder.evaluations == 1
        MODEL.first.factor = 7.0
        torch.testing.assert_close(compiled(x), function(x))
        monkeypatch.setitem(globals(), "MODEL", Network().eval())
        torch.testing.assert_close(compiled(x), function(x))
    assert recorder.compilations == 2


def test_closures_model(recorder: Recorder) -> None:
    model = Network().eval()

    @torch.compile(backend=recorder)
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1

    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(4):
            torch.testing.assert_close(function(x), model(x) + 1)
        assert recorder.evaluations == 1
        model.rest[2].factor = 7.0
        torch.testing.assert_close(function(x), model(x) + 1)
    assert recorder.compilations == 2


def test_two_modules_of_one_frame(recorder: Recorder) -> None:
    @torch.compile(backend=recorder)
    def function(first: Network, second: Network, x: torch.Tensor) -> torch.Tensor:
        return second(first(x))

    models = [Network().eval() for _ in range(2)]
    with torch.no_grad():
        x = torch.randn(3, 4)
        for _ in range(3):
            torch.testing.assert_close(function(*models, x), models[1](models[0](x)))
        for model in models:
            model.first.factor += 1
            torch.testing.assert_close(function(*models, x), models[1](models[0](x)))
    assert recorder.compilations == 3


def test_training_steps(recorder: Recorder) -> None:
    """The optimiser writes to parameters in place; evaluation between epochs is a graph of its own."""
    torch.manual_seed(0)
    models = [Network() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    calls = [models[0], torch.compile(models[1], backend=recorder)]
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(3):
        for model in models:
            model.train()
        for _ in range(3):
            x = torch.randn(5, 4)
            for call, optimiser in zip(calls, optimisers, strict=True):
                optimiser.zero_grad()
                call(x).square().sum().backward()
                optimiser.step()
        for model in models:
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(calls[0](x), calls[1](x))
    assert recorder.compilations == 2


class UnseenByCompilations(TorchDispatchMode):
    """A mode under which compiled code is called, as under checkpoints; under other modes it is not."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "counting operators": lambda: FlopCounterMode(display=False),
    "unseen by compilations": UnseenByCompilations,
}


@pytest.mark.parametrize("order", list(itertools.permutations(MODES, 2)))
def test_modes_that_alternate(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]) -> None:
    """Returns as many compilations as with Dynamo's guards alone, and a dispatch mode sees as many operators."""

    def run_all() -> tuple[int, list[int]]:
        torch.compiler.reset()
        recorder.compilations = 0
        model = nn.Linear(4, 4)
        compiled = torch.compile(model, backend=recorder)
        x, seen = torch.randn(3, 4), []
        for _ in range(6):
            for name in order:
                with MODES[name]() as mode:
                    answer = compiled(x)
                if isinstance(mode, FlopCounterMode):
                    seen.append(mode.get_total_flops())
                if name == "grad":
                    answer.sum().backward()
        return recorder.compilations, seen

    ours = run_all()
    assert recorder.guards or order[0] == "counting operators"  # in whose calls Dynamo compiles nothing
    monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
    assert run_all() == ours


class Iterated(nn.Module):
    """Reads its parameters in their order, and a tensor in a tuple."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False)
        self.second = nn.Parameter(torch.randn(4, dtype=dtype), requires_grad=False)
        self.pair = (torch.ones(4), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x * parameter
        return x + self.pair[0] * self.pair[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pair[0].unsqueeze_(0),
        lambda m: m.second.requires_grad_(True),
        lambda m: setattr(m.second, "data", torch.ones(3, 4)),
        lambda m: torch._dynamo.maybe_mark_dynamic(m.second, 0),
        lambda m: torch._dynamo.mark_static(m.pair[0], 0),
        lambda m: setattr(m.second, "data", m.second.data.conj()),
        lambda m: setattr(m.second, "data", negative_view(m.second.data)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_tensors_that_dynamo_asks_in_every_call(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], dtype: torch.dtype
) -> None:
    def run_all() -> int:
        torch.compiler.reset()
        recorder.compilations = 0
        model = Iterated(dtype)
        compiled = torch.compile(model, backend=recorder)
        x = torch.randn(3, 4)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
        change(model)
        for _ in range(3):
            answer = compiled(x)
            torch.testing.assert_close(answer, model(x))
            assert answer.requires_grad == model(x).requires_grad
        return recorder.compilations

    ours = run_all()
    assert recorder.guards
    monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
    assert run_all() == ours


@pytest.mark.parametrize("seed", range(3))
def test_changes_at_random(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Returns, after each of many changes, the number of compilations and the answer: the same as with Dynamo's guards alone."""
    modes = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    last = ("module of another class", "no parameter", "more modules", "fewer modules", "buffer of another dtype")
    names = [name for name in CHANGES if name not in last]  # which others cannot follow

    def run_all() -> list[tuple[str, int, float, bool]]:
        torch.compiler.reset()
        recorder.compilations = 0
        monkeypatch.setattr(Layer, "shift", 0.5)
        torch.manual_seed(0)
        drawn = random.Random(seed)
        model = Network().eval()
        compiled = torch.compile(model, backend=recorder, dynamic=False)
        found = []
        x = torch.randn(3, 4)
        for name in drawn.choices(names, k=30):
            with torch.no_grad():
                CHANGES[name](model)
            for mode in drawn.choices(modes, k=drawn.randint(1, 3)):
                torch.manual_seed(0)
                with mode():
                    answer = compiled(x)
                found.append((name, recorder.compilations, float(answer.detach().sum()), answer.requires_grad))
        return found

    with torch._dynamo.config.patch(recompile_limit=64):
        ours = run_all()
        assert recorder.guards
        monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
        assert run_all() == ours


def test_model_is_freed(recorder: Recorder) -> None:
    model = Network().eval()
    model.rest[2].above = [model]  # a cycle
    weight = weakref.ref(model.rest[2].linear.weight)
    torch.compile(model, backend=recorder)(torch.randn(3, 4))
    assert recorder.guards
    del model
    gc.collect()
    assert weight() is None


def test_module_at_the_address_of_a_freed_one(recorder: Recorder) -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        for number in range(20):
            model = Layer().eval()
            model.factor = float(number % 3)
            torch.testing.assert_close(torch.compile(model, backend=recorder)(x), model(x))
            del model
            gc.collect()


def test_threads_that_change_and_call(recorder: Recorder) -> None:
    """The answer is that of one of the states, and at last of the last."""
    model = nn.Sequential(*[Layer() for _ in range(3)]).eval()
    compiled = torch.compile(model, backend=recorder)
    x = torch.randn(3, 4)
    answers = {}
    with torch.no_grad():
        for factor in (3.0, 4.0):
            model[1].factor = factor
            answers[factor] = compiled(x)
    stop = threading.Event()

    def change() -> None:
        while not stop.wait(1e-4):
            model[1].factor = 7.0 - model[1].factor

    changing = threading.Thread(target=change)
    changing.start()
    with torch.no_grad():
        for _ in range(200):
            answer = compiled(x)
            assert any(torch.allclose(answer, other) for other in answers.values())
    stop.set()
    changing.join()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), answers[model[1].factor])


def test_failed_guard_is_named(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    torch._logging.set_logs(recompiles=True)
    model = Network().eval()
    compiled = torch.compile(model, backend=recorder)
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled(x)
        model.first.factor = 4.0
        with caplog.at_level("DEBUG"):
            compiled(x)
    torch._logging.set_logs()
    assert "['factor'] == 3.0" in caplog.text or ".factor == 3.0" in caplog.text
    assert "Unexpected recompilation" not in caplog.text


def test_stance_that_evaluates_only_guards_that_failed(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> list[float]:
        torch.compiler.reset()
        model = Layer().eval()
        compiled = torch.compile(model, backend=recorder, dynamic=False)
        found = []
        with torch.no_grad():
            x = torch.ones(2, 4)
            for factor in (3.0, 4.0, 3.0, 4.0):
                model.factor = factor
                compiled(x)
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                for factor in (3.0, 4.0, 3.0):
                    model.factor = factor
                    torch.testing.assert_close(compiled(x), model(x))
                    found.append(float(compiled(x).sum()))
        return found

    torch.manual_seed(0)
    ours = answers()
    assert recorder.guards
    monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
    torch.manual_seed(0)
    assert answers() == ours


def test_users_filter_of_guards_still_counts(recorder: Recorder) -> None:
    skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    model = Network().eval()
    compiled = torch.compile(model, backend=recorder, options={"guard_filter_fn": skip})
    x = torch.randn(3, 4)
    with torch.no_grad():
        before = compiled(x)
        model.first.factor = 100.0
        torch.testing.assert_close(compiled(x), before)
    assert recorder.compilations == 1


def test_other_backends_keep_their_guards() -> None:
    compiled = torch.compile(Network().eval(), backend="eager")
    built: list[Any] = []
    original = module_guards._shorten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_guards, "_shorten", lambda *given: built.append(original(*given)))
        with torch.no_grad():
            compiled(torch.randn(3, 4))
    assert not built


class Aliased(nn.Module):
    """Its buffers must be no inputs, and no other tensors, in a compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3, 4))
        self.register_buffer("scale", torch.full((3, 4), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift if self.training or self.shift is not None else None
        return x * self.scale + shift + self.shift


def calls_of_aliased(
    backend: Any, sets: Callable[[Any], object], frames: Callable[[Aliased], Callable[..., torch.Tensor]]
) -> tuple[list[torch.Tensor], list[Any]]:
    torch.compiler.reset()
    model = Aliased().eval()
    compiled, written = torch.compile(frames(model), backend=backend), frames(model)
    answers, expected = [], []
    with torch.no_grad():
        x = torch.arange(12.0).reshape(3, 4)
        for _ in range(3):
            answers.append(compiled(x))
            expected.append(written(x))
        sets(model)
        for value in (x, model.shift, model.scale, x, model.shift.clone()):
            answers.append(compiled(value))
            expected.append(written(value))
    for answer, right in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, right)
    return answers, expected


@pytest.mark.parametrize(
    "sets", [lambda m: None, lambda m: setattr(m, "shift", m.scale), lambda m: m._buffers.update(scale=m.shift)]
)
def test_tensors_that_are_others(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, sets: Callable[[Any], object]
) -> None:
    calls_of_aliased(recorder, sets, lambda model: model)
    assert len(recorder.guards) > 0
    ours = recorder.compilations
    monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
    recorder.compilations = 0
    calls_of_aliased(recorder, sets, lambda model: model)
    assert recorder.compilations == ours


def test_tensors_of_two_modules_that_are_others(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def compilations() -> int:
        torch.compiler.reset()
        recorder.compilations = 0
        models = [Aliased().eval() for _ in range(4)]
        models[3].shift = models[0].shift

        @torch.compile(backend=recorder)
        def function(first: Any, second: Any, x: torch.Tensor) -> Any:
            return second(first(x))

        with torch.no_grad():
            x = torch.ones(3, 4)
            for i, j in ((0, 1), (2, 3), (0, 3), (2, 1), (0, 1), (0, 3), (1, 1)):
                torch.testing.assert_close(function(models[i], models[j], x), models[j](models[i](x)))
        return recorder.compilations

    ours = compilations()
    assert recorder.guards
    monkeypatch.setattr(module_guards, "_shorten", lambda *given: None)
    assert compilations() == ours
