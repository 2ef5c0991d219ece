"""The harness itself: what it calls wrong, what it leaves alone, and what it writes down."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.operators.execution import ERROR, NUMBERS, PASSED, SKIPPED, WRONG, Bench, Outcome, Sample, Subject
from tests.operators.expected import EXPECTED, surprises
from tests.operators.report import page
from tests.operators.rows import CRASHED, Journal, Row
from tests.operators.tasks import Task, spread
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.loops.ir import Expr, Value
from torch_hybrid_backend.loops.lowering import Context
from torch_hybrid_backend.loops.ops import add, call, cast, const

exp = torch.ops.aten.exp.default


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "kernels", compilers=1)


def _run(bench: Bench, function: Callable[..., Any], *arguments: Any, backward: bool = False) -> dict[str, Outcome]:
    (outcomes,) = bench.run([Sample(Subject.of_function(function), arguments, backward)])
    return outcomes


def _slightly_wrong(ctx: Context, x: Value) -> Value:
    def at(a: Expr) -> Expr:
        return add(call("exp", a), const(1e-4, a.dtype))

    return ctx.pointwise(at, x)


def _plant(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(lowering, "_TABLE", {**lowering.table(), exp: wrong})
    monkeypatch.setattr(lowering, "table", lambda: lowering._TABLE)


def test_a_planted_fault_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that is off by 1e-4 is wrong on the forced engine, forward and in a gradient."""
    _plant(monkeypatch, _slightly_wrong)
    x = torch.linspace(-1, 1, 12)
    outcome = _run(bench, torch.exp, x)["tvm"]
    assert outcome.status == WRONG
    assert "eager's largest error" in outcome.why
    assert _run(bench, torch.exp, x.requires_grad_(), backward=True)["tvm"].status == WRONG


def test_the_default_backend_is_saved_by_its_gate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default backend falls back where a lowering is far off, gives eager's result, and the refusal is written down."""

    def far_off(ctx: Context, x: Value) -> Value:
        return ctx.pointwise(lambda a: add(call("exp", a), const(1, a.dtype)), x)

    _plant(monkeypatch, far_off)
    outcomes = _run(bench, torch.exp, torch.linspace(-1, 1, 12))
    assert outcomes["tvm"].status == WRONG
    assert outcomes["default"].status == PASSED
    assert [code for _, code, _ in outcomes["default"].refused] == ["accuracy"]


def test_a_lowering_that_raises_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that raises on the forced engine is a failure, not a fallback."""

    def refuses_late(ctx: Context, x: Value) -> Value:
        def at(_a: Expr) -> Expr:
            raise ValueError("planted")

        return ctx.pointwise(at, x)

    _plant(monkeypatch, refuses_late)
    assert _run(bench, torch.exp, torch.ones(3))["tvm"].status == ERROR


def test_what_eager_refuses_is_not_compared(bench: Bench) -> None:
    """Samples that eager raises for, or that give no tensor, are skipped."""
    assert _run(bench, torch.add, torch.ones(2), torch.ones(3))["tvm"].status == SKIPPED
    assert _run(bench, torch.is_floating_point, torch.ones(2))["tvm"].status == SKIPPED


def test_the_forced_engine_takes_what_it_can(bench: Bench) -> None:
    """Views alone are run by the forced engine; the default backend leaves them to eager; a refusal names operator and code."""
    outcomes = _run(bench, lambda x: x.t(), torch.ones(2, 3))
    assert (outcomes["tvm"].taken, outcomes["default"].taken) == (1, 0)
    refused = _run(bench, lambda x: torch.lgamma(x).exp(), torch.ones(2, 3))["tvm"]
    assert refused.taken == 1
    assert [refusal[:2] for refusal in refused.refused] == [("aten.lgamma.default", "unknown_operator")]


_REFUSED = (("aten.lgamma.default", "unknown_operator", "there is no lowering"),)


def _row(*outcomes: Outcome, mode: str = "tvm") -> Row:
    return Row.of(Task("some", "float32"), mode, 9, dict(enumerate(outcomes)))


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ((Outcome(PASSED, taken=2),), "taken"),
        ((Outcome(PASSED, taken=1, refused=_REFUSED),), "partly"),
        ((Outcome(PASSED, taken=2), Outcome(PASSED, refused=_REFUSED)), "partly"),
        ((Outcome(PASSED, refused=_REFUSED), Outcome(PASSED)), "refused"),
        ((Outcome(PASSED), Outcome(SKIPPED)), "none"),
        ((Outcome(SKIPPED),), "skipped"),
        ((Outcome(PASSED, taken=2), Outcome(CRASHED, "died")), "wrong"),
    ],
)
def test_verdict(outcomes: tuple[Outcome, ...], verdict: str) -> None:
    """A word for a task: a single failure makes it wrong."""
    assert _row(*outcomes).verdict == verdict


def test_failures_must_be_expected_and_expected_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is not listed is a surprise, and so is the success of one that is, where all samples ran."""
    bad, good = _row(Outcome(WRONG, "off")), _row(Outcome(PASSED, taken=1))
    assert len(surprises([bad, good], complete=True)) == 1
    monkeypatch.setitem(EXPECTED, ("tvm", "some float32"), "a reason")
    assert not surprises([bad], complete=True)
    assert len(surprises([good], complete=True)) == 1
    assert not surprises([good], complete=False)


