"""Agreement of ranks on who computes a graph: values that each rank computes for itself from equal inputs are then equal to the last bit.

In the first call of a graph with collectives

meet       every rank posts that it is there, and the ranks that its collectives name; the lowest of all waits until they are there
lead       that rank chooses an engine and kernels for each region, and posts the choice; the others take it over
settle     all say that they could: the graph runs as chosen. If one could not, or did not come: eager runs it, on every rank

What is waited for has a limit of time (`_Wait`), and the first outcome that is posted holds on all ranks (`Peers.post_once`). So no order of
events keeps a rank waiting for ever (`docs/adr/0116-ranks-agree-through-the-store.md`).
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from torch_hybrid_backend.errors import RankError
from torch_hybrid_backend.ranks.peers import Peers

# How long a rank is waited for that is alive and does not compile: it may load data, or trace the graph.
PATIENCE_S = 60.0
# Two ranks that wait for each other with different graphs are told from one that is about to come by waiting still, this long.
_STABLE_S = 1.0
_POLL_S, _LONGEST_POLL_S = (
    0.005,
    0.1,
)  # the second: while ranks wait for long, the store has their other requests to answer
_LOOK_S = 0.5  # between looks at signs of life
_AGREED = "agreed"
_OTHER_GRAPH = "rank {} compiles another graph, or has other engines, another version or another processor"


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one region. `form`, `variants`: as of `CompiledRegion`, empty for eager."""

    engine: str
    form: str = ""
    variants: tuple[str, ...] = ()


