"""The first call of a graph with collectives, chosen alike by all ranks (`ranks.agreement`). Part of the wiring.

What flows from segment to segment are eager's values: whatever comes of the agreement, the first call's results are the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER, CompiledRegion, PendingRegion
from torch_hybrid_backend.core.plan import Refusal
from torch_hybrid_backend.core.region import PartitionedGraph, Region
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.driver.session import Session
from torch_hybrid_backend.errors import CompileError, RankError, failures
from torch_hybrid_backend.graph.values import groups_of
from torch_hybrid_backend.machine import fingerprint
from torch_hybrid_backend.partition.placement import Choice, Pricing, choose, decide
from torch_hybrid_backend.ranks.agreement import Agreement, Decision
from torch_hybrid_backend.ranks.peers import Group, at_work, peers
from torch_hybrid_backend.torch_private import ranks_of

log = logging.getLogger(__name__)

_WITHOUT = "HYBRID_RANKS_AGREE=0 has each rank choose for itself"
_told = itertools.count()


def groups_in(graph: torch.fx.GraphModule) -> list[Group]:
    """The ranks of each group that collectives of a graph work with; empty without collectives. All ranks, if one does not name its group by
    text."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    everybody = range(torch.distributed.get_world_size())
    return sorted({tuple(everybody if group is None else ranks_of(group)) for group in groups_of(graph)})


def agreement_on(
    graph: PartitionedGraph,
    candidates: Mapping[str, Mapping[str, object]],
    members: Sequence[int],
    session: Session,
    config: Config,
) -> Agreement | None:
    """Agreement of the ranks on a partitioned graph; None where this process is alone, or each rank is to choose for itself.

    Ranks agree that run the same operators on values of the same dtypes and shapes, with the same engines, versions, processors and numbers of
    threads. Numbers among the operators' arguments may differ: a rank's place in a sharded tensor, say.
    """
    them = peers() if config.ranks_agree else None
    if them is None or set(members) <= {them.rank}:
        return None
    devices = sorted({segment.region.device for segment in graph.segments}, key=str)
    alike = [
        [[fingerprint(device), sorted(session.versions(device).items())] for device in devices],
        [
            [
                [[node.name, str(node.target)] for node in segment.region.graph_module.graph.nodes],
                [str(value.spec) for value in segment.region.inputs],
                [str(spec) for spec in segment.region.outputs],
                sorted(candidates[segment.region.name]),
            ]
            for segment in graph.segments
        ],
    ]
    return Agreement(them, json.dumps(alike), members, config.compile_deadline_s)


def choose_alike(
    agreement: Agreement,
    position: int,
    region: Region,
    candidates: Mapping[str, CompiledRegion | PendingRegion | Refused | Exception],
    inputs: Sequence[torch.Tensor],
    config: Config,
    pricing: Pricing,
) -> Choice:
    """Choose the engine of a region as the other ranks do. The choice's outputs are eager's, unless the region draws random numbers."""
    if agreement.why_not:
        choice = _eager(region, candidates, agreement.why_not)
    elif agreement.leads:
        with at_work(is_on=True):
            choice = choose(region, candidates, inputs, config, pricing)
        made = choice.compiled
        named = ("", ()) if made is None else (made.form, made.variants)
        agreement.post(position, Decision(choice.decision.engine, *named))
    else:
        choice = _followed(agreement, position, region, candidates, inputs, config, pricing)
    if region.draws and choice.outputs:
        return choice
    return dataclasses.replace(choice, outputs=region.eager(inputs))


def tell_of_eager(why: str, *, strict: bool) -> None:
    """Log that eager runs a graph on all its ranks, the first time in a process as a WARNING. Raises RankError under `strict`."""
    text = f"eager runs a graph with collectives on all ranks, as they cannot compute it alike: {why}; {_WITHOUT}"
    if strict:
        raise RankError(text)
    log.log(logging.WARNING if next(_told) == 0 else logging.INFO, "%s", text)


def _followed(
    agreement: Agreement,
    position: int,
    region: Region,
    candidates: Mapping[str, CompiledRegion | PendingRegion | Refused | Exception],
    inputs: Sequence[torch.Tensor],
    config: Config,
    pricing: Pricing,
) -> Choice:
    """The choice of the leading rank, checked on this rank's inputs."""
    wanted = agreement.decision(position)
    if wanted is None:
        return _eager(region, candidates, agreement.why_not)
    if wanted.engine == EAGER:
        return _eager(region, candidates, "it lost on the rank that chooses", Reason.NOT_PROFITABLE)
    candidate = candidates[wanted.engine]
    why = "it is not built"
    if isinstance(candidate, CompiledRegion):
        try:
            with at_work(is_on=True):
                candidate = candidate.with_variants(wanted.variants, pricing.deadline)
        except failures(CompileError) as error:
            candidate = error
    if isinstance(candidate, CompiledRegion):
        as_told = dataclasses.replace(
            config, placement="estimate", prefer_kernels=True
        )  # compared with eager, not timed
        choice = choose(region, {wanted.engine: candidate}, inputs, as_told, pricing)
        made = choice.compiled
        if made is not None and (made.form, made.variants) == (wanted.form, wanted.variants):
            return choice
        why = next((refusal.why for refusal in choice.decision.refusals), "its results differ too much from eager's")
    elif isinstance(candidate, Refused):
        why = candidate.why
    elif isinstance(candidate, Exception):
        why = str(candidate)
    agreement.refuse(f"rank {agreement.rank} cannot run region {region.name} on {wanted.engine}: {why}")
    return _eager(region, candidates, agreement.why_not)


def _eager(region: Region, candidates: Mapping[str, object], why: str, code: Reason = Reason.RANKS_DISAGREE) -> Choice:
    """The choice of eager, without a trial."""
    return Choice(decide(region, EAGER, None, (), tuple(Refusal(name, code, why) for name in candidates)))
