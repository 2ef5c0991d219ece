"""Agreement on a graph: here ranks are threads with one store, and in tests/ecosystem/test_ranks.py processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed

from torch_hybrid_backend.ranks import agreement as module
from torch_hybrid_backend.ranks import peers as peers_module
from torch_hybrid_backend.ranks.agreement import Agreement, Decision
from torch_hybrid_backend.ranks.peers import Peers

Program = Callable[[Peers], object]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[object]]]:
    """Runs a program for each rank, at once, and returns the results; ranks stay the same from call to call."""
    monkeypatch.setattr(peers_module, "_BEAT_S", 0.02)
    monkeypatch.setattr(peers_module, "SILENCE_S", 2.0)
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    monkeypatch.setattr(module, "_STABLE_S", 0.2)
    store = torch.distributed.HashStore()
    made: dict[int, Peers] = {}

    def process(rank: int) -> Peers:
        return made.setdefault(rank, Peers(lambda: store, rank, 4, lambda: True))

    def all_of(*programs: Program | None) -> list[object]:
        ranks = [process(rank) for rank, program in enumerate(programs) if program is not None]
        with ThreadPoolExecutor(len(ranks)) as pool:
            running = [pool.submit(program, each) for each, program in zip(ranks, filter(None, programs), strict=True)]
            return [each.result(timeout=60) for each in running]

    yield all_of
    for each in made.values():
        each.close()


def _met(peers: Peers, graph: str = "graph", groups: Sequence[int] = (0, 1), limit_s: float = 20.0) -> Agreement:
    agreement = Agreement(peers, graph, groups, limit_s)
    agreement.meet()
    return agreement


_CHOSEN = Decision("tvm", "", ("", "winograd"))


def _agree(peers: Peers, graph: str = "graph") -> object:
    """Three regions on the first rank's choice; what was taken over, and why not."""
    agreement = _met(peers, graph)
    taken = []
    for position in range(3):
        if agreement.leads:
            agreement.post(position, _CHOSEN)
        else:
            taken.append(agreement.decision(position))
    agreement.settle()
    return taken, agreement.why_not


def test_the_lowest_rank_chooses(run: Callable[..., list[object]]) -> None:
    assert run(_agree, _agree) == [([], ""), ([_CHOSEN] * 3, "")]


def test_an_equal_graph_takes_over_what_was_agreed(run: Callable[..., list[object]]) -> None:
    """A rank that compiles a graph again, alone, waits for nobody; nor does the one that chose."""
    run(_agree, _agree)
    assert run(None, _agree) == [([_CHOSEN] * 3, "")]
    assert run(_agree) == [([_CHOSEN] * 3, "")]


def test_a_rank_that_cannot_follow(run: Callable[..., list[object]]) -> None:
    """Eager runs the graph on all ranks then, and when it is compiled again."""

    def unable(peers: Peers) -> str:
        agreement = _met(peers)
        agreement.decision(0)
        agreement.refuse("rank 1 has no memory")
        assert agreement.decision(1) is None
        agreement.settle()
        return agreement.why_not

    assert run(_agree, unable) == [([], "rank 1 has no memory"), "rank 1 has no memory"]
    ((_, why),) = run(_agree)  # type: ignore[misc]
    assert why == "rank 1 has no memory"


def test_a_rank_that_fails_while_it_chooses(run: Callable[..., list[object]]) -> None:
    def failing(peers: Peers) -> None:
        _met(peers).refuse("rank 0 raised an error")

    assert run(failing, _agree)[1] == ([None] * 3, "rank 0 raised an error")


def test_a_rank_that_does_not_come(run: Callable[..., list[object]]) -> None:
    """Others wait for it once, for a limited time; its later arrival finds what was decided."""
    ((_, why),) = run(_agree)  # type: ignore[misc]
    assert "rank 1 did not come within" in why
    assert run(lambda peers: _met(peers, "another").why_not) == ["rank 1 did not come to an earlier graph"]
    assert "rank 1 did not come within" in run(None, _agree)[0][1]  # type: ignore[index]


def test_ranks_with_different_graphs(run: Callable[..., list[object]]) -> None:
    """Both see that they wait for each other, long before their patience ends, and also when they come with these graphs again."""
    module.PATIENCE_S = 600.0
    for _ in range(2):
        first, second = run(lambda peers: _met(peers, "a").why_not, lambda peers: _met(peers, "b").why_not)
        assert "compiles another graph" in str(first)
        assert "compiles another graph" in str(second)


def test_a_rank_that_comes_by_way_of_another_graph(run: Callable[..., list[object]]) -> None:
    """Rank 1 meets rank 2 with a graph of theirs first: nobody takes it for one that compiles something else than rank 0."""

    def first(peers: Peers) -> str:
        return _met(peers, "ours", [0, 1]).why_not

    def second(peers: Peers) -> str:
        return _met(peers, "theirs", [1, 2]).why_not + _met(peers, "ours", [0, 1]).why_not

    def third(peers: Peers) -> str:
        time.sleep(0.5)
        return _met(peers, "theirs", [1, 2]).why_not

    assert run(first, second, third) == ["", "", ""]


