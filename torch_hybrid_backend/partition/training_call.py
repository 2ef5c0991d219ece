"""Choice of who runs a training graph: the plans of its forward and backward graphs, or eager with both.

Regions are priced one by one, and a step has costs that no region shows: what is saved for the backward graph, layouts at the boundaries,
AOTAutograd's wrapper. Autograd ties the two graphs together, so both are eager's or none is.

    PricedTraining: first step -> two plans -> second forward call: plans 9.1 ms, eager 8.2 ms -> every later call: Dynamo's graph in eager

The timed steps run on copies, beside the user's: gradients go to the copies, random numbers are drawn again by the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import CallDecision, Plan
from torch_hybrid_backend.errors import failures, is_sticky
from torch_hybrid_backend.measuring.measure import Rounds
from torch_hybrid_backend.partition.placement import Pricing
from torch_hybrid_backend.partition.whole_call import PLAN, price_call, with_call
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.torch_private import tree_leaves

_log = logging.getLogger(__name__)

OnPlan = Callable[[Plan], None]


class PricedTraining:
    """Dynamo's graph as Dynamo calls it in training: plans or eager run forward and backward, whichever is faster. Threads may call it at once.

    eager: Dynamo's graph. copied: makes copies of a call's inputs, which may be written to. key, budget_s, pricing, working: as for
    `PricedCall`.
    The graph's first step makes the plans, which `taking` hands on. Eager and they are timed in the first forward call after it, and the loser
    runs no more.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        copied: Callable[[Sequence[Any]], Sequence[Any]],
        key: str,
        budget_s: float,
        pricing: Callable[[], Pricing],
        working: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._eager = eager
        self._copied = copied
        self._key = key
        self._budget_s = budget_s
        self._pricing = pricing
        self._working = working
        self._lock = ForkLock()
        self._plans: dict[str, tuple[Plan, OnPlan]] = {}
        self._decision: CallDecision | None = None
        self._planned: Callable[..., Any] | None = None
        self._settled: Callable[..., Any] | None = None

    def around(self, planned: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for Dynamo to install."""
        self._planned = planned
        return self._call  # as in `PricedCall`: not an object

    def taking(self, on_plan: OnPlan) -> OnPlan:
        """Function that takes a graph's plan when it is made, and hands it on with the decision."""

        def take(plan: Plan) -> None:
            self._plans[plan.kind] = plan, on_plan
            on_plan(plan if self._decision is None else with_call(plan, self._decision))

        return take

    def _call(self, *inputs: Any) -> Any:
        planned, settled = self._planned, self._settled  # in this order: another thread may settle between the two
        if settled is not None:
            return settled(*inputs)
        if planned is not None and len(self._plans) == 2:  # a step has been taken
            with self._lock:
                if self._settled is None:  # no other thread has priced meanwhile
                    with self._working():
                        self._settle(planned, inputs)
            return self._call(*inputs)
        assert planned is not None
        return planned(*inputs)

    def _settle(self, planned: Callable[..., Any], inputs: Sequence[Any]) -> None:
        try:
            with Progress("timing training steps"):
                self._decision = self._price(planned, inputs)
        except failures(Exception) as error:  # no memory for copies, say: the plans, which have worked, go on
            if is_sticky(error):
                raise
            _log.info("training steps are not priced: %s: %s", type(error).__name__, error)
        is_eager = self._decision is not None and self._decision.engine == EAGER
        self._settled = self._eager if is_eager else planned
        self._planned = None
        if self._decision is not None:
            for plan, on_plan in self._plans.values():
                on_plan(with_call(plan, self._decision))

    def _price(self, planned: Callable[..., Any], inputs: Sequence[Any]) -> CallDecision:
        copies = [
            copy.detach().requires_grad_(own.requires_grad) if isinstance(own, torch.Tensor) else own
            for copy, own in zip(self._copied(inputs), inputs, strict=True)
        ]
        plans = [plan for plan, _ in self._plans.values()]
        calls = {PLAN: lambda: step(planned, copies), EAGER: lambda: step(self._eager, copies)}
        # Hooks of checkpoints and of offloading must not see the tensors that these steps save.
        hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), hooks:
            return price_call(self._key, plans, calls, self._budget_s, self._pricing(), Rounds(min_rounds=2))


def step(call: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Run a call forward and backward. Gradients of ones reach the inputs that require gradients, and are dropped."""
    outputs = [value for value in tree_leaves(call(*inputs)) if isinstance(value, torch.Tensor) and value.requires_grad]
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(value) for value in outputs], allow_unused=True)


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value
