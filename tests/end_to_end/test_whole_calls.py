"""Whole calls given to eager, or not, in compiled models; who is faster is said by the test, all else is real."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.core.plan import Cost
from torch_hybrid_backend.driver import hybrid_graph
from torch_hybrid_backend.partition import whole_call

Calls = Mapping[str, Callable[[], object]]


class Verdict:
    """Says who is faster in whole calls, after running both; `priced` counts how often it was asked."""

    def __init__(self) -> None:
        self.faster = "eager"
        self.priced = 0

    def __call__(
        self, key: str, contenders: Mapping[str, str], calls: Calls, *_: object, **__: object
    ) -> tuple[Cost, ...]:
        self.priced += 1
        for call in calls.values():
            call()
        return tuple(Cost(name, 1.0 if name == self.faster else 2.0, "measured") for name in contenders)


@pytest.fixture
def verdict(settings: pytest.MonkeyPatch) -> Verdict:
    """Regions are placed as measured, whole calls as the fixture says."""
    settings.setenv("HYBRID_PLACEMENT", "measure")
    settings.setenv("HYBRID_MEASURE_BUDGET_S", "0.01")
    found = Verdict()
    settings.setattr(whole_call, "priced", found)
    return found


class Classifier(nn.Module):
    """The topics of texts. words: (n,) int64, offsets: (texts,) int64. Returns: scores and topics, (texts, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.EmbeddingBag(100, 16)
        self.topics = nn.Linear(16, 10)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, topics = torch.topk(torch.softmax(self.topics(self.words(words, offsets)), -1), 3)
        return scores, topics


WORDS, OFFSETS = torch.arange(32), torch.arange(0, 32, 4)


def test_explain_says_that_eager_runs_the_call(verdict: Verdict) -> None:
    """The plan that lost is shown, with costs and a reason code; every operator is eager's. Losing is no failure under strict."""
    with torch.no_grad():
        text = str(torch_hybrid_backend.explain(Classifier(), WORDS, OFFSETS, options={"strict": True}))
        verdict.faster = "plan"
        other = str(torch_hybrid_backend.explain(Classifier(), WORDS, OFFSETS))
    assert "a whole call: plan 2.0 us, eager 1.0 us (measured): eager runs it" in text
    assert "not the plan: not_profitable: a call takes 2.0 us, in eager 1.0 us" in text
    assert "tvm runs" not in text.splitlines()[0]
    assert "a whole call: plan 1.0 us, eager 2.0 us (measured): the plan runs it" in other
    assert "not_profitable: a call takes" not in other


def test_weights_live_on_in_eager(verdict: Verdict) -> None:
    """Results are eager's after weights were written to, loaded and replaced."""
    model, other = Classifier().eval(), Classifier().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid")
        for change in (
            lambda: None,
            lambda: model.topics.weight.mul_(3.0),
            lambda: model.load_state_dict(other.state_dict()),
            lambda: setattr(model.topics, "bias", nn.Parameter(torch.arange(10.0))),
        ):
            change()
            for _ in range(2):
                torch.testing.assert_close(compiled(WORDS, OFFSETS), model(WORDS, OFFSETS))
    assert verdict.priced


def test_the_plan_is_freed(verdict: Verdict, settings: pytest.MonkeyPatch) -> None:
    """A plan that lost does not stay in memory beside the weights."""
    made: list[weakref.ref[hybrid_graph.HybridGraph]] = []
    original = hybrid_graph.HybridGraph.__init__

    def recording(self: hybrid_graph.HybridGraph, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    settings.setattr(hybrid_graph.HybridGraph, "__init__", recording)
    model = Classifier().eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid")
        compiled(WORDS, OFFSETS)
        gc.collect()
        assert [graph() for graph in made] == [None]
        torch.testing.assert_close(compiled(WORDS, OFFSETS), model(WORDS, OFFSETS))


@pytest.mark.parametrize("faster", ["eager", "plan"])
def test_symbolic_sizes(faster: str, verdict: Verdict) -> None:
    """Calls of every size are right, whoever runs them."""
    verdict.faster = faster
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Softmax(-1)).eval()
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid", dynamic=True)
        for rows in (2, 3, 9, 2, 40, 5, 1):
            x = torch.randn(rows, 6)
            torch.testing.assert_close(compiled(x), model(x))
    assert verdict.priced == {"eager": 4, "plan": 2}[faster]  # one row is a graph of its own


class Counting(nn.Module):
    """Adds how often it was called to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(x) + self.calls


def test_a_graph_that_writes_is_not_priced(verdict: Verdict) -> None:
    """Buffers and arguments are written to once a call."""
    model = Counting()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sin() + 1

    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid")
        torch.testing.assert_close([compiled(torch.ones(4)) for _ in range(3)], [torch.ones(4) + n for n in (1, 2, 3)])
        x = torch.ones(4)
        torch.testing.assert_close(torch.compile(doubled, backend="hybrid")(x), torch.full((4,), 2.0).sin() + 1)
        torch.testing.assert_close(x, torch.full((4,), 2.0))
    assert not verdict.priced


def test_random_numbers_are_drawn_once(verdict: Verdict) -> None:
    """Compiled dropout draws from the generator in the first call what it draws in the others."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    x = torch.randn(4, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="hybrid")
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            compiled(x)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not verdict.priced


@torch.library.custom_op("hybrid_whole_calls::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """A user's operator, which does more than it declares."""
    COUNTS.append(1)
    return x * 2


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


COUNTS: list[int] = []


def test_other_libraries_operators_run_once_a_call(verdict: Verdict) -> None:
    """An operator of another library runs once a call: its other effects are not known, so a call with one is not repeated."""
    compiled = torch.compile(lambda x: counted(x).relu() + 1, backend="hybrid")
    COUNTS.clear()
    for calls in (1, 2):
        compiled(torch.ones(4))
        assert len(COUNTS) == calls
    assert not verdict.priced


@pytest.mark.parametrize("options", [{"placement": "estimate"}, {"verify": "always"}], ids=["estimate", "always"])
def test_not_priced_where_nothing_is_timed_or_all_is_checked(options: dict[str, str], verdict: Verdict) -> None:
    """The plan is used whatever it costs."""
    model = Classifier().eval()
    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(model, WORDS, OFFSETS, options=options)
    assert [plan.call for plan in explanation.plans] == [None]
    assert not verdict.priced


def test_training_steps_are_priced_once(verdict: Verdict) -> None:
    """Gradients equal eager's, whoever runs the steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(3, 4)
    compiled = torch.compile(model, backend="hybrid")
    for _ in range(2):
        model.zero_grad()
        compiled(x).sum().backward()
        gradient = model[0].weight.grad
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close(gradient, model[0].weight.grad)
    assert verdict.priced == 1


def test_threads(verdict: Verdict) -> None:
    """Eight threads whose first calls meet get eager's results, before and after the plan lost."""
    model = Classifier().eval()
    with torch.no_grad():
        expected = model(WORDS, OFFSETS)
        compiled = torch.compile(model, backend="hybrid")
        start = threading.Barrier(8)
        faults: list[BaseException] = []

        def work() -> None:
            try:
                start.wait()
                for _ in range(5):
                    with torch.no_grad():
                        torch.testing.assert_close(compiled(WORDS, OFFSETS), expected)
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults
