"""Reductions of few long rows: parts of a row at once, then their results as one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.compiling import by_estimate, fresh_dynamo
from tests.engines.triton.regions_for_tests import HOPPER, check, compiled, interpret_for, kernels_of, sampled
from torch_hybrid_backend.engines.triton import backend
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.schedules.reduction import PartKernel
from torch_hybrid_backend.engines.triton.split import split
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.loops.kernels import MapKernel, RowKernel

__all__ = ["by_estimate", "fresh_dynamo"]

pytest.importorskip("triton")

Function = Callable[[torch.Tensor], torch.Tensor]
_ONE = (PartKernel, RowKernel)
# By name: the function, and the kernels it is made of.
_FUNCTIONS: dict[str, tuple[Function, tuple[type[object], ...]]] = {
    "sum": (lambda x: x.sum(-1), _ONE),
    "prod": (lambda x: (1 + 1e-4 * x).prod(-1), _ONE),
    "amax": (lambda x: x.amax(-1), _ONE),
    "amin": (lambda x: x.amin(-1), _ONE),
    "any": (lambda x: (x > 5).any(-1), _ONE),
    "all": (lambda x: (x > -5).all(-1), _ONE),
    "argmax": (lambda x: x.argmax(-1), _ONE),
    "argmin": (lambda x: x.argmin(-1), _ONE),
    "var": (lambda x: x.var(-1), _ONE),
    "logsumexp": (lambda x: x.logsumexp(-1), _ONE),
    "softmax": (lambda x: x.softmax(-1), (*_ONE, MapKernel)),
    "layer_norm": (lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), (*_ONE, MapKernel)),
    "twice": (lambda x: (x - x.amax(-1, keepdim=True) * x.mean(-1, keepdim=True)).abs().mean(-1), _ONE * 2),
}
_COLUMNS = ("sum", "argmax", "var", "softmax")


@pytest.mark.parametrize(
    "name", sampled(_FUNCTIONS, ("prod", "amin", "all", "argmax", "logsumexp", "layer_norm", "twice"))
)
def test_parts_of_rows(name: str, tmp_path: Path) -> None:
    """Parts of rows are computed for every combiner, of what is found in one pass, and of several passes; the last part is short, and its last
    chunk not full."""
    torch.manual_seed(0)
    function, kinds = _FUNCTIONS[name]
    x = torch.randn(2, 40001) + 0.5
    assert tuple(type(kernel) for kernel in kernels_of(function, x)) == kinds
    check(tmp_path, function, x, tolerance=1e-3 if name == "prod" else 5e-5)


@pytest.mark.parametrize("name", sampled(_COLUMNS, ("argmax", "var")))
def test_parts_of_columns(name: str, tmp_path: Path) -> None:
    """Neighbouring columns at once, so that whole cache lines are read."""
    torch.manual_seed(0)
    function, kinds = _FUNCTIONS[name]
    x = torch.randn(5001, 40).to(torch.bfloat16)
    columns: Function = lambda x: function(x.transpose(0, 1))  # noqa: E731
    assert tuple(type(kernel) for kernel in kernels_of(columns, x)) == kinds
    check(tmp_path, columns, x)


@pytest.mark.parametrize("name", sampled(("cumsum", "cumprod", "cummax", "cummin"), ("cumsum",)))
def test_scans(name: str, tmp_path: Path) -> None:
    """Each part goes on where those before it ended, NaN and infinities included; what is computed of the results is computed there."""
    kinds = (PartKernel, RowKernel, PartKernel)

    def function(x: torch.Tensor) -> torch.Tensor:
        found = getattr(1 + 1e-4 * x if name == "cumprod" else x, name)(-1)
        return (found if isinstance(found, torch.Tensor) else found[0]) / 100

    x = torch.randn(2, 33001)
    x[1, 20000] = float("inf")
    x[1, 30000] = float("nan")
    assert tuple(type(kernel) for kernel in kernels_of(function, x)) == kinds
    check(tmp_path, function, x, tolerance=1e-4)
    if name == "cumsum":
        check(tmp_path, lambda x: function(x.transpose(0, 1)), torch.randn(1101, 40), tolerance=1e-4)


def test_scans_that_are_not_split(tmp_path: Path) -> None:
    """Those of positions, and those that need one another."""
    x = torch.randn(2, 40001)
    for function in (lambda x: x.cummax(-1)[1], lambda x: x.logcumsumexp(-1), lambda x: x.cumsum(-1).cummax(-1)[0]):
        assert [type(kernel) for kernel in kernels_of(function, x)] == [RowKernel]


def test_whole_tensors_and_statistics_of_channels(tmp_path: Path) -> None:
    """No row but one; rows whose elements lie in several places."""
    x = torch.randn(6, 2, 80, 80)
    for function in (torch.sum, torch.mean, torch.argmax, lambda x: x.var((0, 2, 3))):
        assert isinstance(kernels_of(function, x)[0], PartKernel)
        check(tmp_path, function, x)
    check(tmp_path, lambda x: x.var((0, 2, 3)), x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "name", sampled(("amax", "argmax", "argmin", "var", "logsumexp", "softmax"), ("argmax", "var", "logsumexp"))
)
def test_nan_and_infinities(name: str, tmp_path: Path) -> None:
    """NaN in the last part, infinities in others, a row of nothing but one of them."""
    x = torch.randn(5, 40001)
    x[0, 40000] = float("nan")
    x[1, 30000] = x[1, 20000] = float("inf")
    x[2, :20000] = float("-inf")
    x[3] = float("-inf")
    x[4] = float("inf")
    check(tmp_path, _FUNCTIONS[name][0], x, tolerance=5e-5)


def test_the_first_of_equals_is_found(tmp_path: Path) -> None:
    x = torch.zeros(2, 40001)
    x[1, 15000] = x[1, 35000] = 1
    region, taken = compiled(tmp_path, lambda x: x.argmax(-1), x)
    assert [int(n) for n in region(taken)[0]] == [0, 15000]


def test_passes_that_read_tiles_of_other_shapes(tmp_path: Path) -> None:
    """The first pass reads halves, in wider tiles than the second, which reads floats: neither counts an element twice."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y - x.mean(0)).abs().mean(0)

    x, y = torch.randn(5001, 40).to(torch.bfloat16), torch.randn(5001, 40)
    tiles = [emit_kernel(kernel, "kernel", HOPPER).launch.constants for kernel in kernels_of(function, x, y)[::2]]
    assert len(tiles) == 2
    assert tiles[0] != tiles[1]
    region, taken = compiled(tmp_path, function, x, y)
    torch.testing.assert_close(region(taken)[0].double(), function(x.double(), y.double()), rtol=1e-3, atol=1e-3)


