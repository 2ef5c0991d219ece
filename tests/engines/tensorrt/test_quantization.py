"""Operators on 8-bit values that TensorRT takes, and each refusal with its code. No TensorRT is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported
from torch_hybrid_backend.engines.tensorrt import quantization
from torch_hybrid_backend.engines.tensorrt.installed import FLAVOURS, Installation
from torch_hybrid_backend.engines.tensorrt.quantization import verdict_of, zero_points
from torch_hybrid_backend.graph import quantization as quantized
from torch_hybrid_backend.graph.quantized import operator_name

F = torch.nn.functional
Q = torch.ops.quantized_decomposed


@pytest.fixture(autouse=True)
def _current_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the installation, so that verdicts do not depend on what is installed here."""
    monkeypatch.setattr(quantization, "installation", lambda: Installation(FLAVOURS[0], "2.13.0", "10.15"))


X, W, S = torch.randn(8, 16), torch.ones(4, 16, dtype=torch.int8), torch.rand(4)
FP8 = torch.float8_e4m3fn


def verdicts(function: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, Any]:
    """Verdicts on a traced function's nodes, by name, without those that are None."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    found = {node.name: verdict_of(node) for node in graph.graph.nodes if node.op == "call_function"}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def _zeros(count: int, value: int = 0) -> torch.Tensor:
    return torch.full([count], value, dtype=torch.int64)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, s: quantized.tensor(quantized.call, x, -1.0, 2.0),
        lambda x, w, s: quantized.tensor_now(quantized.call, x),
        lambda x, w, s: quantized.rows_now(quantized.call, x),
        lambda x, w, s: Q.dequantize_per_channel(w, s, _zeros(4), 0, -127, 127, torch.int8).t(),
        lambda x, w, s: Q.dequantize_per_channel(w, s, None, 0, -128, 127, torch.int8),
        lambda x, w, s: w.t().to(torch.float32),
        lambda x, w, s: x.clamp(-448, 448).to(FP8).t().to(torch.float32),
    ],
    ids=["tensor", "tensor now", "rows now", "channels", "no zero points", "cast", "float8"],
)
def test_what_quantize_and_torchao_write_is_taken(function: Callable[..., Any]) -> None:
    """Quantized layers are taken with quantizers, fills of zero points, and views of integers."""
    found = verdicts(function, X, W, S)
    assert found
    assert all(isinstance(verdict, Supported) for verdict in found.values()), found


@pytest.mark.parametrize(
    ("function", "code", "why"),
    [
        (lambda x, w, s: quantized.tensor(quantized.call, x, 0.0, 2.0), Reason.DTYPE, "torch.uint8"),
        (lambda x, w, s: Q.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8), Reason.ARGUMENT, "it is 3"),
        (
            lambda x, w, s: Q.dequantize_per_channel(w, s, _zeros(4, 1), 0, -128, 127, torch.int8),
            Reason.ARGUMENT,
            "whether it is 0 is not known",
        ),
        (
            lambda x, w, s: Q.dequantize_per_channel(w, s, s.to(torch.int64), 0, -128, 127, torch.int8),
            Reason.ARGUMENT,
            "whether it is 0 is not known",
        ),
        (lambda x, w, s: Q.quantize_per_tensor(x, 0.1, 0, -8, 7, torch.int8), Reason.ARGUMENT, "clamps to -8 and 7"),
        (
            lambda x, w, s: Q.dequantize_per_channel_group(
                w, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.int32), -8, 7, torch.int8, 8, torch.float32
            ),
            Reason.UNKNOWN_OPERATOR,
            "dequantize_per_channel_group",
        ),
        (lambda x, w, s: x.to(FP8), Reason.ARGUMENT, "must be clamped first"),
        (lambda x, w, s: x.clamp(-500, 448).to(FP8), Reason.ARGUMENT, "must be clamped first"),
    ],
    ids=["uint8", "zero point", "zero points", "unknown", "few levels", "groups", "float8", "float8 clamped wrongly"],
)
def test_what_is_refused_has_a_code(function: Callable[..., Any], code: Reason, why: str) -> None:
    """The refusal has a sentence."""
    refused = [verdict for verdict in verdicts(function, X, W, S).values() if isinstance(verdict, Refused)]
    assert refused
    assert {verdict.code for verdict in refused} == {code}
    assert why in refused[-1].why


def test_what_is_none_of_its_business() -> None:
    """Plain operators, and integers that are no zero points, have no verdict here."""
    assert verdicts(lambda x: (x @ x.t()).relu() + torch.zeros(8, dtype=torch.int64), X) == {}
    graph = make_fx(lambda x: quantized.tensor_now(quantized.call, x), tracing_mode="fake")(X)
    titles = [operator_name(node) for node in graph.graph.nodes]
    assert titles[-3:-1] == ["quantize_per_tensor.tensor", "dequantize_per_tensor.tensor"]


def test_float8_needs_a_chip_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """float8 needs sm_89 or later; int8 needs no minimum."""
    for capability, taken in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        found = verdicts(lambda x: x.clamp(-448, 448).to(FP8).to(torch.float32), X)
        assert all(bool(verdict) is taken for verdict in found.values())
        if not taken:
            assert {verdict.code for verdict in found.values()} == {Reason.UNSUPPORTED}
        assert all(verdicts(lambda x: quantized.tensor(quantized.call, x, -1.0, 1.0), X).values())


def test_the_first_release_that_builds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX 1.4 has no 8-bit values; every version of TensorRT has."""
    rtx, full = FLAVOURS[1], FLAVOURS[0]
    for found, taken in (
        (Installation(rtx, "2.11.0", "1.4.0.76"), False),
        (Installation(rtx, "2.13.0", "1.5.0.114"), True),
        (Installation(full, "2.11.0", "10.15.1"), True),
        (Refused(Reason.MISSING_DEPENDENCY, "nothing is installed"), True),
    ):
        monkeypatch.setattr(quantization, "installation", lambda found=found: found)
        verdicts_found = verdicts(lambda x: quantized.tensor(quantized.call, x, -1.0, 1.0), X).values()
        assert [bool(verdict) for verdict in verdicts_found] == [taken, taken]
        assert taken or {verdict.code for verdict in verdicts_found} == {Reason.UNSUPPORTED}


