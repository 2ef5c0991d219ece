"""Traces have the strides that eager's operators give their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.capture.fixes import strides
from torch_hybrid_backend.capture.fixes.strides import strides_of_eager

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """No operator has been tried."""
    strides._results.cache_clear()
    yield
    strides._results.cache_clear()


def _laid_out(shape: tuple[int, ...], *order: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose dimensions lie in this order, the outermost first."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    numbers = torch.randint(1, 9, [shape[d] for d in order], generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype).permute(inverse)


def _strides_in(
    recorder, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, **options: object
) -> list[object]:
    """The strides that a call has, traced and run; its values are eager's."""
    expected = function(*inputs)
    actual = recorder.compile(function, **options)(*inputs)
    torch.testing.assert_close(actual, expected)
    (traced,) = recorder.graphs[-1].graph_module.graph.output_node().args[0]
    hints = tuple(getattr(getattr(s, "node", None), "hint", s) for s in traced.meta["val"].stride())
    return [expected.stride(), actual.stride(), hints]


BROADCAST = (_laid_out((10, 1, 5), 2, 1, 0), _laid_out((10, 5), 1, 0))
TWO = (_laid_out((6, 5), 1, 0), _laid_out((6, 5), 0, 1))
CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "logical_xor": (torch.logical_xor, BROADCAST),
    "copysign": (torch.copysign, BROADCAST),
    "floor_divide": (torch.floor_divide, BROADCAST),
    "div_floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), BROADCAST),
    "heaviside": (torch.heaviside, BROADCAST),
    "ldexp": (torch.ldexp, BROADCAST),
    "xlogy": (torch.xlogy, TWO),
    "special_xlog1py": (torch.special.xlog1py, TWO),
    "logsigmoid": (nn.functional.logsigmoid, TWO[:1]),
    "addr": (lambda x: torch.addr(x, x[:, 0], x[0], beta=0), TWO[:1]),
    "roll": (lambda x: torch.roll(x, -1, 0), (_laid_out((2, 3, 4, 5), 0, 2, 3, 1),)),
    "channel_shuffle": (lambda x: nn.functional.channel_shuffle(x, 2), (_laid_out((2, 4, 3, 5), 0, 2, 3, 1),)),
    "batch_norm": (
        lambda x: nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3)),
        (_laid_out((2, 3, 4, 5), 3, 2, 1, 0),),
    ),
    "layer_norm": (lambda x: nn.functional.layer_norm(x, [5]), (_laid_out((4, 5), 1, 0),)),
    "added": (lambda x: torch.roll(x, -1, 0) + 1, (_laid_out((2, 3, 4, 5), 0, 2, 3, 1),)),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_strides_are_eagers(recorder, name: str, dynamic: bool) -> None:
    """Traced strides and those of the results are eager's, for operators whose rules or formulas say others."""
    function, inputs = CASES[name]
    with torch.no_grad():
        eager, *ours = _strides_in(recorder, function, *inputs, dynamic=dynamic)
    assert ours == [eager, eager]


@pytest.mark.parametrize("shape", [(40, 1, 50), (60, 1, 7000)])
def test_large_tensors_are_tried_small(recorder, shape: tuple[int, ...]) -> None:
    """The order of large tensors is found on smaller ones."""
    x, y = _laid_out(shape, 2, 1, 0), _laid_out((shape[0], shape[2]), 1, 0)
    eager, *ours = _strides_in(recorder, torch.logical_xor, x, y)
    assert ours == [eager, eager]
    assert strides._results.cache_info().misses > 0


def test_calls_that_differ_in_large_sizes_are_one(recorder) -> None:
    """An operator runs once for all large tensors of an order."""
    misses = []
    for rows, columns in ((100, 200), (300, 500)):
        torch.compiler.reset()
        x, y = _laid_out((rows, columns), 1, 0), _laid_out((rows, columns), 0, 1)
        recorder.compile(torch.copysign, dynamic=False)(x, y)
        misses.append(strides._results.cache_info().misses)
    assert misses[0] == misses[1] > 0


