"""Signs of life of the processes of a job: here threads with one store, and in tests/ecosystem/test_ranks.py processes."""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch.distributed

from torch_hybrid_backend.errors import RankError
from torch_hybrid_backend.ranks import peers as module
from torch_hybrid_backend.ranks.peers import Peers, at_work, peers

_CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Peers]]:
    """Makes the process of a rank, of three, with signs of life that come and are missed fast."""
    monkeypatch.setattr(module, "_BEAT_S", 0.02)
    monkeypatch.setattr(module, "SILENCE_S", 0.4)
    store = torch.distributed.HashStore()
    made: list[Peers] = []

    def process(rank: int) -> Peers:
        made.append(Peers(lambda: store, rank, 3, lambda: True))
        return made[-1]

    yield process
    for each in made:
        each.close()


def _until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def _die(process: Peers) -> None:
    """End a process's signs of life without a word, as SIGKILL would."""
    process._end.set()
    process._thread.join()


def test_the_first_value_holds(job: Callable[[int], Peers]) -> None:
    one, other = job(0), job(1)
    assert one.posted("outcome") is None
    assert one.post_once("outcome", "a") == "a"
    assert other.post_once("outcome", "b") == "a"
    assert other.posted("outcome") == "a"


def test_signs_of_life(job: Callable[[int], Peers]) -> None:
    """A rank that works is told from one that does not, a dead one from both, and one that was never there from a dead one."""
    one, other = job(0), job(1)
    assert _until(lambda: one._last(1)[0] != "")
    assert not one.is_at_work(1)
    with other.at_work():
        assert _until(lambda: one.is_at_work(1))
    assert _until(lambda: not one.is_at_work(1))
    assert not one.is_silent(1)
    _die(other)
    assert _until(lambda: one.is_silent(1))
    assert not one.is_silent(2)


def test_calls_of_other_ranks(job: Callable[[int], Peers]) -> None:
    """A rank in the same call as this process is told from one in an earlier call, in a call of another group, or in a first call."""
    one, other = job(0), job(1)
    group, others = (0, 1), (1, 2)
    with one.calling([group], is_ready=False), other.calling([others, group], is_ready=True):
        assert _until(lambda: one.runs_ready(1))
        assert not other.runs_ready(0)
        with one.calling([group], is_ready=True):
            assert not one.runs_ready(1)
    with one.calling([group, others], is_ready=False), other.calling([others], is_ready=True):
        before = one._last(1)[0]
        assert _until(lambda: one._last(1)[0].split()[2] != before.split()[2])
        time.sleep(0.1)
        assert not one.runs_ready(1)
    assert not one.runs_ready(2)


def test_a_dead_rank_is_named(job: Callable[[int], Peers]) -> None:
    """The error of a collective names the rank that died, and not one that left because of it."""
    one, dead, left = job(0), job(1), job(2)
    assert _until(lambda: one._last(1)[0] != "" and one._last(2)[0] != "")
    _die(dead)
    left.close()
    named = one.named(_CLOSED, [0, 1, 2])
    assert isinstance(named, RankError)
    assert "rank 1 of the job of 3 no longer takes part, whose process has ended" in str(named)
    assert "rank 2" not in str(named)
    assert "closed by peer" in str(named)


def test_a_rank_that_left_is_named_where_none_is_dead(job: Callable[[int], Peers]) -> None:
    one, left = job(0), job(1)
    assert _until(lambda: one._last(1)[0] != "")
    left.close()
    assert "rank 1 of the job of 3 no longer takes part, which met an error of its own" in str(
        one.named(_CLOSED, [0, 1])
    )


def test_other_errors_stay(job: Callable[[int], Peers]) -> None:
    """An error of another kind, and one of a collective whose ranks are all alive."""
    one, other = job(0), job(1)
    assert _until(lambda: one._last(1)[0] != "")
    wrong = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert one.named(wrong, [0, 1]) is wrong
    assert one.named(_CLOSED, [0, 1]) is _CLOSED
    assert not other._end.is_set()


def test_a_store_that_is_gone(job: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(0)

    def gone(*_: object) -> bytes:
        raise torch.distributed.DistNetworkError("Broken pipe")

    store = types.SimpleNamespace(check=gone, get=gone, set=gone, compare_set=gone)
    monkeypatch.setattr(one, "_store", store)
    with pytest.raises(RankError, match="Rank 0 holds it, or the agent that started the ranks"):
        one.posted("outcome")
    assert "the store of the torch.distributed job does not answer" in str(one.named(_CLOSED, [0, 1]))


def test_a_forked_child_does_not_leave_the_job(job: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends runs the parent's exit handlers: they post nothing."""
    one, other = job(0), job(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            posted: list[str] = []
            monkeypatch.setattr(
                one, "post", lambda key, value: posted.append(key)
            )  # the store's lock may have been held
            one.close()
            status = 0 if not posted else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    one.close()
    assert other.posted("left/0") == "1"


def test_another_process_group_ends_the_signs_of_life_in_the_earlier_one(
    job: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word that the process left: both groups may have one store."""
    made = [job(0), job(0)]
    for name, value in {"is_initialized": True, "get_world_size": 3, "get_backend": "gloo"}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(module, "_current", [])
    monkeypatch.setattr(module, "_new", iter(made).__next__)
    for expected in made:
        monkeypatch.setattr(torch.distributed, "group", types.SimpleNamespace(WORLD=object()))
        assert peers() is expected
        assert peers() is expected
    assert made[0]._end.is_set()
    assert not made[1]._end.is_set()
    assert made[1].posted("left/0") is None


def test_there_is_no_job_outside_of_torch_distributed() -> None:
    assert peers() is None
    with at_work(is_on=True):
        pass


def test_the_store_ends_with_rank_0_while_a_dead_rank_is_looked_for(
    job: Callable[[int], Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 met the same error, and ended first: the dead rank is named all the same."""
    monkeypatch.setattr(module, "SILENCE_S", 60.0)
    holder, one, dead = job(0), job(1), job(2)
    assert _until(lambda: one._last(0)[0] != "" and one._last(2)[0] != "")
    _die(dead)
    seen, posted = one._last(0)[0], one.posted

    def ending(key: str) -> str | None:
        if key == "dead/2" and one._seen[0][0] != seen:
            raise RankError("the store is gone")
        return posted(key)

    monkeypatch.setattr(one, "posted", ending)
    assert "rank 2 of the job of 3 no longer takes part" in str(one.named(_CLOSED, [0, 1, 2]))
    assert not holder._end.is_set()
