"""Random programs give eager's results, as near to float64's as eager's are.

The same programs in every run: hypothesis is derandomised, seeds are fixed. More of them: `python -m tests.random_programs.run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.engines.cpu.operands.test_dot_product_operands import TARGETS
from tests.random_programs.check import check
from tests.random_programs.generate import PROFILES, programs, seeded
from tests.random_programs.program import Program
from tests.random_programs.run import main
from torch_hybrid_backend.core.precision import SEVEN_BITS
from torch_hybrid_backend.engines.cpu.dot_products import DotProduct, integer_dot_product
from torch_hybrid_backend.engines.cpu.operands import dot_product_operands
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.loops.ir import Expr
from torch_hybrid_backend.loops.lowerings import quantized
from torch_hybrid_backend.loops.ops import call, cast


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that several programs need are compiled once."""
    return tmp_path_factory.mktemp("kernels")


def _deterministic(examples: int) -> settings:
    # Not shrunk by hypothesis: `minimise` is better at programs.
    return settings(
        derandomize=True,
        max_examples=examples,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@given(program=programs(14))
@_deterministic(3)
def test_engine(kernel_cache: Path, program: Program) -> None:
    """Short programs on the TVM engine, forced and unverified."""
    report = check(program, "tvm", kernel_cache)
    assert not report.why, program


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "complex"])
def test_engine_runs_most_of_it(profile: str, kernel_cache: Path) -> None:
    """A longer program of each kind: right, and the engine takes half of its operators or more, so that this tests what it is meant to."""
    program = seeded(4, 14, profile)
    report = check(program, "tvm", kernel_cache)
    assert not report.why, program
    assert 2 * report.taken >= report.operators > 0


@pytest.mark.parametrize("mode", ["static", "dynamic", "training"])
@pytest.mark.parametrize("seed", [0, 1])
def test_quantized_layers(seed: int, mode: str, kernel_cache: Path) -> None:
    """Integers bit by bit, and what their scales make of them."""
    program = seeded(seed, 8, "quantized")
    report = check(program, "tvm", kernel_cache, mode)
    assert not report.why, program
    assert 2 * report.taken >= report.operators > 0


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_complex_numbers(seed: int, kernel_cache: Path) -> None:
    """Between kernels on real numbers, with conjugated and negated views of them, and their gradients."""
    program = seeded(seed, 6, "complex")
    report = check(program, "tvm", kernel_cache, "training")
    assert not report.why, program
    assert report.taken > 0


def _down(function: str, *operands: Expr) -> Expr:
    return call("floor" if function == "round_even" else function, *operands)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("call", _down),
        ("_centred", lambda a, zero_point: a),
        ("_clamped", lambda ctx, a, low, high: cast(a, ctx.out.dtype)),
    ],
    ids=["rounded down", "no zero point", "not clamped"],
)
def test_mistakes_in_quantized_layers_are_found(
    name: str, mistake: Callable[..., Expr], kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same programs where what lowers the operators has one."""
    monkeypatch.setattr(quantized, name, mistake)
    found = [check(seeded(seed, 8, "quantized"), "tvm", kernel_cache).why for seed in (0, 1, 3)]
    assert any("off by" in why or "differs from eager's" in why for why in found), found


@pytest.mark.skipif(TARGETS["without vnni"].lanes < 8, reason="sums of two products of bytes need AVX2")
def test_sums_that_saturate_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI, products of bytes are added up in 16 bits where weights have 7: that is right, and with weights of 8 it is found."""
    monkeypatch.setattr(Target, "host", lambda: TARGETS["without vnni"])
    program = seeded(103, 5, "quantized")
    assert not check(program, "tvm", tmp_path / "right").why

    def for_seven_bits(*operands: Any, **known: Any) -> DotProduct | None:
        return integer_dot_product(*operands, **{**known, "bounds": SEVEN_BITS})

    monkeypatch.setattr(dot_product_operands, "integer_dot_product", for_seven_bits)
    assert "off by" in check(program, "tvm", tmp_path / "wrong").why


@pytest.mark.parametrize("mode", ["dynamic", "training"])
def test_whole_graphs(mode: str, kernel_cache: Path) -> None:
    """Idioms of libraries, 25 operators and more: with symbolic sizes at several of them, and trained, with their gradients."""
    program = seeded(7, 25, "libraries")
    report = check(program, "tvm", kernel_cache, mode)
    assert not report.why, program
    assert report.operators >= 25
    assert 2 * report.taken >= report.operators


@given(program=programs(14))
@_deterministic(2)
def test_default(kernel_cache: Path, program: Program) -> None:
    """The backend as users have it."""
    report = check(program, "", kernel_cache)
    assert not report.why, program


@pytest.mark.full
@pytest.mark.parametrize("engine", ["tvm", ""])
def test_many(engine: str, tmp_path: Path) -> None:
    """Half an hour of programs of up to 160 lines, their sizes fixed, symbolic, and trained in turn."""
    assert main(["--engine", engine, "--budget-s", "1800", "--out", str(tmp_path)]) == 0, (
        tmp_path / "report.txt"
    ).read_text()