def test_journal_keeps_the_last(tmp_path: Path) -> None:
    """Rows come back as they were; a later one of the same task and mode replaces the earlier."""
    first, second = _row(Outcome(WRONG, "off")), _row(Outcome(PASSED, taken=1, refused=_REFUSED))
    other = dataclasses.replace(first, mode="default")
    journal = Journal(tmp_path / "journal.jsonl")
    for row in (first, other, second):
        journal.add(row)
    assert list(Journal(tmp_path / "journal.jsonl").rows.values()) == [second, other]


def test_report_counts() -> None:
    """Samples by outcome, how many there would have been, failures with their reason, refusals by operator."""
    text = page([_row(Outcome(PASSED, taken=1), Outcome(PASSED, refused=_REFUSED), Outcome(WRONG, "off by one"))])
    assert re.search(r"\| float32 \| 1 of \d+ \| 3 \| 9 \| 2 \| 1 \| 0 \| 1 \| 0 \| 0 \| 0 \| 1 \|", text)
    assert "off by one" in text
    assert "`aten.lgamma.default` 1" in text


def test_spread() -> None:
    """Up to so many numbers, over the whole range."""
    assert spread(3, None) == spread(3, 5) == [0, 1, 2]
    assert spread(100, 2) == [25, 75]
    assert spread(0, 2) == []


def _cut_to_32_bits(ctx: Context, x: Value, n: int) -> Value:
    return ctx.pointwise(lambda a, b: cast(cast(add(a, b), "int32"), "int64"), x, n)


def test_numbers_known_only_at_run_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is made with other numbers than the first one's; what is wrong for some of them is found, and which."""
    bench = Bench(tmp_path / "kernels", compilers=1, modes=(NUMBERS,))
    subject = Subject.of_function(lambda x, n: x + n)
    sample = Sample(subject, (torch.arange(4), 3))
    (outcomes,) = bench.run([sample])
    assert (outcomes[NUMBERS].status, outcomes[NUMBERS].taken > 0) == (PASSED, True)
    monkeypatch.setitem(lowering._TABLE, torch.ops.aten.add.Tensor, _cut_to_32_bits)
    (outcomes,) = bench.run([sample])
    assert outcomes[NUMBERS].status == WRONG
    assert "in place of 3" in outcomes[NUMBERS].why
    (outcomes,) = bench.run([Sample(Subject.of_function(torch.neg), (torch.arange(4),))])
    assert outcomes[NUMBERS].status == SKIPPED
