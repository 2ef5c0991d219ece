"""Choice of who runs a whole call: the plan, or eager with the whole graph.

Regions are priced one by one. Some costs show in whole calls only: AOTAutograd's wrapper, the plan's inputs and outputs, and operators that
AOTAutograd decomposed but eager runs as one. So after the first call the plan and eager are timed on its inputs, or their times are looked up.
If eager is faster, the plan is released.

    PricedCall: first call -> a plan -> plan 101 us, eager 62 us -> this call and every call after it: Dynamo's graph in eager

Eager runs the Python text of Dynamo's graph, which may differ from the graph's nodes. Eager may win only if both return the same.

Calls that cannot be repeated unnoticed must not be priced: those that write to inputs, draw random numbers or have other effects
(`graph.values.is_repeatable`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import CallDecision, Plan, Profile, Refusal
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.errors import failures, is_sticky
from torch_hybrid_backend.measuring.measure import Rounds
from torch_hybrid_backend.partition.accuracy import difference
from torch_hybrid_backend.partition.placement import Pricing, cheapest, priced
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.torch_private import tree_leaves

_log = logging.getLogger(__name__)

PLAN = "plan"
_WARM = Rounds(warmup_rounds=0, min_rounds=2)  # of calls that have run before
# Enough for 200 rounds of short calls, which overhead decides (0.5 ms in all). A few rounds decide longer calls.
_BUDGET_S = 0.1
# Eager wins by its smaller overhead. So it wins smaller calls too, and is assumed to win calls less than this many times as large.
_LARGER = 2


class PricedCall:
    """Dynamo's graph as Dynamo calls it: the plan or eager runs each call, whichever is faster. Threads may call it at once.

    eager: Dynamo's graph. nodes: the same graph run node by node, with which `eager` is compared; None: no comparison. planned: the compiled
    graph; its first call hands the plan to `take_plan`. key: under which decisions are kept. sizes: positions of the inputs that are sizes
    known only at run time. budget_s: the most seconds that timing may take. on_plan: called with the plan and its decision. working: entered
    while the plan is made and priced.

    Without such sizes the loser is released. With them both stay. Eager runs calls up to the largest size that it has won, and until the plan
    wins a size also calls less than twice as large. Larger calls are priced until the plan wins one; from then on the plan runs all
    calls that are larger than those eager won.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        nodes: Callable[..., Any] | None,
        key: str,
        sizes: Sequence[int],
        budget_s: float,
        pricing: Callable[[], Pricing],
        on_plan: Callable[[Plan], None] | None = None,
        working: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._eager = eager
        self._nodes = nodes
        self._key = key
        self._sizes = tuple(sizes)
        self._budget_s = budget_s
        self._pricing = pricing
        self._on_plan = on_plan
        self._working = working
        self._lock = ForkLock()
        self._plan: Plan | None = None
        self._profile: Profile | None = None  # of eager's calls
        self._decision: CallDecision | None = None
        self._planned: Callable[..., Any] | None = None
        self._settled: Callable[..., Any] | None = None  # runs calls of every size
        self._is_open = True
        self._eager_up_to = 0

    def around(self, planned: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for Dynamo to install."""
        self._planned = planned
        # Not an object: Dynamo's wrapper copies its attributes (functools.wraps), and would keep the plan.
        return self._call

    def take_plan(self, plan: Plan) -> None:
        """Take the plan when it was made, or made anew after a region failed in a later call."""
        self._plan = plan
        if self._decision is not None or not self._is_open:
            self._tell()

    @contextlib.contextmanager
    def eager_timed_by(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Replace eager by `make(eager)` within the context."""
        eager, settled = self._eager, self._settled
        self._eager = make(eager)
        if settled is eager:
            self._settled = self._eager
        try:
            yield
        finally:
            self._eager, self._settled = eager, settled

    def take_profile(self, profile: Profile | None) -> None:
        """Take the times of eager's calls; they are reported with the plan when it is reported next."""
        self._profile = profile

    def waits(self, *inputs: Any) -> bool:
        """True if a call on these inputs would compile or time anything before it returns."""
        if self._settled is not None or not self._is_open or self._planned is None:
            return False
        size = self._size(inputs)
        return size > self._eager_up_to and self._is_far(size)

    def _size(self, inputs: Sequence[Any]) -> int:
        return max(1, math.prod(int(inputs[position]) for position in self._sizes))

    def _call(self, *inputs: Any) -> Any:
        settled = self._settled
        return self._by_size(inputs) if settled is None else settled(*inputs)

    def _by_size(self, inputs: Sequence[Any]) -> Any:
        size = self._size(inputs)
        planned = self._planned
        if planned is None or size <= self._eager_up_to or not self._is_far(size):
            return self._eager(*inputs)
        if not self._is_open:
            return planned(*inputs)
        with self._working():
            planned(*inputs)  # its first call makes the plan
            with self._lock:
                if self._is_open and self._is_far(size):  # no other thread has priced meanwhile
                    self._price(planned, inputs, size)
        return self._call(*inputs)  # by the one that was chosen, as later calls are

    def _is_far(self, size: int) -> bool:
        """True if the sizes that eager has won do not decide this size."""
        return not self._is_open or size >= _LARGER * self._eager_up_to

    def _price(self, planned: Callable[..., Any], inputs: Sequence[Any], size: int) -> None:
        """Decide, by calls on these inputs, who runs calls of this size, and update the choice for other sizes."""
        assert self._plan is not None  # of `planned`'s first call
        calls = {PLAN: lambda: planned(*inputs), EAGER: lambda: self._eager(*inputs)}
        key = f"{self._key} {[inputs[position] for position in self._sizes]}"
        try:
            with Progress("timing whole calls"):
                self._decision = price_call(key, [self._plan], calls, self._budget_s, self._pricing())
                # Eager is compared only if it has won: the plan wins most calls, and two more calls would be a large part of a warm start.
                if self._decision.engine == EAGER and (why := self._fault(inputs)):
                    _log.info("calls run as planned: %s", why)
                    self._decision = CallDecision(PLAN, (), (Refusal(EAGER, Reason.ACCURACY, why),))
            engine = self._decision.engine
        except failures(Exception) as error:  # no memory for both, say: the plan, which has worked, goes on
            if is_sticky(error):
                raise
            _log.info("whole calls are not priced: %s: %s", type(error).__name__, error)
            engine = PLAN
        if engine == EAGER:
            self._eager_up_to = size
        self._is_open = engine == EAGER and bool(self._sizes)
        if not self._sizes or (engine == PLAN and not self._eager_up_to):
            self._settled = self._eager if engine == EAGER else planned
            self._planned = None
        self._tell()

    def _fault(self, inputs: Sequence[Any]) -> str:
        """The reason why eager may not run calls: its outputs differ from those of the graph's nodes. "" if they are equal."""
        if self._nodes is None:
            return ""
        expected = self._nodes(*inputs)
        why = difference(tree_leaves(expected), tree_leaves(self._eager(*inputs)))
        return f"the text of Dynamo's graph does not compute what its nodes do: {why}" if why else ""

    def _tell(self) -> None:
        plan, decision = self._plan, self._decision
        if plan is not None and self._on_plan is not None:
            plan = plan if decision is None else with_call(plan, decision)
            self._on_plan(plan if self._profile is None else dataclasses.replace(plan, profile=self._profile))


def price_call(
    key: str,
    plans: Sequence[Plan],
    calls: Mapping[str, Callable[[], object]],
    budget_s: float,
    pricing: Pricing,
    rounds: Rounds = _WARM,
) -> CallDecision:
    """Price the calls PLAN, by `plans`, and EAGER. If both cost the same, PLAN wins. An exception of a call passes through."""
    versions = [_version(plan, pricing.versions) for plan in plans]
    contenders = {PLAN: " ".join(versions) if all(versions) else "", EAGER: torch.__version__}
    costs = priced(key, contenders, calls, min(budget_s, _BUDGET_S), pricing, rounds)
    planned, eager = (cost.microseconds for cost in costs)
    if cheapest(costs).engine == PLAN:
        return CallDecision(PLAN, costs, ())
    why = f"a call takes {time_in_words(planned)}, in eager {time_in_words(eager)}"
    _log.info("calls run in eager, not as planned: %s", why)
    return CallDecision(EAGER, costs, (Refusal(PLAN, Reason.NOT_PROFITABLE, why),))


def with_call(plan: Plan, decision: CallDecision) -> Plan:
    """The plan of a graph with the decision who runs its calls."""
    nodes = plan.nodes
    if decision.engine == EAGER:
        nodes = tuple(dataclasses.replace(node, engine=EAGER) for node in nodes)
    return dataclasses.replace(plan, nodes=nodes, call=decision)


def _version(plan: Plan, versions: Mapping[str, str]) -> str:
    """Key of all that the plan's time depends on besides the graph; "" if an engine has no version."""
    parts = [
        (region.name, region.key, region.engine, versions.get(region.engine, ""), region.kernels, region.operators)
        for region in plan.regions
    ]
    if any(region.engine != EAGER and not versions.get(region.engine) for region in plan.regions):
        return ""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
