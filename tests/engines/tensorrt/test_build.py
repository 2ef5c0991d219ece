"""Engines from regions: the request, what the builder makes, and both as bytes. Engines are built, never run: there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.tensorrt.regions_for_tests import built, region
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.build import (
    BuildRequest,
    Layout,
    Range,
    SerializedEngine,
    build,
    contiguous,
    extreme,
    memory_order,
)
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.sizes.size import symbol

F = torch.nn.functional
aten = torch.ops.aten

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def block(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.linear(F.gelu(F.linear(x, a, b)), c, d) + x, (64,))


def block_inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((2, 16, 64), (128, 64), (128,), (64, 128), (64,))
    return [torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape).to(dtype) for shape in shapes]


def test_dense_memory_of_any_order() -> None:
    """Engines read and write dense memory in any order of dimensions. Tensors with gaps have no order, and are copied."""

    def spec(tensor: torch.Tensor) -> TensorSpec:
        return TensorSpec.of(tensor)

    x = torch.empty(2, 3, 4, 5)
    assert memory_order(spec(x)) == (0, 1, 2, 3)
    assert memory_order(spec(x.to(memory_format=torch.channels_last))) == (0, 2, 3, 1)
    assert memory_order(spec(x.permute(3, 1, 0, 2))) == (2, 1, 3, 0)
    assert memory_order(spec(x[:, :2])) is None
    assert memory_order(spec(x[:1].expand(7, 3, 4, 5))) is None
    assert memory_order(spec(torch.empty(1, 3).as_strided((1, 3), (77, 1)))) is not None
    assert memory_order(spec(torch.empty(()))) == ()
    assert Layout.of(spec(x[:, :2])).spec == spec(x[:, :2].contiguous())
    n = symbol("n")
    assert contiguous(TensorSpec((n, 3, n), "float32", (1, 1, 1), CPU)).strides == (n * 3, n, 1)


def test_ranges_of_sizes() -> None:
    """The bounds of a size follow from the ranges of its symbols, also where the size falls as a symbol grows."""
    n, ranges = symbol("n"), {"n": Range(2, 8, 64)}
    assert [extreme(n * 3 + 1, ranges, which) for which in ("least", "typical", "most")] == [7, 25, 193]
    assert [extreme(100 - n, ranges, which) for which in ("least", "typical", "most")] == [36, 92, 98]
    assert extreme(5, {}, "most") == 5
    ranges["m"] = Range(1, 4, 32)
    m = symbol("m")
    assert [extreme(n * 2 - m, ranges, which) for which in ("least", "typical", "most")] == [0, 12, 127]
    assert [extreme((n + 64 - m) // 8, ranges, which) for which in ("least", "typical", "most")] == [4, 8, 15]
    assert [extreme(n + 8 - m % 8, ranges, which) for which in ("least", "typical", "most")] == [3, 12, 72]
    with pytest.raises(CompileError, match="no range is given for the size n"):
        extreme(n, {}, "least")


def _requests() -> list[BuildRequest]:
    f32 = Layout(TensorSpec((symbol("n"), 4), "float32", (4, 1), CPU), (0, 1))
    half = Layout(TensorSpec((4,), "bfloat16", (1,), CPU), (0,))
    plain = BuildRequest(b"{}", (f32, symbol("n"), half), (f32,), {"n": Range(1, 8, 16)}, {}, True)
    constant = torch.linspace(-3, 3, 4).to(torch.bfloat16)
    return [
        plain,
        BuildRequest(b"{}", (f32, symbol("n"), half), (f32,), {"n": Range(1, 8, 16)}, {2: constant}, False, 3),
    ]


@pytest.mark.parametrize("request_of", _requests(), ids=["inputs", "constants"])
def test_requests_survive_bytes(request_of: BuildRequest) -> None:
    """Requests are equal after a round trip; constants are no inputs of the engine. Truncated and foreign bytes are refused."""
    data = request_of.to_bytes()
    read = BuildRequest.from_bytes(data)
    assert read.to_bytes() == data
    assert read.form == request_of.form
    assert read.device == request_of.device
    assert read.engine_inputs == ((0,) if request_of.constants else (0, 2))
    for position, tensor in request_of.constants.items():
        assert torch.equal(read.constants[position], tensor)
    for wrong in (b"", b"other" + data, data[:40], data[:-1] if request_of.constants else data[:-5]):
        with pytest.raises(CompileError, match="no request"):
            BuildRequest.from_bytes(wrong)


def test_engines_survive_bytes_and_nothing_else_does() -> None:
    """Truncated, longer or foreign entries of a cache are refused."""
    engine = SerializedEngine(b"plan" * 100, ("input0",), ("output0", "output1"), ("gemm: a",), "tensorrt 1")
    data = engine.to_bytes()
    assert SerializedEngine.from_bytes(data) == engine
    for wrong in (
        b"",
        data[:-1],
        data + b"x",
        data[: len(data) // 2],
        b"\0" * 64,
        data.replace(b"plan_bytes", b"other_name"),
    ):
        with pytest.raises(CompileError, match="no TensorRT engine of this package"):
            SerializedEngine.from_bytes(wrong)


@pytest.mark.tensorrt
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_block_in_every_type_is_fused(dtype: torch.dtype) -> None:
    """gelu is fused into the first product, and the normalisation is one kernel. Ten operators make four layers at most."""
    engine = built(region(block, *block_inputs(dtype)))
    assert engine.inputs == tuple(f"input{i}" for i in range(5))
    assert engine.outputs == ("output0",)
    assert len(engine.layers) <= 4
    assert any("Erf" in layer and "Fc" in layer for layer in engine.layers), engine.layers
    assert any(layer.count("Mean") == 2 and "Sqrt" in layer for layer in engine.layers), engine.layers


@pytest.mark.tensorrt
def test_weights_as_inputs_or_constants() -> None:
    """Weights as constants are part of the engine and of its key. The layer that broadcasts a bias is gone then."""
    inputs = block_inputs()
    made = region(block, *inputs)
    by_name = dict(zip(("x_1", "a_1", "b_1", "c_1", "d_1"), inputs, strict=True))
    constants = {i: by_name[each.name] for i, each in enumerate(made.inputs) if each.name != "x_1"}
    as_inputs, as_constants = built(made), built(made, constants=constants)
    weights = sum(tensor.nbytes for tensor in constants.values())
    assert as_constants.inputs == ("input0",)
    assert as_constants.plan.find(inputs[1].numpy().tobytes()[:256]) > 0 or len(as_constants.plan) > weights
    assert len(as_constants.layers) < len(as_inputs.layers)


@pytest.mark.tensorrt
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_sizes_known_only_at_run_time(dtype: torch.dtype) -> None:
    """An engine serves a range of each size. Sizes that PyTorch reads from shapes are computed in the engine."""

    def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.gelu(x).reshape(x.shape[0], -1).mean(1), x.transpose(1, 2).contiguous()

    made = region(pooled, torch.ones(5, 6, 7, dtype=dtype), dynamic=True)
    engine = built(made)
    assert engine.inputs == ("input0",)
    assert engine.outputs == ("output0", "output1")


@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: (x.relu(), x.relu(), x.reshape(-1)), [torch.ones(2, 3)]),
        (lambda w, i: F.embedding(i, w), [torch.ones(10, 4), torch.ones(1, 2, dtype=torch.int64)]),
        (lambda x: x.argmax(-1), [torch.ones(2, 3)]),
        (lambda x: x > 0, [torch.ones(2, 3)]),
        (lambda x: (x * 2 / (1 + x.abs()), F.relu6(x)), [torch.ones(())]),
        (lambda x: F.max_pool2d(x, 2), [torch.ones(2, 16, 8, 8)]),
        (
            lambda x, w, b: F.conv2d(x, w, b).relu(),
            [t.to(memory_format=torch.channels_last) for t in (torch.ones(2, 16, 8, 8), torch.ones(4, 16, 3, 3))]
            + [torch.ones(4)],
        ),
        (lambda x: F.softmax(x.to(torch.float32), -1).to(torch.float16), [torch.ones(2, 8, dtype=torch.float16)]),
    ],
    ids=[
        "several outputs",
        "embedding",
        "positions",
        "truth values",
        "no dimensions",
        "pooling",
        "channels last",
        "casts",
    ],
)
def test_forms_at_the_border(function: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    """Equal outputs, int64 indices, bools, and memory of another order: each region has its engine."""
    made = region(function, *inputs)
    engine = built(made)
    assert len(engine.inputs) == len(made.inputs)
    assert len(engine.outputs) == len(made.outputs)


@pytest.mark.tensorrt
def test_builds_are_cancelled() -> None:
    """Builds stop before the first layer, and while TensorRT works."""
    made = region(block, *block_inputs())
    request = BuildRequest.of(made, {}).to_bytes()
    with pytest.raises(CompileError, match="cancelled"):
        build(request, lambda done: False)
    told: list[float] = []

    def in_the_middle(done: float) -> bool:
        told.append(done)
        return done == 0.0

    with pytest.raises(CompileError, match="cancelled"):
        build(request, in_the_middle)
    assert told[-1] > 0.0
    assert all(0.0 <= done <= 1.0 for done in told)


@pytest.mark.tensorrt
def test_requests_that_no_engine_can_be_built_of() -> None:
    """Requests for which no engine can be built raise CompileError, whatever is wrong with them."""
    made = region(lambda x: x.relu(), torch.ones(3))
    good = BuildRequest.of(made, {})
    for graph in (b"", b"{}", good.graph.replace(b"aten.relu.default", b"aten.nosuch.default"), good.graph[:-9]):
        with pytest.raises(CompileError):
            build(BuildRequest(graph, good.inputs, good.outputs).to_bytes(), lambda done: True)
    unknown = good.graph.replace(b"aten.relu.default", b"aten.special_bessel_j0.default")
    with pytest.raises(CompileError, match="special_bessel_j0"):
        build(BuildRequest(unknown, good.inputs, good.outputs).to_bytes(), lambda done: True)
