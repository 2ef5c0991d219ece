"""The engine of one region, chosen alike by two ranks: here threads with one store, and in tests/ecosystem/test_ranks.py processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed

from tests.partition.engines_for_tests import FakeEngine, FakeRegion, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.agreed import agreement_on, choose_alike, groups_in, tell_of_eager
from torch_hybrid_backend.driver.session import Session, open_session
from torch_hybrid_backend.errors import CompileError, RankError
from torch_hybrid_backend.partition.placement import Choice, Pricing
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.ranks.agreement import Agreement
from torch_hybrid_backend.ranks.peers import Peers

X = torch.randn(8, 8)
CONFIG = Config(prefer_kernels=True, measure_budget_s=0.001)  # the leading rank takes the engine, whatever it costs


def _region() -> Region:
    (segment,) = partition_graph(trace(lambda x: (x @ x).sin(), X), [FakeEngine()], Config()).graph.segments
    return segment.region


class _Varied(FakeRegion):
    """A region with a variant for each of some names; its outputs are off by what the test says."""

    def __init__(self, region: Region, known: Sequence[str], variant: str, off: float = 0.0) -> None:
        super().__init__(region, lambda outputs: [output + off for output in outputs])
        self._known, self.variants = known, (variant,)

    def with_variants(self, names: Sequence[str], deadline: Deadline) -> CompiledRegion:
        if names[0] not in self._known:
            raise CompileError(f"a kernel has no variant {names[0]!r} here")
        return _Varied(self.region, self._known, names[0])


Candidates = Mapping[str, CompiledRegion | Refused | Exception]


@pytest.fixture
def chosen() -> Iterator[Callable[[Candidates, Candidates], list[tuple[Choice, str]]]]:
    """Has two ranks choose alike, of candidates of their own; each one's choice, and why eager is to run the graph."""
    store = torch.distributed.HashStore()
    ranks = [Peers(lambda: store, rank, 2, lambda: True) for rank in range(2)]

    def choose_on(peers: Peers, region: Region, candidates: Candidates) -> tuple[Choice, str]:
        agreement = Agreement(peers, "graph", [0, 1], 60.0)
        agreement.meet()
        choice = choose_alike(agreement, 0, region, candidates, [X], CONFIG, Pricing(deadline=Deadline(math.inf)))
        agreement.settle()
        return choice, agreement.why_not

    def run(first: Candidates, second: Candidates) -> list[tuple[Choice, str]]:
        regions = [_region(), _region()]  # before there are threads: what traces a graph is global in PyTorch
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(choose_on, ranks, regions, (first, second)))

    yield run
    for each in ranks:
        each.close()


def test_the_variant_is_taken_over(chosen: Callable[..., list[tuple[Choice, str]]]) -> None:
    """The other rank would have had another one. The first call's values are eager's on both."""
    region = _region()
    both = chosen({"fake": _Varied(region, "ab", "b")}, {"fake": _Varied(region, "ab", "a")})
    for choice, why in both:
        assert why == ""
        assert choice.decision.engine == "fake"
        assert choice.compiled is not None
        assert choice.compiled.variants == ("b",)
        assert torch.equal(choice.outputs[0], (X @ X).sin())


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (
            lambda region: _Varied(region, "a", "a"),
            "rank 1 cannot run region .* on fake: a kernel has no variant 'b' here",
        ),
        (lambda region: Refused(Reason.DTYPE, "it takes no float32"), "it takes no float32"),
        (lambda region: CompileError("the compiler died"), "the compiler died"),
    ],
)
def test_a_rank_that_cannot_follow(
    candidate: Callable[[Region], CompiledRegion | Refused | Exception],
    why: str,
    chosen: Callable[..., list[tuple[Choice, str]]],
) -> None:
    """Both hear of it; on the rank that cannot, eager runs the region already."""
    region = _region()
    (_, first), (choice, second) = chosen({"fake": _Varied(region, "ab", "b")}, {"fake": candidate(region)})
    assert first == second
    assert re.search(why, second)
    assert choice.compiled is None
    assert choice.decision.refusals[-1].code is Reason.RANKS_DISAGREE
    assert torch.equal(choice.outputs[0], (X @ X).sin())


def test_results_that_are_wrong_on_one_rank(chosen: Callable[..., list[tuple[Choice, str]]]) -> None:
    """Each rank compares what it runs with eager, on its own inputs."""
    region = _region()
    wrong = _Varied(region, "b", "b", off=1.0)
    (_, first), (choice, second) = chosen({"fake": _Varied(region, "b", "b")}, {"fake": _Keeping(wrong)})
    assert first == second
    assert "rank 1 cannot run region" in second
    assert choice.compiled is None


class _Keeping(FakeRegion):
    """A region that has its only variant."""

    def __init__(self, inner: _Varied) -> None:
        super().__init__(inner.region, inner.change)
        self.variants = inner.variants


def test_eager_on_the_leading_rank_is_eager_on_all(chosen: Callable[..., list[tuple[Choice, str]]]) -> None:
    refused = Refused(Reason.TOO_SMALL, "it is too small")
    for choice, why in chosen({"fake": refused}, {"fake": _Varied(_region(), "b", "b")}):
        assert why == ""
        assert choice.compiled is None


def test_no_agreement_outside_of_a_job() -> None:
    graph = partition_graph(trace(lambda x: x.sin(), X), [FakeEngine()], Config()).graph
    session: Session = open_session(Config(cache=False))
    assert groups_in(trace(lambda x: x.sin(), X)) == []
    assert agreement_on(graph, {}, [0, 1], session, Config()) is None


def test_strict_raises() -> None:
    with pytest.raises(RankError, match=r"cannot compute it alike: rank 1 is late; HYBRID_RANKS_AGREE=0 has each rank"):
        tell_of_eager("rank 1 is late", strict=True)