def test_contiguous_tensors_cost_nothing(recorder) -> None:
    """A graph of contiguous tensors has no operator tried."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    with torch.no_grad():
        recorder.compile(layer)(torch.randn(4, 8))
    # The transposed weight of the linear layer, that is all.
    assert {call.operator for call in _tried(recorder, layer)} <= {aten.addmm.default, aten.linear.default}


def _tried(recorder, layer: nn.Module) -> list[strides._Call]:
    found: list[strides._Call] = []
    original = strides._orders
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strides, "_orders", lambda call, told: (found.append(call), original(call, told))[1])
        torch.compiler.reset()
        with torch.no_grad():
            recorder.compile(layer)(torch.randn(4, 8))
    return found


def test_kernels_that_choose_by_size_keep_what_the_rule_says(recorder) -> None:
    """A convolution of channels-last pixels lies as its rule says, which knows when oneDNN takes it; nothing is copied."""
    layer = nn.Conv2d(16, 32, 3).eval()
    x = torch.randn(4, 16, 30, 30).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected, actual = layer(x), recorder.compile(layer)(x)
    assert actual.stride() == expected.stride()
    assert recorder.operators() == ["aten.convolution.default"]


def test_gradients_have_eagers_strides(recorder) -> None:
    """In training the results and the gradients lie as in eager."""
    x = _laid_out((2, 3, 4, 5), 0, 2, 3, 1)

    def gradient(function: Callable[..., torch.Tensor]) -> list[object]:
        given = x.detach().clone().requires_grad_()
        result = function(given)
        (found,) = torch.autograd.grad(result.square().sum(), given)
        return [result.stride(), found.stride(), found]

    def rolled(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x * 2, 1, 1)

    expected, actual = gradient(rolled), gradient(recorder.compile(rolled))
    assert actual[:2] == expected[:2]
    torch.testing.assert_close(actual[2], expected[2])


def test_random_numbers_stay_eagers(recorder) -> None:
    """Finding strides draws no random numbers."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.roll(torch.rand_like(x), 1, 0)

    x = _laid_out((3, 4, 5), 2, 1, 0)
    torch.manual_seed(3)
    expected = program(x)
    torch.manual_seed(3)
    actual = recorder.compile(program)(x)
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()


def test_operators_of_others_are_left_alone(recorder) -> None:
    """A custom operator runs in calls alone: it may do more than compute."""
    runs: list[int] = []

    @torch.library.custom_op("hybrid_strides::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.clone()

    counted.register_fake(torch.empty_like)
    compiled = recorder.compile(lambda x: counted(x) + 1)
    assert not runs
    compiled(_laid_out((3, 4), 1, 0))
    assert len(runs) == 1


def test_pytorchs_rules_are_back_afterwards() -> None:
    """Whatever happens meanwhile, fake tensors are PyTorch's own again."""
    before = FakeTensorMode.dispatch
    with pytest.raises(ValueError, match="stop"), strides_of_eager():
        raise ValueError("stop")
    assert FakeTensorMode.dispatch is before


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((100, 200), (1, 100), (1, 9)),  # transposed
        ((100, 200), (400, 1), (20, 1)),  # a gap behind each row
        ((100, 200), (400, 2), (20, 2)),  # and between its elements
        ((100, 3, 200), (0, 200, 1), (0, 10, 1)),  # expanded
        ((1, 100), (7, 1), (9, 1)),
        ((100, 200), (1, 1), None),  # overlapping
    ],
)
def test_small_tensors_lie_in_the_same_order(
    shape: tuple[int, ...], given: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    """Large sizes become small ones, and dimensions lie, touch and share memory as before."""
    form = strides._Form(torch.float32, shape, given).with_sizes({100: 9, 200: 10})
    assert (form and form.strides) == expected


def test_private_operators_are_not_tried() -> None:
    """Kernels that take packed weights trust what they are given: none is called with tensors that are made up."""
    assert not strides._is_tried(aten._weight_int4pack_mm_for_cpu.default)
    assert strides._is_tried(aten._softmax.default)
    assert strides._is_tried(aten.logical_xor.default)