class Agreement:
    """Agreement on one graph, for the time of its first call. `why_not`: why eager is to run the graph; "" while nothing speaks against it.

    It is used by one thread. A RankError of the store ends the agreement, and is not raised: the collectives tell the caller.
    """

    def __init__(self, peers: Peers, graph: str, groups: Collection[int], limit_s: float) -> None:
        """graph: text that is equal on ranks that may agree. groups: the ranks of the graph's collectives. limit_s: longest wait for ranks that
        compile."""
        self.why_not = ""
        self._peers = peers
        self._graph = f"graph/{hashlib.sha256(graph.encode()).hexdigest()}"
        self._members = {*groups, peers.rank}
        self._limit_s = limit_s
        self._scope = ""  # where the ranks that meet post what they agree on
        self._is_settled = False

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._peers.rank

    @property
    def leads(self) -> bool:
        """True if this rank chooses."""
        return not self._is_settled and self._peers.rank == min(self._members)

    def meet(self) -> None:
        """Wait for the other ranks."""
        try:
            self._meet()
        except RankError as error:
            self.why_not = str(error)

    def post(self, position: int, decision: Decision) -> None:
        """Tell the others this rank's choice for a region."""
        if self.why_not:
            return
        try:
            self._peers.post(f"{self._scope}/region/{position}", json.dumps(_plain(decision)))
        except RankError as error:
            self.why_not = str(error)

    def decision(self, position: int) -> Decision | None:
        """The leading rank's choice for a region; None where the ranks do not agree."""
        if self.why_not:
            return None
        key = f"{self._scope}/region/{position}"
        try:
            found = self._wait_for(key, min(self._members))
        except RankError as error:
            self.why_not = str(error)
            return None
        return None if found is None else _decision(found)

    def refuse(self, why: str) -> None:
        """Have eager run the graph on all ranks."""
        if self.why_not:
            return
        self.why_not = why
        if self._is_settled:
            return  # the others run it as agreed earlier; this rank alone cannot
        try:
            if self._scope and self._peers.post_once(f"{self._scope}/outcome", why) == _AGREED:
                self.why_not = ""  # all had it, this rank too, and this one had only to hear of it
            else:
                self._peers.post(f"{self._graph}/apart/{self._peers.rank}", why)
        except RankError as error:
            self.why_not = str(error)

    def settle(self) -> None:
        """Wait until all ranks have the graph as it was chosen, or one has not."""
        if self.why_not or self._is_settled:
            return
        try:
            self._settle()
        except RankError as error:
            self.why_not = str(error)

    def _meet(self) -> None:
        earlier = self._peers.posted(f"{self._graph}/apart/{self._peers.rank}")
        if earlier is not None:  # of an equal graph
            self.why_not = earlier
            return
        peers = self._peers
        peers.post(f"{self._graph}/here/{peers.rank}", json.dumps(sorted(self._members)))
        with _Waiting(peers, self._graph, self._members) as waiting:
            leads = peers.rank == min(self._members)
            why = (self._gathered(waiting) if leads else "") or self._told(waiting)
        if why:
            self.refuse(why)
            return
        ranks = " ".join(map(str, sorted(self._members)))
        self._scope = f"{self._graph}/{hashlib.sha256(ranks.encode()).hexdigest()[:16]}"
        outcome = self._peers.posted(f"{self._scope}/outcome")
        if outcome is not None:  # of an equal graph
            self._is_settled = True
            self.why_not = "" if outcome == _AGREED else outcome

    def _gathered(self, waiting: _Waiting) -> str:
        """Wait until all ranks are here that work together, be it by way of others, and tell them. Returns why that will not be; "" if they
        are, or a lower rank is among them, which tells them."""
        peers, here = self._peers, f"{self._graph}/here"
        known, wait = {peers.rank}, _Wait(peers, self._limit_s)
        while missing := self._members - known:
            for rank in sorted(missing):
                if (apart := peers.posted(f"{self._graph}/apart/{rank}")) is not None:
                    return apart
                if (groups := peers.posted(f"{here}/{rank}")) is not None:
                    known.add(rank)
                    self._members |= set(json.loads(groups))
            if (missing := self._members - known) and (why := self._not_to_come(missing, wait, waiting)):
                return why
        if peers.rank == min(self._members):
            ranks = json.dumps(sorted(self._members))
            for rank in sorted(self._members):
                peers.post(f"{self._graph}/met/{rank}", ranks)
        return ""

    def _told(self, waiting: _Waiting) -> str:
        """Wait until the lowest rank tells which ranks are here. Returns why that will not be; "" if they are."""
        peers, lowest = self._peers, min(self._members)
        wait, is_here = _Wait(peers, self._limit_s), False
        while (met := peers.posted(f"{self._graph}/met/{peers.rank}")) is None:
            if (apart := peers.posted(f"{self._graph}/apart/{lowest}")) is not None:
                return apart
            if not is_here and peers.posted(f"{self._graph}/here/{lowest}") is not None:
                # The lowest rank waits for the others now; its wait ends before this one.
                is_here, wait = True, _Wait(peers, 0, patience_s=self._limit_s + 2 * PATIENCE_S)
            if why := _late({lowest}, wait) if is_here else self._not_to_come({lowest}, wait, waiting):
                return why
        self._members = set(json.loads(met))
        return ""

    def _not_to_come(self, ranks: set[int], wait: _Wait, waiting: _Waiting) -> str:
        """Sleep until the next look, and return ""; or return the reason why one of the ranks is not waited for."""
        peers = self._peers
        if gone := ranks & peers.absent:
            return f"rank {min(gone)} did not come to an earlier graph"
        if (crossed := waiting.crossed(ranks)) is not None:
            other, graph = crossed
            # The other rank may not have seen yet that the two wait for each other.
            peers.post(f"{graph}/apart/{peers.rank}", _OTHER_GRAPH.format(peers.rank))
            return _OTHER_GRAPH.format(other)
        return _late(ranks, wait)

    def _settle(self) -> None:
        peers, done = self._peers, f"{self._scope}/done"
        peers.post(f"{done}/{peers.rank}", "1")
        outcome: str | None = None
        if self.leads:
            if all(self._wait_for(f"{done}/{rank}", rank) is not None for rank in sorted(self._members)):
                outcome = peers.post_once(f"{self._scope}/outcome", _AGREED)
        else:
            outcome = self._wait_for(f"{self._scope}/outcome", min(self._members))
        if outcome is not None and outcome != _AGREED:
            self.why_not = outcome

    def _wait_for(self, key: str, rank: int) -> str | None:
        """Wait for what a rank is to post, and return it; None, with `why_not`, where the ranks no longer agree."""
        peers, wait = self._peers, _Wait(self._peers, self._limit_s)
        while (found := peers.posted(key)) is None:
            outcome = peers.posted(f"{self._scope}/outcome")
            if outcome is not None and outcome != _AGREED:
                self.why_not = outcome
                return None
            if wait.given_up({rank}) is not None:
                self.refuse(f"rank {rank} {wait.why}")
                return None
            wait.pause()
        return found