def test_equal_inputs_give_equal_bits(tmp_path: Path) -> None:
    x = torch.randn(3, 40001)
    region, taken = compiled(tmp_path, lambda x: x.sum(-1), x)
    assert torch.equal(region(taken)[0], region(taken)[0])


def test_a_variance_beside_a_large_mean(tmp_path: Path) -> None:
    """A pass is as exact as float32 can tell such elements apart: a mean of 10^4, a deviation of 1, 300,000 of them."""
    torch.manual_seed(0)
    check(tmp_path, lambda x: x.var(-1), 1e4 + torch.randn(1, 300_001), tolerance=2e-4)


def test_what_is_split() -> None:
    """Few rows with elements enough; the interpreter's own target never. Parts are no shorter than a program is worth."""
    target = Target(90, 132)

    def parts(*shape: int) -> int:
        kernels = kernels_of(lambda x: x.sum(-1), torch.empty(shape), target=target)
        return int(kernels[0].part.extent) if isinstance(kernels[0], PartKernel) else 1

    assert [parts(1, 20000), parts(1, 1 << 20), parts(1, 1 << 26), parts(8, 1 << 20)] == [1, 128, 521, 64]
    assert [parts(66, 1 << 20), parts(67, 1 << 20), parts(4096, 1 << 14)] == [8, 1, 1]
    (kernel,) = kernels_of(lambda x: x.sum(-1), torch.empty(1, 1 << 24), target=INTERPRETER)
    assert split(kernel, INTERPRETER) == (kernel,)
    (kernel,) = kernels_of(lambda x: x + 1, torch.empty(1, 1 << 24), target=HOPPER)
    assert split(kernel, HOPPER) == (kernel,)


def test_what_a_pass_stores_is_stored_by_its_parts(tmp_path: Path) -> None:
    """A gradient and its sum over the rows: what is read for one is not read again for the other."""

    def gradients(x: torch.Tensor) -> torch.Tensor:
        g = x * (1 - x)
        return torch.cat([g, g.sum(0, keepdim=True)])

    x = torch.randn(5001, 40)
    kernels = kernels_of(gradients, x)
    first = kernels[0]
    if isinstance(first, PartKernel):
        assert [stage.kind for stage in first.stages].count("store") <= 1
    check(tmp_path, gradients, x, tolerance=1e-4)


def test_sizes_known_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation, made for long rows, serves shorter ones, of one element even; the length of the parts is each call's own."""
    interpret_for(HOPPER, monkeypatch)
    made: list[int] = []
    monkeypatch.setattr(backend, "split", lambda kernel, target: made.append(1) or split(kernel, target))  # type: ignore[func-returns-value]
    torch.manual_seed(0)

    def statistics(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(-1), x.argmax(-1), x.var(-1, correction=0), x.logsumexp(-1)]

    compiled_function = torch.compile(statistics, backend="hybrid", dynamic=True)
    with torch.no_grad():
        for shape in ((3, 40001), (2, 50000), (20, 900), (3, 2)):
            x = torch.randn(shape)
            for got, wanted in zip(compiled_function(x), statistics(x.double()), strict=True):
                torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=5e-5, atol=1e-3)
    assert len(made) == 1


@pytest.mark.full
def test_losses_and_norms_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary, ignored targets, smoothed labels; a batch's statistics; gradients of biases: sums over all rows."""
    interpret_for(HOPPER, monkeypatch)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 2, 1),
        torch.nn.BatchNorm2d(2),
        torch.nn.AvgPool2d(96),
        torch.nn.Flatten(),
        torch.nn.Linear(2, 9001),
    )
    target = torch.tensor([5, -100, 9000, 17])
    x = torch.randn(4, 2, 96, 96)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return torch.nn.functional.cross_entropy(y, target, label_smoothing=0.1) + (y.logsumexp(-1) ** 2).mean()

    twin = copy.deepcopy(model).double()
    torch.compile(loss, backend="hybrid")(model, x).backward()
    loss(twin, x.double()).backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad.double(), other.grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.testing.assert_close(model[1].running_var.double(), twin[1].running_var, rtol=1e-5, atol=1e-6)