def test_convolutions_of_int8_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX has no int8 convolutions, also if values are pooled or joined before. TensorRT has; both take int8 weights."""
    x, w, s = torch.randn(1, 4, 8, 8), torch.ones(4, 4, 3, 3, dtype=torch.int8), S

    def weight(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        dequantized: torch.Tensor = Q.dequantize_per_channel(w, s, _zeros(4), 0, -127, 127, torch.int8)
        return dequantized

    def narrow(x: torch.Tensor) -> torch.Tensor:
        dequantized: torch.Tensor = quantized.tensor(quantized.call, x, -1.0, 1.0)
        return dequantized

    functions: list[Callable[..., Any]] = [
        lambda x, w, s: F.conv2d(narrow(x), weight(w, s)),
        lambda x, w, s: F.conv2d(F.max_pool2d(narrow(x), 2), weight(w, s)),
        lambda x, w, s: F.conv2d(torch.cat([narrow(x), narrow(x)], 1)[:, 2:6], weight(w, s)),
    ]
    only_weights: list[Callable[..., Any]] = [
        lambda x, w, s: F.conv2d(x, weight(w, s)),
        lambda x, w, s: F.conv2d(narrow(x).relu(), weight(w, s)),
    ]
    for flavour in FLAVOURS:
        found = Installation(flavour, "2.13.0", "1.5")
        monkeypatch.setattr(quantization, "installation", lambda found=found: found)
        for function in functions:
            verdict = verdicts(function, x, w, s).get("convolution")
            assert (verdict is not None) is (flavour.module == "tensorrt_rtx")
            assert verdict is None or verdict.code is Reason.UNSUPPORTED
        for function in only_weights:
            assert "convolution" not in verdicts(function, x, w, s)


def test_zero_points_are_on_the_host_whatever_the_default_device() -> None:
    """The request takes the bytes of zero points, which a tensor on another device may not have."""
    graph = make_fx(lambda x, s, z: Q.quantize_per_channel(x, s, z, 0, -128, 127, torch.int8), tracing_mode="fake")(
        X, torch.rand(8), _zeros(8)
    )
    with torch.device("meta"):
        found = zero_points(SimpleNamespace(graph_module=graph))  # type: ignore[arg-type]
    assert list(found) == [2]
    assert torch.equal(found[2], _zeros(8))
