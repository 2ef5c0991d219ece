"""`quantize`: accuracy on real images, live weights, equal results of every backend, and one clear error for each fault."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import torch_hybrid_backend
from torch_hybrid_backend import Collector, quantize
from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.graph.quantization import call, tensor
from torch_hybrid_backend.machine import default_weight_bits
from torch_hybrid_backend.quantization import quantize as quantize_module
from torch_hybrid_backend.quantization.call_sites import LayerCall

_BY_TENSOR, _BY_ROW = "quantized_decomposed::quantize_per_tensor.tensor", "quantized_decomposed::quantize_per_token"
load_digits = pytest.importorskip("sklearn.datasets").load_digits


class Small(nn.Module):
    """Convolutions with batch norm, a residual, ReLU6 and two linear layers, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.hidden, self.classifier = nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = functional.relu6(self.inner(x) + x)
        x = torch.relu(self.down(x)).flatten(1)
        return self.classifier(functional.gelu(self.hidden(x)))


class Digits:
    """A network trained on half of scikit-learn's digits; the other half held out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(bunch.target)
        order = torch.randperm(len(images))
        train, held_out = order[:900], order[900:]
        self.images, self.labels = images[held_out], labels[held_out]
        self.calibration = [images[train[k : k + 50]] for k in range(0, 200, 50)]
        self.model = Small()
        optimizer = torch.optim.Adam(self.model.parameters(), 3e-3)
        for _ in range(6):
            for k in range(0, 900, 60):
                batch = train[k : k + 60]
                optimizer.zero_grad()
                functional.cross_entropy(self.model(images[batch]), labels[batch]).backward()
                optimizer.step()
        self.model.eval()

    def accuracy(self, module: Callable[..., torch.Tensor]) -> float:
        with torch.no_grad():
            return float((module(self.images).argmax(1) == self.labels).double().mean())

    def deviation(self, module: Callable[..., torch.Tensor]) -> float:
        """The outputs' relative root mean square error."""
        with torch.no_grad():
            exact = self.model(self.images)
            return float((module(self.images) - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


@pytest.mark.parametrize("calibration", ["entropy", "naive", "none"])
def test_digits_are_read_as_well(digits: Digits, calibration: str) -> None:
    """A network of 8 bits loses at most 0.5 points of 897 held-out images, and its outputs are a few percent off."""
    quantized = quantize(digits.model, digits.calibration, calibration=calibration)
    sums = (
        ["#add1"] if calibration != "none" else []
    )  # in the range that is found for `inner`, which reads what is added
    assert sorted(quantized.ranges.sites) == [*sums, "classifier", "down", "features.0", "hidden", "inner"]
    assert digits.accuracy(digits.model) > 0.93
    assert digits.accuracy(quantized) >= digits.accuracy(digits.model) - 0.005
    assert 1e-4 < digits.deviation(quantized) < 0.05


def test_values_that_cannot_be_negative_are_unsigned(digits: Digits) -> None:
    """Behind a ReLU all 255 steps are above 0, behind ReLU6 they end at 6; elsewhere 127 lie on either side."""
    sites = quantize(digits.model, digits.calibration, calibration="naive").ranges.sites
    ((low, high),) = sites["down"].ranges or ()
    assert low == 0
    assert high <= 6
    ((low, _),) = sites["classifier"].ranges or ()
    assert low < 0


def test_scales_of_every_call_are_of_int8(digits: Digits) -> None:
    """Without calibration nothing is known of signs, in eager or compiled: convolutions are quantized by tensor, linear layers by row."""
    quantized = quantize(digits.model, calibration="none")
    found: list[tuple[str, torch.dtype]] = []

    class Quantizing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function.name() in (_BY_TENSOR, _BY_ROW):
                found.append((function.name(), result.dtype))
            return result

    with Quantizing():
        quantized(digits.images[:4])
    assert found == [(name, torch.int8) for name in (*[_BY_TENSOR] * 3, *[_BY_ROW] * 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "naive"},
        {"calibration": "none"},
        pytest.param({"smooth": 0.5, "calibration": "naive"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_compiled_equals_eager(digits: Digits, options: Mapping[str, Any]) -> None:
    """A graph without breaks; results are eager's, whose steps it takes, but for ties; a parameter of the original that changes in place, and
    one that is loaded, is seen by both."""
    model = copy.deepcopy(digits.model)
    quantized = quantize(model, digits.calibration, **options)
    assert {id(p) for p in quantized.parameters()} == {id(p) for p in model.parameters()}
    torch._dynamo.reset()
    compiled = torch.compile(quantized, backend="hybrid", fullgraph=True)
    x = digits.images[:64]
    with torch.no_grad():
        before = compiled(x)
        for change in (lambda: model.classifier.weight.mul_(-2), lambda: model.load_state_dict(Small().state_dict())):
            change()
            eager = quantized(x)
            assert float((eager - before).norm() / before.norm()) > 0.5
            assert float((compiled(x) - eager).norm() / eager.norm()) < 2e-3


@pytest.mark.full
def test_sizes_only_known_at_run_time(digits: Digits) -> None:
    """A single compilation serves batches of any size."""
    for calibration in ("naive", "none"):
        quantized = quantize(digits.model, digits.calibration, calibration)
        torch._dynamo.reset()
        compiled = torch.compile(quantized, backend="hybrid", fullgraph=True, dynamic=True)
        for batch in (4, 7, 32):
            x = digits.images[:batch]
            assert float((compiled(x) - quantized(x)).norm() / quantized(x).norm()) < 2e-3


@pytest.mark.full
def test_inductor_takes_it_too(digits: Digits) -> None:
    """The graph is made of PyTorch's own operators: any backend compiles it."""
    quantized = quantize(digits.model, digits.calibration, calibration="naive")
    torch._dynamo.reset()
    compiled = torch.compile(quantized, fullgraph=True)
    x = digits.images[:32]
    assert float((compiled(x) - quantized(x)).norm() / quantized(x).norm()) < 2e-3


def test_training_goes_on(digits: Digits) -> None:
    """The original trains after it was quantized, in its own mode; the quantized module follows, needs no gradients and stays in evaluation."""
    model = copy.deepcopy(digits.model)
    quantized = quantize(model, digits.calibration, calibration="naive")
    before = quantized(digits.images[:8])
    assert not before.requires_grad
    model.train()
    functional.cross_entropy(model(digits.images[:8]), digits.labels[:8]).backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert not torch.equal(quantized(digits.images[:8]), before)
    with pytest.raises(QuantizationError, match="for inference: train the original"):
        quantized.train()
    assert not quantized.eval().training


class Channels(nn.Module):
    """A linear layer of whose inputs one channel is a hundred times as large as the others, and one of a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16)
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.weight


def test_smoothing_moves_outliers_into_weights() -> None:
    """With one large channel the error falls several times; in floating point the product stays the same; both layouts of weights."""
    torch.manual_seed(0)
    model = Channels().eval()
    with torch.no_grad():
        model.linear.weight[:, 3] *= 0.01
    scale = torch.ones(32)
    scale[3] = 100.0
    data = [torch.randn(64, 32) * scale for _ in range(4)]
    exact = model(data[0]).detach()

    def error(module: nn.Module) -> float:
        return float((module(data[0]) - exact).norm() / exact.norm())

    plain = quantize(model, data, calibration="naive", smooth=None)
    smooth = quantize(model, data, calibration="naive", smooth=0.5)
    assert error(smooth) < error(plain) / 4
    assert error(smooth) < 0.02

    def only_smooth(call: LayerCall) -> Any:
        moved_x, moved_w = smooth.smoothed(call)
        assert not torch.equal(moved_w, call.operands[1])
        return call.compute(moved_x, moved_w)

    torch.testing.assert_close(smooth.run_with(only_smooth)(data[0]), exact, rtol=1e-4, atol=1e-4)


class Outliers(nn.Module):
    """Its first layer reads a channel that is always large, its second one that is large in a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.steady, self.rare = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("rows", torch.ones(64, 32))
        self.rows[0, 5] = 1000.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rare(torch.tanh(self.steady(x)) * self.rows)


def test_smoothing_is_left_out_where_it_does_harm() -> None:
    """By each layer's own error: scales of rows hold a row's outlier better than the weights of all would."""
    torch.manual_seed(0)
    model = Outliers().eval()
    with torch.no_grad():
        model.steady.weight[:, 3] *= 0.01
    scale = torch.ones(32)
    scale[3] = 100.0
    data = [torch.randn(64, 32) * scale for _ in range(4)]
    sites = quantize(model, data, calibration="none", smooth=1.0).ranges.sites
    assert sites["steady"].smoothing is not None
    assert sites["rare"] == quantize(model, data, calibration="none").ranges.sites["rare"]


@pytest.mark.parametrize("calibration", ["none", "naive"])
def test_each_layer_is_smoothed_as_suits_it_best(calibration: str) -> None:
    """A layer takes one of several strengths, in any order, with the factors of that strength alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]).eval()
    with torch.no_grad():
        for layer in list(model)[::2]:
            layer.weight[:, 3] *= 0.01
            layer.bias[7] = 30.0  # of the next layer's input
    data = [torch.randn(64, 32) for _ in range(4)]
    strengths = 0.3, 0.6, 0.9
    alone = [quantize(model, data, calibration=calibration, smooth=strength).ranges.sites for strength in strengths]
    sites = quantize(model, data, calibration=calibration, smooth=strengths).ranges.sites
    assert sites == quantize(model, data, calibration=calibration, smooth=strengths[::-1]).ranges.sites
    taken = {name: [own[name] == site for own in alone] for name, site in sites.items()}
    assert all(map(any, taken.values()))
    assert len({tuple(which) for which in taken.values()}) > 1  # they differ


def test_smoothing_compares_both_in_their_own_ranges() -> None:
    """A layer that keeps its channels has the range of its input as it is, as without smoothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]).eval()
    data = [torch.randn(16, 32) for _ in range(2)]
    plain = quantize(model, data, calibration="naive").ranges.sites
    sites = quantize(model, data, calibration="naive", smooth=0.0).ranges.sites
    kept = [name for name, site in sites.items() if site.smoothing is None]
    assert 0 < len(kept) < 8
    assert all(sites[name] == plain[name] for name in kept)
    assert all(sites[name].ranges != plain[name].ranges for name in set(sites) - set(kept))


def test_ranges_stand_in_for_calibration(digits: Digits, tmp_path: Path) -> None:
    """Saved ranges make the same module again, smoothing included, without data; what is excluded then, too, stays out."""
    quantized = quantize(digits.model, digits.calibration, "naive", smooth=0.4)
    quantized.save_ranges(tmp_path / "ranges.json")
    again = quantize(digits.model, ranges=tmp_path / "ranges.json")
    assert again.ranges == quantized.ranges
    assert torch.equal(again(digits.images), quantized(digits.images))
    less = quantize(digits.model, ranges=tmp_path / "ranges.json", exclude=["features"])
    assert less.ranges.in_float["features.0"] == "excluded"
    with pytest.raises(QuantizationError, match="another model's"):
        quantize(nn.Linear(3, 3).eval(), ranges=tmp_path / "ranges.json")


def _on(monkeypatch: pytest.MonkeyPatch, root: Path, flags: str) -> None:
    """A machine whose processor has these instructions."""
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(quantize_module, "default_weight_bits", lambda: default_weight_bits(root))


def test_weights_are_the_same_on_every_machine(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of `quantize` chooses the bits of weights; the module and its file of ranges keep them on another."""
    x = digits.images[:32]
    _on(monkeypatch, tmp_path / "old", "avx2")
    old = quantize(digits.model, digits.calibration, "naive")
    result = old(x)
    old.save_ranges(tmp_path / "ranges.json")
    pickled = pickle.dumps(old)
    _on(monkeypatch, tmp_path / "new", "avx2 avx_vnni")
    new = quantize(digits.model, digits.calibration, "naive")
    assert (old.ranges.weight_bits, new.ranges.weight_bits) == (7, 8)
    assert not torch.equal(new(x), result)
    again = quantize(digits.model, ranges=tmp_path / "ranges.json")
    for module in (old, pickle.loads(pickled), again):
        assert torch.equal(module(x), result)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(again, backend="aot_eager", fullgraph=True)(x), result)


def test_bits_of_weights_that_are_asked_for(digits: Digits, tmp_path: Path) -> None:
    """An argument counts on every machine, and more than a file; models on other devices than the CPU have 8 by default."""
    seven = quantize(digits.model, digits.calibration, "naive", weight_bits=7)
    seven.save_ranges(tmp_path / "ranges.json")
    eight = quantize(digits.model, ranges=tmp_path / "ranges.json", weight_bits=8)
    assert (seven.ranges.weight_bits, eight.ranges.weight_bits) == (7, 8)
    assert digits.deviation(eight) < digits.deviation(seven)
    assert quantize(Small().eval().to("meta"), calibration="none").ranges.weight_bits == 8
    assert "weight_bits must be 7, 8 or None; it is 4" in _refused(weight_bits=4, calibration="none")


def test_exclusions(digits: Digits) -> None:
    """Names, patterns and kinds; a container takes along what is in it; the rest is quantized."""
    quantized = quantize(digits.model, digits.calibration, "naive", exclude=("features", "hid*"), exclude_kinds=())
    assert quantized.ranges.in_float == {"features.0": "excluded", "hidden": "excluded"}
    only = quantize(digits.model, digits.calibration, "naive", exclude_kinds=("conv", "matmul"))
    assert sorted(only.ranges.sites) == ["classifier", "hidden"]
    none = quantize(digits.model, digits.calibration, "naive", exclude=("*",))
    assert torch.equal(none(digits.images), digits.model(digits.images))


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.parametrize("calibration", ["naive", "none"])
def test_products_of_activations(calibration: str) -> None:
    """Products stay in floating point unless asked for; then both operands are quantized."""
    torch.manual_seed(0)
    x = torch.randn(2, 12, 16)
    model = Attention().eval()
    assert torch.equal(quantize(model, [x], calibration=calibration)(x), model(x))
    quantized = quantize(model, [x], calibration=calibration, exclude_kinds=())
    assert sorted(quantized.ranges.sites) == ["", "#2"]
    assert 1e-4 < float((quantized(x) - model(x)).norm() / model(x).norm()) < 0.05


def test_transposed_convolutions() -> None:
    """Quantized with a scale for each output channel, whether their kernels tile the result or not; compiled the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(8, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 4, 4, 2, 1)).eval()
    x = torch.randn(2, 8, 7, 5)
    quantized = quantize(model, [x], "naive")
    assert {name: site.kind for name, site in quantized.ranges.sites.items()} == {"0": "conv", "2": "conv"}
    with torch.no_grad():
        found, expected = quantized(x), model(x)
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.05
        torch.compiler.reset()
        compiled = torch.compile(quantized, backend="hybrid", options={"placement": "estimate"}, fullgraph=True)
        for _ in range(2):  # the first result may be eager's
            torch.testing.assert_close(compiled(x), found, rtol=1e-4, atol=1e-4)
    assert set(quantize(model, calibration="none").ranges.sites) == {"0", "2"}
    others = nn.Sequential(nn.ConvTranspose2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 8, 3, dilation=2)).eval()
    assert not quantize(others, [x], "naive").ranges.sites
    assert torch.equal(quantize(others, [x], "naive")(x), others(x))


class _Heads(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, value=v, key=k, is_causal=True)


def test_attention(caplog: pytest.LogCaptureFixture) -> None:
    """Queries, keys and values in ranges of their own where calibration finds them, the softmax as it is; compiled it is the same."""
    torch.manual_seed(0)
    model, sizes = _Heads().eval(), (1.0, 3.0, 0.2)
    inputs = tuple(size * torch.randn(2, 4, 40, 16) for size in sizes)
    quantized = quantize(model, [inputs], "naive")
    (site,) = quantized.ranges.sites.values()
    assert (site.kind, len(site.ranges or ())) == ("attention", 3)
    highest = [max(-pair[0], pair[1]) for pair in site.ranges or () if pair is not None]
    assert highest == [pytest.approx(float(x.abs().max())) for x in inputs]
    narrow = [tensor(call, x, -high, high) for x, high in zip(inputs, highest, strict=True)]
    found, expected = quantized(*inputs), model(*inputs)
    assert torch.equal(found, model(*narrow))
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.05
    torch.compiler.reset()
    compiled = torch.compile(quantized, backend="hybrid", options={"placement": "estimate"}, fullgraph=True)
    for _ in range(2):  # the first result may be eager's
        torch.testing.assert_close(compiled(*inputs), found, rtol=1e-4, atol=1e-5)
    assert not caplog.records
    for data, more in (([inputs], {"exclude_kinds": ("attention",)}), ([inputs], {"calibration": "none"})):
        plain = quantize(model, data, **{"calibration": "naive", **more})
        assert not plain.ranges.sites
        assert torch.equal(plain(*inputs), expected)


class Widest(Collector):
    """Ten for everything but the classifier, of which it says nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def collect(self, name: str, operator: str, tensor: torch.Tensor) -> None:
        self.seen.append((name, operator))

    def ranges(self) -> Mapping[str, tuple[float, float]]:
        return {name: (-10.0, 10.0) for name, _ in self.seen if name != "classifier"}


def test_own_calibration(digits: Digits) -> None:
    """A collector is shown every activation, and decides; a layer that it leaves out, or that no data reaches, stays in floating point."""
    collector = Widest()
    quantized = quantize(digits.model, digits.calibration[:1], calibration=collector)
    assert ("inner", "conv") in collector.seen
    assert ("hidden", "linear") in collector.seen
    assert quantized.ranges.sites["inner"].ranges == ((-10.0, 10.0),)
    assert quantized.ranges.in_float == {"classifier": "uncalibrated"}
    unused = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).eval()
    unused.forward = unused["a"].forward
    assert quantize(unused, [torch.randn(2, 3)], "naive").ranges.in_float["b"] == "uncalibrated"


def test_metric_returns_the_worst_layers(digits: Digits) -> None:
    """Layers return to floating point, the worst first, until the drop is small enough, and no further."""
    model = copy.deepcopy(digits.model)
    with torch.no_grad():  # one channel of the hidden layer's input is what its step is as large as
        model.down.bias[0] = 3e4
        model.hidden.weight[:, :16] *= 1e-7
    exact = model(digits.images)
    scores = []

    def metric(module: nn.Module) -> float:
        with torch.no_grad():
            scores.append(1 - float((module(digits.images) - exact).norm() / exact.norm()))
        return scores[-1]

    assert metric(quantize(model, digits.calibration, calibration="naive")) < 0.7
    scores.clear()
    quantized = quantize(model, digits.calibration, calibration="naive", metric=metric, max_drop=0.1)
    assert quantized.ranges.in_float == {"hidden": "accuracy"}
    assert scores[0] == 1.0
    assert scores[-1] >= 0.9
    assert len(scores) == 3

    def few_are_left(module: nn.Module) -> float:
        scores.append(0.0)
        return -len(module.ranges.sites) if module is not model else -1.0  # type: ignore[arg-type,union-attr]

    scores.clear()
    one = quantize(model, digits.calibration, "naive", metric=few_are_left, max_drop=0)
    assert len(one.ranges.sites) == 1
    assert len(scores) == 2 + 4  # of 5 layers 1, 2 and 4 return; then 3
    untouched = quantize(model, digits.calibration, "naive", metric=lambda module: 1.0)
    assert not untouched.ranges.in_float


def _refused(**arguments: Any) -> str:
    arguments.setdefault("model", Small().eval())
    with pytest.raises(QuantizationError) as refused:
        quantize(**arguments)
    assert isinstance(refused.value, torch_hybrid_backend.errors.HybridError | ValueError)
    return str(refused.value)


def test_faults_get_one_clear_error() -> None:
    """Each says what is wrong, what is legal, and what to do."""
    data = [torch.randn(2, 1, 8, 8)]
    assert "call model.eval() first" in _refused(model=Small(), loader=data)
    assert "the loader is empty" in _refused(loader=[])
    assert "calibration='entropy' needs a loader" in _refused()
    assert "Did you mean 'classifier'?" in _refused(loader=data, exclude=["clasifier"])
    assert "Names are like " in _refused(loader=data, exclude=["xyz"])
    inner = nn.ModuleDict({"head": nn.ModuleDict({"fc1": nn.Linear(2, 2)})}).eval()
    assert "of the ModuleDict. Did you mean 'head.fc1'?" in _refused(model=inner, loader=data, exclude=["fc"])
    for kind, wrong in (("entropy", "entrop"), ("naive", "Naiv")):
        assert f"it is {wrong!r}. Did you mean {kind!r}?" in _refused(loader=data, calibration=wrong)
    assert "it is ['entropy']" in _refused(loader=data, calibration=["entropy"])
    assert "convs is not. Did you mean 'conv'?" in _refused(loader=data, exclude_kinds=["convs"])
    assert "must be a sequence" in _refused(loader=data, exclude="classifier")
    assert "must be among conv, linear, matmul, attention, add" in _refused(loader=data, exclude_kinds=["lstm"])
    assert "must be one of none, naive, entropy" in _refused(loader=data, calibration="kl")
    for wrong in (2, (), (0.5, 2), "0.5", math.nan, object()):
        assert "from 0 to 1, several of them" in _refused(loader=data, smooth=wrong)
    assert "metric needs a loader" in _refused(calibration="none", metric=lambda module: 1.0)
    assert "is NaN" in _refused(loader=data, calibration="naive", metric=lambda module: float("nan"))
    model = Small().eval()
    with torch.no_grad():
        model.features[1].bias[0] = torch.inf
    assert "'inner' is given NaN or infinity" in _refused(model=model, loader=data)


def _guards(module: nn.Module, x: torch.Tensor) -> int:
    """Number of Dynamo's guards on the modules in a module."""
    counts: list[int] = []

    def keep_all(guards: Sequence[Any]) -> list[bool]:
        counts.append(sum("_modules" in guard.name for guard in guards))
        return [True] * len(guards)

    torch._dynamo.reset()
    torch.compile(module, backend="eager", fullgraph=True, options={"guard_filter_fn": keep_all})(x)
    return counts[-1]


def test_a_layer_has_no_more_guards_than_before() -> None:
    """The number of Dynamo's checks in every call grows with a quantized model's layers as it does with the model's.

    A check for each layer comes on top: that the instance has no forward of its own.
    """

    def per_layer(make: Callable[[nn.Module], nn.Module]) -> float:
        torch.manual_seed(0)
        few, many = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(count))).eval() for count in (4, 14))
        return (_guards(make(many), x) - _guards(make(few), x)) / 10

    x = torch.randn(2, 8)
    with torch.no_grad():
        as_written = per_layer(lambda model: model)
        assert per_layer(lambda model: quantize(model, [x], calibration="naive")) <= as_written + 1


