"""A case of the catalogue, or a model of the zoo, exported (`tests.artifact.export_trial`): messages for processes of their own."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.catalogue import MODELS
from tests.artifact.export_trial import Call, Exported, attempt
from tests.ecosystem.case import Case

ZOO = "zoo/"  # models of the zoo are named so
# Models of the zoo without a file -> a piece of the text with which an export is refused.
ZOO_NOT_EXPORTED = {"zoo/faster_rcnn": "data-dependent expression"}
_SEEDS = (1, 2)  # of the call that chooses engines, and of another one
_BATCHES = (2, 5, 1, 8, 2)


@dataclass(frozen=True, slots=True)
class ExportTrial:
    """The message that has a worker (`torch_hybrid_backend.bench.worker`) export a case."""

    name: str
    threads: int

    def answer(self, _state: object) -> dict[str, Any]:
        """The outcome as a dictionary. Raises what the model raises."""
        from tests.ecosystem.catalogue import find

        torch.set_num_threads(self.threads)
        case = find(self.name)
        with torch.no_grad():
            module, calls = _called(case, case.build())
            return asdict(attempt(case.name, module, calls, compares_eager=not case.ill_conditioned))


@dataclass(frozen=True, slots=True)
class ZooTrial:
    """The message that has a worker export a model of the zoo, of small size: for batches of 1 to 8, or where that is refused for one."""

    name: str
    threads: int

    def answer(self, _state: object) -> dict[str, Any]:
        """The outcome as a dictionary. Raises what the model raises."""
        torch.set_num_threads(self.threads)
        with torch.no_grad():
            outcome = zoo_attempt(self.name)
            return asdict(zoo_attempt(self.name, is_static=True) if outcome.refused else outcome)


def zoo_attempt(name: str, *, is_static: bool = False) -> Exported:
    """Export a model of the zoo for batches of 1 to 8, or for one. Raises what the model raises."""
    entry = MODELS[name.removeprefix(ZOO)]
    model = entry.build("small")
    if is_static:
        return attempt(name, model, [(entry.inputs("small", 1, seed), {}) for seed in _SEEDS])
    calls: list[Call] = [(entry.inputs("small", batch, seed), {}) for seed, batch in enumerate(_BATCHES)]
    shapes = tuple({0: torch.export.Dim("batch", min=1, max=8)} for _ in calls[0][0])
    return attempt(name, model, calls, dynamic_shapes=shapes)


def _called(case: Case, model: nn.Module) -> tuple[nn.Module, list[Call]]:
    """The module that the case compiles, and how it is called: the first call of each seed. Sizes are those of the first seed's."""
    part = getattr(model, case.part) if case.part else model
    module = part if isinstance(part, nn.Module) else model
    calls: list[Call] = []
    whole = case.function(model, lambda same: same)
    for seed in _SEEDS:
        seen: list[Call] = []

        def remember(_: nn.Module, args: Any, kwargs: Any, seen: list[Call] = seen) -> None:
            if not seen:
                seen.append(copy.deepcopy((args, kwargs)))

        hook = module.register_forward_pre_hook(remember, with_kwargs=True)
        whole(case.inputs(seed))
        hook.remove()
        if not calls or _sizes(seen[0]) == _sizes(calls[0]):
            calls += seen
    return module, calls


def _sizes(call: Call) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in torch.utils._pytree.tree_leaves(call) if isinstance(each, torch.Tensor)]