def _late(ranks: set[int], wait: _Wait) -> str:
    """Sleep until the next look, and return ""; or return the reason why one of the ranks is given up."""
    if (late := wait.given_up(ranks)) is not None:
        return f"rank {late} {wait.why}"
    wait.pause()
    return ""


class _Wait:
    """A wait for ranks. The wait ends when a rank is dead, when a rank is in this very call with a plan that it has, or when no rank has
    compiled for `patience_s` (default `PATIENCE_S`). Compiling extends the wait by `limit_s` at most."""

    def __init__(self, peers: Peers, limit_s: float, patience_s: float | None = None) -> None:
        self.why = ""
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._peers = peers
        self._start = self._idle_since = time.monotonic()
        self._looked = self._start
        self._pause_s = _POLL_S
        self._limit_s = limit_s

    def pause(self) -> None:
        """Sleep between two looks at the store, each time for longer."""
        time.sleep(self._pause_s)
        self._pause_s = min(1.2 * self._pause_s, _LONGEST_POLL_S)

    def given_up(self, ranks: Collection[int]) -> int | None:
        """A rank that need not be waited for any longer, for the reason `why`; None while there is none. Later graphs do not wait for one that
        is dead or late."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return None
        self._looked = now
        for rank in sorted(ranks):
            if self._peers.is_silent(rank):
                self.why = "no longer gives signs of life"
                self._peers.absent.add(rank)
                return rank
            if self._peers.runs_ready(rank):
                self.why = "has this call compiled already, as a graph of other shapes"
                return rank
        if now - self._start < self._limit_s + self._patience_s and any(map(self._peers.is_at_work, ranks)):
            self._idle_since = now
        if now - self._idle_since > self._patience_s:
            self.why = f"did not come within {now - self._start:.0f} s"
            self._peers.absent.add(min(ranks))
            return min(ranks)
        return None


class _Waiting:
    """Tells the others that this rank waits for them with a graph, while it does."""

    def __init__(self, peers: Peers, graph: str, members: Collection[int]) -> None:
        self._peers = peers
        self._graph = graph
        self._members = members
        self._crossed: dict[int, tuple[str, float]] = {}  # rank -> what it waits for, and since when that is known

    def __enter__(self) -> _Waiting:
        self._tell(is_here=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell(is_here=False)

    def crossed(self, ranks: Collection[int]) -> tuple[int, str] | None:
        """A rank that waits for this one with another graph, and that graph; None if there is none."""
        own = dict(self._peers.waits)
        for rank in sorted(ranks):
            text = self._peers.posted(f"waits/{rank}") or "{}"
            waits: dict[str, list[int]] = json.loads(text)
            others = [graph for graph, members in waits.items() if self._peers.rank in members and graph not in own]
            if not others or self._crossed.get(rank, ("", 0.0))[0] != text:
                self._crossed[rank] = text, time.monotonic()
            elif time.monotonic() - self._crossed[rank][1] > _STABLE_S:
                return rank, others[0]
        return None

    def _tell(self, *, is_here: bool) -> None:
        with _lock:
            waits = self._peers.waits
            if is_here:
                waits[self._graph] = sorted(self._members)
            else:
                waits.pop(self._graph, None)
            self._peers.post(f"waits/{self._peers.rank}", json.dumps(waits))


# Of `Peers.waits`, as it is changed and told.
_lock = threading.Lock()


def _plain(decision: Decision) -> list[object]:
    return [decision.engine, decision.form, decision.variants]


def _decision(text: str) -> Decision:
    engine, form, variants = json.loads(text)
    return Decision(engine, form, tuple(variants))
