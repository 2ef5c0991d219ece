"""The accuracy gate: what passes and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.precision import ROW_BITS
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.generators import Replay
from torch_hybrid_backend.partition import accuracy
from torch_hybrid_backend.partition.accuracy import TOLERANCES, compare, difference, reference_run
from torch_hybrid_backend.partition.regions import partition_graph


def _region(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    engine = FakeEngine()
    engine.draws = True
    (segment,) = partition_graph(trace(function, *inputs), [engine], Config()).graph.segments
    return segment.region


def _compare(
    function: Callable[..., torch.Tensor], x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> str:
    """The gate's verdict on an engine that returns `change(eager's output)`."""
    expected = function(x)
    return compare(_region(function, x), [x], [expected], [change(expected.clone())]).why


def test_equal_outputs_pass_with_error_zero() -> None:
    """Bit for bit equal, infinities and NaN included."""
    x = torch.tensor([1.0, float("inf"), float("nan")])
    comparison = compare(_region(torch.sin, x), [x], [x], [x.clone()])
    assert (comparison.why, comparison.max_error) == ("", 0.0)


def test_rounding_passes_and_a_wrong_value_does_not() -> None:
    """1e-6 is rounding; 1e-2 in a single element of many is a fault, and the error is named."""
    x = torch.randn(64, 64)
    assert _compare(torch.sin, x, lambda y: y + 1e-6) == ""

    def spoil(y: torch.Tensor) -> torch.Tensor:
        y[3, 5] += 1
        return y

    why = _compare(torch.sin, x, spoil)
    assert "output 0" in why
    assert "differs from eager's by up to 1" in why
    comparison = compare(_region(torch.sin, x), [x], [x.sin()], [x.sin() * 1.25])
    assert comparison.relative_error == pytest.approx(0.25)
    assert compare(_region(torch.sin, x), [x], [x.sin()], [x.sin()]).relative_error is None
    assert compare(_region(torch.sin, x), [x], [x.sin()], [x.sin().double()]).relative_error is None


def test_large_outputs_are_judged_by_their_size() -> None:
    """Sums in another order differ by some 1e-6 of the outputs, however large those are; 1e-4 of them is a fault."""
    torch.manual_seed(0)
    x, w = torch.randn(128, 3072), torch.randint(-127, 128, (3072, 768)) / 64
    region = _region(torch.mm, x, w)
    exact = (x.double() @ w.double()).float()  # of one rounding, as exact as any
    one_by_one = torch.zeros(128, 768)
    for k in range(3072):
        one_by_one.addcmul_(x[:, k : k + 1], w[k])
    assert not torch.allclose(one_by_one, exact, rtol=1e-4, atol=1e-4)
    assert compare(region, [x, w], [exact], [one_by_one]).why == ""
    assert compare(region, [x, w], [exact], [one_by_one + 1e-5 * exact.abs().mean()]).why != ""


def test_floats_of_8_bits_may_differ_by_one_rounding() -> None:
    """PyTorch cannot compare them itself: 1.0 and 1.125 are neighbours, 1.0 and 2.0 are not."""
    x = torch.ones(16)
    function = lambda v: v.to(torch.float8_e4m3fn)  # noqa: E731
    assert _compare(function, x, lambda y: (y.float() * 1.125).to(y.dtype)) == ""
    assert "differs" in _compare(function, x, lambda y: (y.float() * 2).to(y.dtype))


def _runs(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the wider runs that are made."""
    made: list[torch.dtype] = []

    def run(module: torch.fx.GraphModule, inputs: Sequence[object], dtype: torch.dtype, **given: Any) -> object:
        made.append(dtype)
        return reference_run(module, inputs, dtype, **given)

    monkeypatch.setattr(accuracy, "reference_run", run)
    return made


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 0.25), (torch.float16, 0.125)])
def test_half_types_are_judged_against_float32(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that accumulates in float32 differs from eager by more than is close, and is right; one that is off by a tenth is not."""
    torch.manual_seed(0)
    x = torch.randn(256, 256).to(dtype)

    def function(v: torch.Tensor) -> torch.Tensor:
        return ((v @ v) * scale).exp().sum(1)

    better = ((x.double() @ x.double()) * scale).exp().sum(1).to(dtype)
    expected = function(x)
    close = TOLERANCES[dtype]
    assert not torch.allclose(expected, better, rtol=close.relative, atol=close.absolute)
    made = _runs(monkeypatch)
    assert compare(_region(function, x), [x], [expected], [better]).why == ""
    assert compare(_region(function, x), [x], [expected], [better * 1.1]).why != ""
    assert made == [torch.float32] * 2


def test_what_rounds_as_half_types_do_does_not_judge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded products do not judge half types: float64 judges where the settings let float32 be multiplied with fewer bits; of convolutions
    where a region has any."""
    x = torch.randn(2, 3, 8, 8).bfloat16()
    w = torch.randn(4, 3, 3, 3).bfloat16()
    regions = {
        "convolution": (_region(torch.conv2d, x, w), [x, w], torch.conv2d(x, w)),
        "none": (_region(torch.exp, x), [x], x.exp()),
    }
    made = _runs(monkeypatch)
    for matmul, convolution, expected in (
        ("ieee", "none", [torch.float32, torch.float32]),
        ("ieee", "tf32", [torch.float64, torch.float32]),
        ("bf16", "none", [torch.float64, torch.float64]),
    ):
        monkeypatch.setattr(accuracy, "float32_precision", lambda device, found=(matmul, convolution): found)
        for region, inputs, output in regions.values():
            assert compare(region, inputs, [output], [output * 1.5]).why
        assert made == expected
        made.clear()


def test_float32_is_judged_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where half types were computed on the way; and one run serves all outputs of a dtype."""

    def function(v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low = v.bfloat16().exp()
        return low, low.float(), v * 3

    x = torch.randn(64)
    region, outputs = _region(function, x), list(function(x))
    made = _runs(monkeypatch)
    worse = [outputs[0], outputs[1] * 1.001, outputs[2] + 2e-4]
    assert "output 2" in compare(region, [x], outputs, worse).why
    assert made == [torch.float64]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_is_close_costs_no_wider_run(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the table's tolerances the outputs pass; a hundredfold more is looked at."""
    x = torch.linspace(1, 2, 100).to(dtype)
    made = _runs(monkeypatch)
    step = 0.4 * TOLERANCES[dtype].relative
    assert compare(_region(torch.clone, x), [x], [x], [(x.double() * (1 + step)).to(dtype)]).why == ""
    assert not made
    assert compare(_region(torch.clone, x), [x], [x], [(x.double() * (1 + 100 * step)).to(dtype)]).why
    assert len(made) == 1


@torch.library.custom_op("hybrid_tests::crowded", mutates_args=())
def crowded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An operator for which a device other than the host has too little memory, in whatever dtype is wider than float32."""
    if device.type != "cpu" and x.dtype is torch.float64:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return x * 2


@crowded.register_fake
def _(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(x)


def test_the_host_compares_where_a_device_has_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the operators, their device arguments and all values are the host's. A stand-in for a device: its tensors are the host's own."""
    x = torch.randn(2000)
    region = _region(lambda v: crowded(v, torch.device("cuda")), x)
    expected = [x * 2]
    monkeypatch.setattr(accuracy, "_is_on_host", lambda value: False)
    with caplog.at_level("INFO", "torch_hybrid_backend"):
        found = compare(region, [x], expected, [x * 2.001])
    assert found.code is Reason.ACCURACY
    assert "compared on the host" in caplog.text
    assert compare(region, [x], expected, [x * 2 + 1.0001e-4]).code is Reason.ACCURACY
    monkeypatch.setattr(accuracy, "_is_on_host", lambda value: True)  # and where it is the host that has none
    assert compare(region, [x], expected, [x * 2.001]).code is Reason.OUT_OF_MEMORY


def test_nan_where_eager_has_none_fails() -> None:
    """And the other way round."""
    x = torch.randn(2000)

    def spoil(y: torch.Tensor) -> torch.Tensor:
        y[7] = float("nan")
        return y

    assert _compare(torch.sin, x, spoil) != ""
    assert _compare(torch.log, x, torch.nan_to_num) != ""
    assert _compare(torch.log, x, lambda y: y) == ""


def test_nan_and_infinity_do_not_hide_other_faults() -> None:
    """Elements beside NaN and infinities in the same places are still compared."""
    x = torch.randn(2000)
    x[0] = 0.0
    expected = torch.log(x)
    assert expected.isnan().any()
    assert expected.isinf().any()
    assert _compare(torch.log, x, lambda y: y * (1 + 1e-6)) == ""
    assert _compare(torch.log, x, lambda y: y * 1.5) != ""


def test_infinity_where_eager_has_a_number_fails() -> None:
    """An overflow in an intermediate result."""
    assert _compare(torch.sin, torch.randn(9), lambda y: torch.full_like(y, float("inf"))) != ""


@pytest.mark.parametrize("x", [torch.tensor([1, 2, 2**40]), torch.tensor([True, False])])
def test_integers_and_booleans_are_exact(x: torch.Tensor) -> None:
    """A large integer that is off by one is an error, though within any relative tolerance."""

    def spoil(y: torch.Tensor) -> torch.Tensor:
        y[-1] = ~y[-1] if y.dtype is torch.bool else y[-1] + 1
        return y

    region = _region(lambda v: v.clone(), x)
    assert compare(region, [x], [x], [spoil(x.clone())]).why != ""
    assert compare(region, [x], [x], [x.clone()]).why == ""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y.double(), "dtype"),
        (lambda y: y.reshape(2, 2, 3), "shape"),
        (lambda y: y.t().contiguous().t(), "strides"),
    ],
)
def test_the_form_must_be_eagers(change: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    """Dtype, shape and strides are part of the answer."""
    assert what in _compare(torch.sin, torch.randn(4, 3), change)


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    """Strides of dimensions of size one address nothing."""
    assert _compare(torch.sin, torch.randn(1, 3), lambda y: torch.as_strided(y, (1, 3), (77, 1))) == ""


def test_a_missing_output_fails() -> None:
    """The number of outputs is compared first."""
    x = torch.randn(3)
    assert "0 outputs" in compare(_region(torch.sin, x), [x], [x], []).why


def test_the_float64_run_widens_constants_and_dtype_arguments() -> None:
    """A cast to bfloat16 inside the region and a float32 constant do not round."""
    constant = torch.full((3,), 1 / 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.bfloat16).float() * constant) + torch.ones(3, dtype=torch.float32)

    x = torch.tensor([0.1, 0.2, 0.3])
    (result,) = reference_run(_region(function, x).graph_module, [x], torch.float64) or [None]
    assert isinstance(result, torch.Tensor)
    assert result.dtype is torch.float64
    assert torch.equal(result, x.double() * constant.double() + 1)


def test_a_region_that_reinterprets_bits_has_no_float64_run() -> None:
    """Then allclose alone decides."""
    x = torch.randn(4)
    assert reference_run(_region(lambda v: v.view(torch.int32) + 1, x).graph_module, [x], torch.float64) is None


def test_an_operator_without_float64_has_no_float64_run() -> None:
    """Nothing takes it in float64: allclose alone decides. What fails for another reason is raised."""

    @torch.library.custom_op("hybrid_tests::single", mutates_args=())
    def single(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError(f"single is not implemented for {x.dtype}")
        return x * 2

    @single.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    x = torch.randn(4)
    assert reference_run(_region(single, x).graph_module, [x], torch.float64) is None
    table = torch.randn(4, 2)
    region = _region(lambda t, i: t[i], table, torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        reference_run(region.graph_module, [table, torch.tensor([0, 9])], torch.float64)


def test_a_wider_run_draws_the_same_numbers() -> None:
    """Random operators draw in their own dtype, from the generator as it was: else nothing that draws could be told from what is wrong. On the
    host no numbers of another device are drawn."""

    def function(v: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(v)
        kept, mask = torch.native_dropout(v + noise, 0.3, True)
        return (kept * 0.5).sin() * mask

    x = torch.rand(4000).bfloat16() / 100
    region, state = _region(function, x), torch.get_rng_state()
    expected = function(x)
    torch.set_rng_state(state)
    wide = reference_run(region.graph_module, [x], torch.float64)
    assert wide is not None
    (ideal,) = wide
    assert isinstance(ideal, torch.Tensor)
    assert ideal.dtype == torch.float64
    assert ((ideal == 0) == (expected == 0)).all()
    torch.testing.assert_close(ideal, expected.double(), rtol=2e-2, atol=2e-2)

    torch.set_rng_state(state)
    replay = Replay(CPU, draws=True)
    replay.run(lambda: function(x))
    inexact = torch.where(torch.arange(4000) == 7, expected * 1.02, expected)
    inexact[7] += 0.02
    assert compare(region, [x], [expected], [inexact], replay).why == ""
    assert compare(region, [x], [expected], [expected * 1.05], replay).why != ""
    assert compare(region, [x], [expected], [expected * 1.05]).why == ""  # judged by other numbers, whatever is right
    assert reference_run(region.graph_module, [x], torch.float64, on_host=True) is None
    replay.run(lambda: torch.rand(1))
    assert (
        "more or fewer numbers from the random number generator"
        in compare(region, [x], [expected], [expected], replay).why
    )


def test_attention_without_dropout_is_widened() -> None:
    """Its operator draws numbers where it has dropout only."""
    q = torch.randn(1, 2, 16, 8).bfloat16()

    def function(v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(v, v, v)[0]

    module = _region(function, q).graph_module
    wide = reference_run(module, [q], torch.float64)
    assert wide is not None
    torch.testing.assert_close(wide[0], function(q.double()))


def _quantize(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.quantized_decomposed.quantize_per_tensor.default(x, 0.1, 3, 0, 255, torch.uint8)


def _written_out(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.round(x * 10) + 3, 0, 255).to(torch.uint8)


@pytest.mark.parametrize("quantize", [_quantize, _written_out])
def test_quantized_integers_may_differ_by_one_step(quantize: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A step is a rounding, also behind views and pooling; two are a fault. Integers that come about otherwise are exact, places of pooling
    among them."""
    x = torch.rand(2, 4, 8, 8) * 20
    pooled = lambda v: torch.nn.functional.max_pool2d(quantize(v), 2).flatten(1)  # noqa: E731
    for function in (quantize, pooled):
        assert _compare(function, x, lambda y: y + 1) == ""
        assert "by up to 2" in _compare(function, x, lambda y: y + 2)
    truncated = lambda v: v.to(torch.uint8)  # noqa: E731
    places = lambda v: torch.ops.aten.max_pool2d_with_indices.default(quantize(v).float(), [2, 2])[1]  # noqa: E731
    for function in (truncated, places):
        assert "by up to 1" in _compare(function, x, lambda y: y + 1)


def test_regions_that_quantize_are_run_in_a_wider_dtype() -> None:
    """The wider run goes through operators that take float32 alone: what differs from eager no more than rounding does passes, what differs
    more does not."""
    w = torch.randn(8, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        quantized = torch.ops.quantized_decomposed
        q = quantized.quantize_per_tensor.default(x @ w, 0.1, 0, -128, 127, torch.int8)
        return quantized.dequantize_per_tensor.default(q, 0.1, 0, -128, 127, torch.int8) @ w.T

    x = torch.randn(64, 8)
    (wide,) = reference_run(_region(function, x).graph_module, [x], torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), function(x), rtol=1e-4, atol=1e-4)
    assert _compare(function, x, lambda y: y * 1.00001) == ""
    assert "differs" in _compare(function, x, lambda y: y * 1.01)


def test_a_step_at_a_tie_may_show_in_what_is_computed_from_it() -> None:
    """A value that lies at a tie may be quantized to either side of it, and what is computed from it differs by a step times its weights;
    four steps are a fault, and so is one where nothing lies at a tie."""
    w = torch.randn(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        quantized = torch.ops.quantized_decomposed
        q = quantized.quantize_per_tensor.default(x, 0.1, 0, -128, 127, torch.int8)
        return quantized.dequantize_per_tensor.default(q, 0.1, 0, -128, 127, torch.int8) @ w

    x = torch.randint(-100, 100, (4, 16)) * 0.1
    x[1, 3] = 0.55 + 1e-7
    step = torch.zeros(4, 16)
    step[1] = 0.1 * w[3]
    assert _compare(function, x, lambda y: y + step) == "" or _compare(function, x, lambda y: y - step) == ""
    assert "differs" in _compare(function, x, lambda y: y + 4 * step)
    x[1, 3] = 0.5
    assert "differs" in _compare(function, x, lambda y: y + step)


@pytest.mark.parametrize(
    ("bits", "legal", "wrong", "outlier"), [(16, 3e-4, 3e-3, 0.02), (8, 5e-3, 0.06, 0.3), (32, 1e-8, 3e-4, 1e-3)]
)
def test_rows_that_are_rounded(bits: int, legal: float, wrong: float, outlier: float) -> None:
    """Outputs of a marked product may be off by what so many bits of its rows make, in the mean; no element may stand out. 32
    bits are all."""
    w = torch.randn(64, 64)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w) * 100

    x = torch.randn(32, 64)
    expected = product(x)
    noise = torch.randn(32, 64) * expected.square().mean().sqrt()
    one = torch.zeros(32, 64)
    one[3, 5] = outlier * float(expected.abs().max())
    region = _region(product, x)
    for node in region.graph_module.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            node.meta[ROW_BITS] = bits

    def passes(off: torch.Tensor) -> bool:
        return compare(region, [*_inputs_of(region, x, w)], [expected], [expected + off]).why == ""

    assert passes(legal * noise)
    assert not passes(wrong * noise)
    assert not passes(one)
    assert not passes(torch.full((32, 64), torch.nan))


@pytest.mark.parametrize("beside_eager", [accuracy.BESIDE_EAGER_BYTES, 0], ids=["float64", "float32"])
def test_what_many_layers_make_of_rounded_rows(beside_eager: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors grow from layer to layer: outputs may be off by twice what rounding the rows of all marked products makes, and by no more. Where
    memory is short for a run in float64, one in float32 tells how much that is."""
    monkeypatch.setattr(accuracy, "BESIDE_EAGER_BYTES", beside_eager)
    torch.manual_seed(0)
    layers = [torch.randn(64, 64) / 4 for _ in range(12)]

    def deep(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.mm(x, weight).relu() - x
        return x

    x = torch.randn(48, 64)
    region = _region(deep, x, *layers)
    for node in region.graph_module.graph.nodes:
        if node.target is torch.ops.aten.mm.default:
            node.meta[ROW_BITS] = 8
    expected = deep(x, *layers)

    def rounded(scale: float) -> torch.Tensor:
        y = x
        for weight in layers:
            step = y.abs().amax(1, keepdim=True) / 127
            y = torch.mm(y + scale * ((y / step).round() * step - y), weight).relu() - y
        return y

    values = [x, *layers]

    def passes(result: torch.Tensor) -> bool:
        return compare(region, values, [expected], [result]).why == ""

    off = (rounded(1) - expected).norm() / expected.norm()
    assert off > 0.02  # more than is allowed at sight
    made = _runs(monkeypatch)
    assert passes(rounded(1))
    assert not passes(rounded(4))
    assert set(made) == {torch.float32 if beside_eager == 0 else torch.float64}


def _inputs_of(region: Region, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """The region's inputs in its order."""
    return [x if tuple(i.spec.shape) == tuple(x.shape) else w for i in region.inputs]


def test_two_runs_of_the_same_operators() -> None:
    """Numbers, forms and values within the tolerances of their dtypes are the same; the sentence says which output is not."""
    x = torch.randn(4, 3)
    assert difference([x, 3, math.nan, None], [x * (1 + 1e-6), 3, math.nan, None]) == ""
    assert difference([x], [x, x]) == "it returned 2 outputs, not 1"
    assert difference([x, 3], [x, 4]) == "output 1 is 4, not 3"
    assert difference([x], [x.T.contiguous().T]).startswith("output 0 has strides")
    assert difference([x], [x.double()]).startswith("output 0 has dtype")
    assert difference([x], [x + 1]).startswith("output 0 differs by up to 1")


def _far_layers() -> tuple[Callable[..., torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Two layers in bfloat16 with their arguments, eager's output, and one with sums in float32, which is not close to it."""
    torch.manual_seed(0)
    arguments = [torch.randn(*size).bfloat16() for size in ((3000,), (64, 512), (512, 3000), (3000, 400))]

    def function(bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.addmm(bias, x, w)) @ v

    exact = function(*(each.double() for each in arguments)).bfloat16()
    return function, arguments, [function(*arguments)], [exact]


def test_weights_of_products_are_widened_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few columns at a time give what whole weights give."""
    function, arguments, _, _ = _far_layers()
    region = _region(function, *arguments)
    whole = reference_run(region.graph_module, arguments, torch.float64)
    monkeypatch.setattr(accuracy, "_WEIGHT_ELEMENTS", 4096)
    parts = reference_run(region.graph_module, arguments, torch.float64)
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-12, atol=1e-12)


def test_where_a_wider_run_takes_too_much_memory_eager_alone_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the root mean square of the difference, and the comparison says so; what is far off fails."""
    function, arguments, expected, exact = _far_layers()
    region = _region(function, *arguments)
    close = TOLERANCES[torch.bfloat16]
    assert not torch.allclose(expected[0], exact[0], rtol=close.relative, atol=close.absolute)
    made = _runs(monkeypatch)
    assert compare(region, arguments, expected, exact).note == ""
    assert made == [torch.float32]
    monkeypatch.setattr(accuracy, "BESIDE_EAGER_BYTES", -(1 << 40))
    found = compare(region, arguments, expected, exact)
    assert found.why == ""
    assert "takes too much memory" in found.note
    assert compare(region, arguments, expected, [exact[0] * 1.1]).why != ""
    assert made == [torch.float32]


def test_only_what_is_far_off_is_run_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that lead to other outputs alone are not computed wide."""

    def function(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return v.exp(), v.sin()

    x, ran = torch.randn(64), []

    def run(module: torch.fx.GraphModule, *rest: Any, **how: Any) -> object:
        ran.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return reference_run(module, *rest, **how)

    monkeypatch.setattr(accuracy, "reference_run", run)
    region = _region(function, x)
    assert "output 1" in compare(region, [x], [x.exp(), x.sin()], [x.exp(), x.sin() + 1]).why
    assert ran == ["aten.sin.default"]
