"""Reduced precision as docs/precision.md tells of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from torch_hybrid_backend import backend, machine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.precision import DEFAULT_TOLERANCES
from torch_hybrid_backend.driver import graph_compilation, precision_speed_check
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.graph import quantization
from torch_hybrid_backend.partition.deviation import relative_error

_PAGE = Path(__file__).parents[2] / "docs" / "precision.md"


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the instructions, and gains by them."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda precision: ())
    monkeypatch.setattr(precision_speed_check, "_rate", lambda: 1e-9)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    nn = torch.nn
    layers = (
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return nn.Sequential(*layers).eval()


def test_the_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of Python, one after the other; what is printed has the lines that are shown, but for numbers."""
    names = {
        "torch": torch,
        "torch_hybrid_backend": torch_hybrid_backend,
        "model": _model(),
        "x": torch.randn(1, 3, 64, 64),
        "loader": list(torch.randn(4, 1, 3, 64, 64)),
    }
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w*)\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    code = [text for language, text in blocks if language == "python"]
    shown, *_ = (text for language, text in blocks if language == "text")
    assert len(code) == 4
    with torch.no_grad():
        for text in code:
            exec(text, names)
    printed = _without_numbers(capsys.readouterr().out)
    for line in shown.splitlines():
        assert _without_numbers(line).strip() in printed


def _without_numbers(text: str) -> str:
    """Times are this machine's, and so are errors."""
    text = re.sub(r"\((measured[^)]*|estimated)\)", "", text)
    return re.sub(r"\bn (us|ms|s)\b", "n us", re.sub(r"\d[\d.]*(e-\d+)?", "n", text))


def test_the_environment_is_enough(settings: pytest.MonkeyPatch) -> None:
    """HYBRID_PRECISION converts a program as it is; its outputs are float32, near those as written, and follow the weights."""
    settings.setenv("HYBRID_PRECISION", "bf16")
    model, x = _model(), torch.randn(2, 3, 64, 64)
    compiled = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        for _ in range(3):
            expected, result = model(x), compiled(x)
            assert result.dtype == torch.float32
            error = relative_error(expected, result)
            assert error is not None
            assert 1e-5 < error < 0.02
            for parameter in model.parameters():
                parameter.mul_(1.1)


class _Patches(torch.nn.Module):
    """Patches of an image, attention between them with a written softmax, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.project = torch.nn.Conv2d(3, 64, 4, 4), torch.nn.Linear(64, 3 * 64)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.project(rows).chunk(3, dim=-1)
        return self.head(torch.softmax(q @ k.transpose(1, 2) / 8, -1) @ v + rows)


@pytest.mark.parametrize("precision", ["fp16", "int8+bf16"])
def test_a_model_compiles_in(precision: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With whatever instructions this machine has: results are near float32's, and either operators are converted and every layer that is not
    has a code, or one warning says what is lacking."""
    monkeypatch.setattr(backend, "lacking_instructions", machine.lacking_instructions)
    graph_compilation.warn_once.cache_clear()
    torch.manual_seed(0)
    model, x, options = _Patches().eval(), torch.randn(2, 3, 32, 32), {"precision": precision}
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, x, options=options).plans
        compiled = torch.compile(model, backend="hybrid", options=options)
        for _ in range(3):
            expected, result = model(x), compiled(x)
            error = relative_error(expected, result)
            assert result.dtype == torch.float32
            assert error is not None
            assert error < DEFAULT_TOLERANCES[precision]
    used = backend.with_instructions(Config(precision=precision)).precision
    said = [record.getMessage() for record in caplog.records if "no instructions for" in record.getMessage()]
    assert len(said) == (used != precision)
    converted = dict(plan.conversion.converted) if plan.conversion is not None else {}
    parts = {
        "as-written": (),
        "fp16": ("float16",),
        "int8": ("int8",),
        "bf16": ("bfloat16",),
        "int8+bf16": ("int8", "bfloat16"),
    }
    assert converted.keys() == {*parts[used]}
    assert error > 1e-5 or not converted
    left = plan.conversion.left if plan.conversion is not None else ()
    assert bool(left) == (used == "int8")  # products of activations


@pytest.mark.skipif("avx512_bf16" not in TvmBackend().target.features, reason="needs AVX512-BF16")
def test_attention_of_any_length() -> None:
    """Lengths known only at run time, of queries and of keys: one kernel with products of bfloat16, as exact as eager in bfloat16."""
    torch.manual_seed(0)
    options = {"placement": "estimate"}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(attention, backend="hybrid", options=options)
    plan = ""
    for queries, keys in ((40, 50), (5, 100), (31, 33), (300, 32), (7, 1203)):
        q, k, v = (torch.randn(1, 3, n, 64).bfloat16() for n in (queries, keys, keys))
        for x in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(x, 2)
        with torch.no_grad():
            plan = plan or str(torch_hybrid_backend.explain(attention, q, k, v, options=options))
            compiled(q, k, v)  # the first call of all is eager's
            got, want, eager = compiled(q, k, v), attention(q.double(), k.double(), v.double()), attention(q, k, v)
        assert (got - want).square().mean() <= 1.2 * (eager - want).square().mean()
    assert "bf16_attention" in plan


@pytest.mark.skipif(
    not {"avx512_vnni", "avx_vnni"} & set(TvmBackend().target.features), reason="this processor has no VNNI"
)
def test_attention_of_int8_of_any_length() -> None:
    """Queries and keys that are dequantized bytes, of lengths known only at run time: one kernel, with exact products of the integers."""
    torch.manual_seed(0)
    options = {"placement": "estimate"}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        operands = (quantization.tensor(quantization.call, x, -3.0, 3.0) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*operands)

    compiled = torch.compile(attention, backend="hybrid", options=options)
    plan = ""
    for queries, keys in ((40, 50), (5, 100), (31, 33), (300, 32), (7, 1203)):
        q, k, v = (torch.randn(1, 3, n, 64) for n in (queries, keys, keys))
        for x in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(x, 2)
        with torch.no_grad():
            plan = plan or str(torch_hybrid_backend.explain(attention, q, k, v, options=options))
            compiled(q, k, v)  # the first call of all is eager's
            got, want = compiled(q, k, v), attention(q, k, v)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    assert "int8_attention" in plan