def test_changed_ranges_count_in_the_next_call() -> None:
    """A compiled module whose ranges are set anew computes with them, whatever type of number they are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval(), torch.randn(4, 8)
    quantized = quantize(model, [x], calibration="naive")
    compiled = torch.compile(quantized, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), quantized(x))
    narrow = {name: replace(site, ranges=((np.float32(-0.1), 0.1),)) for name, site in quantized.ranges.sites.items()}
    before = quantized(x)
    quantized.ranges = replace(quantized.ranges, sites=narrow)
    assert not torch.equal(quantized(x), before)
    torch.testing.assert_close(compiled(x), quantized(x))


def test_copies_and_pickles() -> None:
    """A copy, deep or through a file, quantizes as the module does."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Linear(6, 3)).eval(), torch.randn(2, 2, 8)
    module = quantize(model, [x], calibration="naive", smooth=0.5)
    assert not torch.equal(module(x), model(x))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert other.ranges == module.ranges


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, kdim=8, vdim=8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(self.encoder(x), y, y)[0]
        return result


def test_projections_of_attention_are_linear_layers(tmp_path: Path) -> None:
    """By names of their own, also without a loader; they can be excluded, their ranges come back, and compiled the results are the same."""
    torch.manual_seed(0)
    model, inputs = _Attending().eval(), (torch.randn(2, 5, 16), torch.randn(2, 7, 8))
    calibrated = quantize(model, [inputs], "naive")
    own = ["encoder.self_attn.in_proj", "encoder.self_attn.out_proj"]
    others = ["attention.in_proj", "attention.in_proj#2", "attention.in_proj#3", "attention.out_proj"]
    assert set(calibrated.ranges.sites) == {*own, *others, "encoder.linear1", "encoder.linear2", "encoder.self_attn"}
    assert set(calibrated.ranges.in_float) == {"attention", "attention#2"}  # products of activations
    kinds = {name: site.kind for name, site in calibrated.ranges.sites.items()}
    assert kinds.pop("encoder.self_attn") == "attention"  # the other asks for its weights, and has no such operator
    assert set(kinds.values()) == {"linear"}
    calibrated.save_ranges(tmp_path / "r.json")
    with torch.no_grad():
        expected, found = model(*inputs), calibrated(*inputs)
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.05
        assert torch.equal(quantize(model, ranges=tmp_path / "r.json")(*inputs), found)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(calibrated, backend="aot_eager", fullgraph=True)(*inputs), found)
        none = quantize(model, calibration="none", exclude=("*.in_proj", "encoder.self_attn"))
        assert set(none.ranges.in_float) == {*own, "attention.in_proj"}
        assert none.ranges.sites.keys() >= {"attention.out_proj", "encoder.linear1"}
        assert 1e-4 < (none(*inputs) - expected).norm() / expected.norm() < 0.05
