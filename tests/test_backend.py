"""The door that `torch.compile` calls: settings, plans and warnings. End to end it is tested by tests/end_to_end/."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.driver import graph_compilation
from torch_hybrid_backend.errors import ConfigError


@pytest.fixture(autouse=True)
def eager_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is compiled: the tests are about what stands around that."""
    monkeypatch.setenv("HYBRID_ENGINES", "eager")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    graph_compilation.warn_once.cache_clear()  # as in a new process


def _graph() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(lambda x: (x.sin() + 1,))


def test_options_and_modes_are_settings() -> None:
    """An unknown option or mode raises ConfigError before anything is traced."""
    x = torch.randn(4)
    with pytest.raises(ConfigError, match="unknown option 'speed'"):
        backend.hybrid(_graph(), [x], options={"speed": "high"})
    with pytest.raises(ConfigError, match="unknown mode 'fastest'"):
        backend.hybrid(_graph(), [x], mode="fastest")
    with pytest.raises(ConfigError, match="it must be a dict of settings"):
        backend.hybrid(_graph(), [x], options=["strict"])  # type: ignore[arg-type]
    (result,) = backend.hybrid(_graph(), [x], mode="max-autotune", options={"verify": "off"})(x)
    torch.testing.assert_close(result, x.sin() + 1)


@pytest.mark.parametrize(
    ("asked", "lacking", "used"),
    [
        ("bf16", {"bf16"}, "as-written"),
        ("bf16", {"fp16"}, "bf16"),
        ("fp16", {"bf16", "fp16"}, "as-written"),
        ("int8+bf16", {"bf16"}, "int8"),
        ("int8", {"bf16", "fp16"}, "int8"),
        ("int8", {"int8"}, "as-written"),
        ("int8+bf16", {"int8"}, "bf16"),
        ("int8+bf16", {"int8", "bf16"}, "as-written"),
        ("as-written", {"bf16", "fp16"}, "as-written"),
    ],
)
def test_a_precision_without_instructions_is_not_used(
    asked: str, lacking: set[str], used: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says what the machine lacks and what is done instead; the integer part of a precision stays."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda half: (f"avx512_{half}",) if half in lacking else ())
    config = backend.with_instructions(Config(precision=asked))
    assert config == Config(precision=used)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (asked != used)
    assert all(f"precision={asked}" in line and used in line and "avx512_" in line for line in warnings)


def test_without_instructions_graphs_are_as_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """End to end: float32's results, bit by bit, and one warning for a compilation."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda half: ("avx512_bf16",))
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", options={"precision": "bf16"})
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x), model(x))
        (plan,) = torch_hybrid_backend.explain(model, x, options={"precision": "as-written"}).plans
    assert plan.conversion is None
    assert len([record for record in caplog.records if "no instructions for bf16" in record.getMessage()]) == 1


def test_training_graphs_are_as_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Forward and backward compute in float32, and one warning says so."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda half: ())
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    result = torch.compile(model, backend="hybrid", options={"precision": "bf16"})(x)
    result.sum().backward()
    assert torch.equal(result, model(x))
    assert torch.equal(model.bias.grad, torch.full((8,), 4.0))  # type: ignore[arg-type]
    assert len([record for record in caplog.records if "is for inference" in record.getMessage()]) == 1


@pytest.mark.parametrize("trains", [False, True])
def test_a_model_of_several_graphs_warns_once(
    trains: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning about lacking instructions, or training graphs as written, is said once in a process; of another precision anew."""
    monkeypatch.setattr(backend, "lacking_instructions", lambda part: () if trains else (f"avx512_{part}",))

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        torch._dynamo.graph_break()
        return y @ w

    w = torch.randn(4, 4, requires_grad=trains)
    for precision in ("bf16", "fp16"):
        torch.compiler.reset()
        torch.compile(model, backend="hybrid", options={"precision": precision})(torch.randn(4, 4), w)
    warnings = [record.getMessage() for record in caplog.records if record.name == graph_compilation.__name__]
    said = "is for inference" if trains else "no instructions for"
    assert len(warnings) == 2
    assert all(
        said in line and f"precision={name}" in line for name, line in zip(("bf16", "fp16"), warnings, strict=True)
    )


def test_explain_has_a_plan_for_every_graph() -> None:
    """Two graphs, for a break between them, in the order in which they run; the model itself stays as it was."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(model, torch.randn(4))
    operators = [[node.operator for node in plan.nodes] for plan in explanation.plans]
    assert operators == [["aten.sin.default"], ["aten.cos.default"]]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = self.outer(x @ x)
        return self.inner(x)


def test_explain_tells_what_a_quantized_model_leaves_in_floating_point(tmp_path: Path) -> None:
    """The number of converted layers is told, and for each of the others its name in the model and its code; from the cache of graphs as
    well."""
    quantized = torch_hybrid_backend.quantize(_Block().eval(), [torch.randn(8, 8)], "naive", exclude=("outer",))
    model = torch.nn.Sequential(quantized, torch.nn.Linear(8, 4))
    options = {"engines": "eager", "placement": "estimate", "cache_dir": tmp_path}
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad():
            explanation = torch_hybrid_backend.explain(model, torch.randn(8, 8), options=options)
        (plan,) = explanation.plans
        assert plan.conversion is not None
        assert plan.conversion.converted == (("int8", 2),)
        told = {layer.site: (layer.code, layer.why) for layer in plan.conversion.left}
        assert told.keys() == {"0.model", "0.model.outer", "1"}
        assert {code for code, _ in told.values()} == {Reason.EXCLUDED}
        assert told["0.model.outer"][1] == "it is excluded from what quantize converts (exclude, exclude_kinds)"
        assert told["1"][1] == "the model has it in floating point"
        assert "operators to int8, using" in str(explanation)
        assert "0.model.outer, aten.addmm.default: excluded: it is excluded" in str(explanation)


def test_the_plan_is_handed_over_once_for_each_compilation() -> None:
    """In the first call, not before."""
    told: list[Plan] = []
    x = torch.randn(4)
    compiled = backend.compile_graph(
        _graph(), [x], Config.from_env({"HYBRID_ENGINES": "eager", "HYBRID_CACHE": "0"}), told.append
    )
    assert not told
    with torch.no_grad():
        compiled(x)
    assert [plan.kind for plan in told] == ["inference"]
