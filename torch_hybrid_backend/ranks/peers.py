"""The other processes of a torch.distributed job: which of them are alive, which are compiling, and which are in what call.

Each process posts a sign of life in the job's store every two seconds, from a thread of its own. A store needs no process group of its own,
and no call that all ranks make at once. A rank that never compiles, or is dead, keeps nobody waiting beyond a limit of time.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed

from torch_hybrid_backend.errors import RankError, failures
from torch_hybrid_backend.torch_private import own_store

_log = logging.getLogger(__name__)

_BEAT_S = 2.0
# Without a new sign of life for so long, a process counts as dead: five signs are missing.
SILENCE_S = 10.0
# A request of a store whose process is gone ends at once, or, where its machine is gone, after this time.
_REQUEST_S = 10.0
_WITHOUT_STORE = ("fake", "threaded", "mpi")

# Parts of the texts of errors that backends raise when another rank does not take part in a collective.
_OF_PEERS = ("gloo", "connection closed", "connection reset", "nccl", "timed out")


# The ranks of a process group.
Group = tuple[int, ...]


class Store(Protocol):
    """The part of a store of torch.distributed that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Peers:
    """The processes of a job as one of them sees them. Owns the thread that posts this process's signs of life; it ends with the process group.

    Threads may use it at once. Methods raise RankError where the store does not answer. `waits`: graphs that threads of this process wait
    with, and the ranks that they wait for. `absent`: ranks that did not come to a graph, so that nobody waits for them a second time. Both
    belong to `agreement`.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        rank: int,
        world: int,
        is_open: Callable[[], bool] = torch.distributed.is_initialized,
    ) -> None:
        """open_store: makes a connection to the job's store, for one thread. is_open: True while the process group is there."""
        self.rank = rank
        self.world = world
        self._store = open_store()
        self.waits: dict[str, list[int]] = {}
        self.absent: set[int] = set()
        self._working = 0
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[str, float]] = {}  # rank -> its last sign of life, and when it was first seen
        self._calls = Counter[Group]()  # how many calls of graphs with collectives of a group have begun
        # Calls of plans that run now: their groups, and the call's number in each.
        self._ready_calls: dict[int, list[tuple[Group, int]]] = {}
        self._numbers = itertools.count()
        # rank -> its calls of plans, and the number of the sign of life that first had them.
        self._first_seen: dict[int, tuple[str, int]] = {}
        self._is_open = is_open
        self._process = os.getpid()
        self._end = threading.Event()
        # A store serves one request of a client at a time, so that the thread has a connection of its own.
        self._thread = threading.Thread(target=self._beat, args=(open_store(),), name="hybrid ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Post that this process ends, and end its signs of life. Does nothing in a forked child, which is no rank."""
        if self._end.is_set() or os.getpid() != self._process:
            return
        self.retire()
        self._thread.join(_BEAT_S)
        if self._is_open():  # else the store may be gone already
            self.leave()

    def retire(self) -> None:
        """End the signs of life without a word: the process has another process group, and posts signs of life in that one."""
        self._end.set()
        atexit.unregister(self.close)

    def leave(self) -> None:
        """Post that this process raises an error, or ends: it does not count as dead."""
        with contextlib.suppress(RankError):
            self.post(f"left/{self.rank}", "1")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Have the other ranks wait longer for this one, which compiles meanwhile."""
        with self._lock:
            self._working += 1
        try:
            yield
        finally:
            with self._lock:
                self._working -= 1

    @contextlib.contextmanager
    def calling(self, groups: Collection[Group], *, is_ready: bool) -> Iterator[None]:
        """Count a call of a graph with collectives of these groups. is_ready: a plan runs it, else it is a first call."""
        number = next(self._numbers)
        with self._lock:
            self._calls.update(groups)
            if is_ready:
                self._ready_calls[number] = [(group, self._calls[group]) for group in groups]
        try:
            yield
        finally:
            with self._lock:
                self._ready_calls.pop(number, None)

    def post(self, key: str, value: str) -> None:
        """Put a value in the store."""
        try:
            self._store.set(key, value)
        except failures(RuntimeError) as error:
            raise _no_store(error) from error

    def post_once(self, key: str, value: str) -> str:
        """Put a value in the store unless another rank has put one there; return the value that the store has now."""
        try:
            return str(self._store.compare_set(key, "", value), "utf-8")
        except failures(RuntimeError) as error:
            raise _no_store(error) from error

    def posted(self, key: str) -> str | None:
        """The value in the store; None if nobody has put one there."""
        try:
            return str(self._store.get(key), "utf-8") if self._store.check([key]) else None
        except failures(RuntimeError) as error:
            raise _no_store(error) from error

    def is_silent(self, rank: int) -> bool:
        """True if a rank has given signs of life, and gives none any more."""
        beat, since = self._last(rank)
        return bool(beat) and time.monotonic() - since > SILENCE_S

    def is_at_work(self, rank: int) -> bool:
        """True if a rank was compiling when it gave its last sign of life."""
        return self._last(rank)[0].split()[1:2] == ["working"]

    def runs_ready(self, rank: int) -> bool:
        """True if a rank makes this process's call with a plan that it has: it does not compile what this process does.

        All ranks of a group make the same calls, so that calls of one number are one call. The rank has been in it for two signs of life: where
        ranks do not count alike, it is not taken for one that is about to leave another call.
        """
        beat = self._last(rank)[0].split()
        if not beat:
            return False
        count, _, calls = beat
        with self._lock:
            if self._first_seen.get(rank, ("", 0))[0] != calls:
                self._first_seen[rank] = calls, int(count)
            is_new = self._first_seen[rank][1] == int(count)
            return not is_new and any(self._calls[tuple(group)] == number for group, number in json.loads(calls))

    def named(self, error: BaseException, members: Collection[int]) -> BaseException:
        """The error of a collective as the caller is to get it: a RankError that names the ranks that are dead, or the error itself.

        Takes 10 seconds if a rank is dead, else up to two.
        """
        if not _tells_of_peers(error):
            return error
        try:
            others = sorted(set(members) - {self.rank})
            dead = self._dead(others)
            with contextlib.suppress(RankError):
                for rank in dead:
                    self.post(f"dead/{rank}", "1")
            left = [] if dead else [rank for rank in others if self.posted(f"left/{rank}")]
        except RankError as without_store:
            return without_store
        self.leave()
        if not dead and not left:
            return error
        whose = "whose process has ended, or is stopped or cut off" if dead else "which met an error of its own"
        return RankError(
            f"{_in_words(dead or left)} of the job of {self.world} no longer takes part, {whose}: look at the end of its own output, and start "
            f"the job again from its last checkpoint. The collective failed with {type(error).__name__}: {error}"
        )

    def _dead(self, ranks: Iterable[int]) -> list[int]:
        """The ranks that give no sign of life while this one watches them, and have not said that they leave."""
        before = {rank: self._last(rank)[0] for rank in ranks if self.posted(f"left/{rank}") is None}
        end = time.monotonic() + SILENCE_S
        unknown = {rank for rank, beat in before.items() if beat}
        while unknown and time.monotonic() < end:
            try:
                if told := [rank for rank in unknown if self.posted(f"dead/{rank}")]:
                    return sorted(told)
                unknown = {
                    rank
                    for rank in unknown
                    if self._last(rank)[0] == before[rank] and self.posted(f"left/{rank}") is None
                }
            except RankError:
                if 0 in unknown:
                    raise
                break  # rank 0, which was alive, ended because of the same error, and the store with it
            time.sleep(0.2)
        return sorted(unknown)

    def _last(self, rank: int) -> tuple[str, float]:
        """The last sign of life of a rank, "" if there is none yet, and when it was first seen."""
        beat = self.posted(f"beat/{rank}") or ""
        with self._lock:
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = beat, time.monotonic()
            return self._seen[rank]

    def _beat(self, store: Store) -> None:
        count = 0
        while not self._end.is_set() and self._is_open():
            try:
                with self._lock:
                    calls = [call for each in self._ready_calls.values() for call in each]
                sign = "working" if self._working else "idle"
                store.set(f"beat/{self.rank}", f"{count} {sign} {json.dumps(calls, separators=(',', ':'))}")
            except failures(RuntimeError) as error:  # the store is gone, and with it the job
                _log.debug("no signs of life any more: %s", error)
                return
            count += 1
            self._end.wait(_BEAT_S)


# The process and its process group, and the job as `peers` told it; nothing before.
_current: list[tuple[int, object, Peers | None]] = []
_lock = threading.Lock()


def peers() -> Peers | None:
    """The processes of this one's job; None outside a torch.distributed job of several, or with a backend that has no store."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1 or torch.distributed.get_backend() in _WITHOUT_STORE:
        return None
    process, group = os.getpid(), torch.distributed.group.WORLD
    with _lock:
        if not _current or _current[0][0] != process or _current[0][1] is not group:
            before = _current[0][2] if _current and _current[0][0] == process else None
            if before is not None:
                before.retire()
            _current[:] = [(process, group, _new())]
        return _current[0][2]


def _new() -> Peers | None:
    try:
        return Peers(_open_store, torch.distributed.get_rank(), torch.distributed.get_world_size())
    except failures(RuntimeError) as error:  # the store is gone, and with it the job: its next collective says so
        _log.warning("the ranks of this job cannot agree on how they compute: %s", _no_store(error))
        return None


def _open_store() -> Store:
    store: Store = own_store("torch_hybrid_backend", _REQUEST_S)
    return store


@contextlib.contextmanager
def at_work(*, is_on: bool) -> Iterator[None]:
    """Have the other ranks of this process's job, if it is part of one, wait longer for it."""
    them = peers() if is_on else None
    with contextlib.nullcontext() if them is None else them.at_work():
        yield


def _tells_of_peers(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OF_PEERS)


def _no_store(error: RuntimeError) -> RankError:
    return RankError(
        "the store of the torch.distributed job does not answer. Rank 0 holds it, or the agent that started the ranks; that process has ended, "
        f"or is stopped or cut off: look at the end of its own output, and start the job again from its last checkpoint ({error})"
    )


def _in_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