def test_a_rank_that_compiles_is_waited_for(run: Callable[..., list[object]]) -> None:
    """A cold cache beside a warm one: patience counts from when the other one no longer compiles."""

    def cold(peers: Peers) -> object:
        with peers.at_work():
            time.sleep(2.5)
            return _agree(peers)

    assert run(_agree, cold) == [([], ""), ([_CHOSEN] * 3, "")]


def test_one_that_compiles_for_ever_is_not(run: Callable[..., list[object]]) -> None:
    ended = threading.Event()

    def endless(peers: Peers) -> None:
        with peers.at_work():
            ended.wait(60)

    def waiting(peers: Peers) -> str:
        why = _met(peers, limit_s=0.5).why_not
        ended.set()
        return why

    assert "rank 1 did not come within" in str(run(waiting, endless)[0])


def test_a_dead_rank_is_not_waited_for(run: Callable[..., list[object]]) -> None:
    """Regions whose choice it posted before are taken over, and no more."""
    module.PATIENCE_S = 600.0

    def dying(peers: Peers) -> None:
        _met(peers).post(0, _CHOSEN)
        peers._end.set()

    assert run(dying, _agree)[1] == ([_CHOSEN, None, None], "rank 0 no longer gives signs of life")


def test_ranks_that_work_together_by_way_of_others(run: Callable[..., list[object]]) -> None:
    """A mesh of 2 x 2: each rank has collectives with two others, and all four agree."""

    def of(groups: Sequence[int]) -> Program:
        def agree(peers: Peers) -> object:
            agreement = _met(peers, groups=groups)
            if agreement.leads:
                agreement.post(0, _CHOSEN)
            taken = None if agreement.leads else agreement.decision(0)
            agreement.settle()
            return taken, agreement.why_not

        return agree

    taken = run(of([0, 1, 2]), of([0, 1, 3]), of([0, 2, 3]), of([1, 2, 3]))
    assert taken == [(None, ""), *[(_CHOSEN, "")] * 3]


def test_equal_graphs_of_other_groups_are_apart(run: Callable[..., list[object]]) -> None:
    """Two halves of a job run one graph: each half agrees for itself."""

    def of(groups: Sequence[int], engine: str) -> Program:
        def agree(peers: Peers) -> object:
            agreement = _met(peers, groups=groups)
            if agreement.leads:
                agreement.post(0, Decision(engine))
            taken = None if agreement.leads else agreement.decision(0)
            agreement.settle()
            return None if taken is None else taken.engine

        return agree

    programs = [of([0, 1], "tvm"), of([0, 1], ""), of([2, 3], "triton"), of([2, 3], "")]
    assert run(*programs) == [None, "tvm", None, "triton"]


def test_a_rank_that_compiles_alone(run: Callable[..., list[object]]) -> None:
    """The others are in this very call with plans that they have: it sees so, long before its patience ends, and waits for them again later."""
    module.PATIENCE_S = 600.0
    compiled = threading.Event()

    def alone(peers: Peers) -> str:
        with peers.calling([(0, 1)], is_ready=False):
            why = _met(peers, f"other shapes of rank {peers.rank}").why_not
        compiled.set()
        return why

    def ready(peers: Peers) -> None:
        with peers.calling([(0, 1)], is_ready=True):
            assert compiled.wait(30)

    for first, second in ((alone, ready), (ready, alone)):
        compiled.clear()
        why = next(filter(None, run(first, second)))
        assert "has this call compiled already, as a graph of other shapes" in str(why)
    assert run(_agree, _agree) == [([], ""), ([_CHOSEN] * 3, "")]


def test_a_rank_that_is_slow_in_an_earlier_call(run: Callable[..., list[object]]) -> None:
    """A slow rank is waited for, however many signs of life it gives meanwhile."""

    def fast(peers: Peers) -> object:
        with peers.calling([(0, 1)], is_ready=True):
            pass
        with peers.calling([(0, 1)], is_ready=False):
            return _agree(peers)

    def slow(peers: Peers) -> object:
        with peers.calling([(0, 1)], is_ready=True):
            time.sleep(0.7)
        with peers.calling([(0, 1)], is_ready=False):
            return _agree(peers)

    assert run(fast, slow) == [([], ""), ([_CHOSEN] * 3, "")]


def test_ranks_that_meet_read_few_keys() -> None:
    """The leading rank reads what all have posted, the others what it found: some keys a rank, not as many as there are ranks."""
    world = 16
    store, read = torch.distributed.HashStore(), set[tuple[int, str]]()

    class Counting(Peers):
        def posted(self, key: str) -> str | None:
            found = super().posted(key)
            if found is not None and key.startswith("graph/"):
                read.add((self.rank, key))
            return found

    ranks = [Counting(lambda: store, rank, world, lambda: True) for rank in range(world)]
    try:
        with ThreadPoolExecutor(world) as pool:
            assert [each.why_not for each in pool.map(lambda peers: _met(peers, groups=range(world)), ranks)] == [
                ""
            ] * world
    finally:
        for each in ranks:
            each.close()
    assert len(read) <= 3 * world
