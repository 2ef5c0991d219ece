"""Loss curves, and when two of them are the same training.

Training amplifies rounding: a ReLU that opens on one run and stays shut on another sends two correct float32 runs apart by a
thousand times one step's error, some runs early, some late. So no fixed tolerance is right, and none step by step. The reference
is the same training in float64. Eager's float32 runs, one from the given weights and `PERTURBED` more from weights
with a random last bit, show how far rounding alone takes this very training from it; ours may go `FACTOR` times as far.

Why 8: distances of correct runs are of one size, but scatter. On these recipes, ours was at most 2.9 times as far as the
furthest of eager's (three seeds). The trained model is compared too, more loosely: directions that the loss does not see (a
weight before a batch norm that only shifts its mean) gather rounding unopposed, and eager sums its batch norm in double, which we
do not (measured: 13 times as far there). A mistake is further off: one matrix's gradient wrong by one part in a hundred is told
apart (`test_curves.py`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.training import OPTIMISERS, Batch, Forward, TrainingCase

STEPS = 50
FACTOR = 8.0
PERTURBED = 4
# What one rounding of the loss itself is worth: eager may hit the reference exactly by chance.
_ROUNDINGS = 16

Compile = Callable[[nn.Module], Forward]
MakeOptimiser = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe of training: everything that is the same for eager and for us.

    batches: drawn once, taken in turn. accumulate: backward passes for each step of the optimiser. step: how the
    optimiser's step is called. autocast: the dtype that the forward pass casts to, or None.
    """

    case: TrainingCase
    batches: tuple[Batch, ...]
    optimiser: MakeOptimiser
    steps: int = STEPS
    accumulate: int = 1
    autocast: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of one training, and the trained model's state."""

    losses: tuple[float, ...]
    state: dict[str, torch.Tensor]


def recipe(case: TrainingCase, optimiser: str = "sgd", *, steps: int = STEPS, accumulate: int = 1) -> Recipe:
    """The usual recipe of a case in its small size: two batches in turn."""
    torch.manual_seed(1)
    return Recipe(case, (case.batch("small"), case.batch("small")), OPTIMISERS[optimiser], steps, accumulate)


def train(
    how: Recipe,
    model: nn.Module,
    forward: Forward,
    step: Callable[[torch.optim.Optimizer], Callable[[], object]] = lambda optimiser: optimiser.step,
) -> Run:
    """Train `model` through `forward`: `model` itself, or `model` compiled. The model is changed in place."""
    optimiser = how.optimiser(model)
    take_step = step(optimiser)
    batches = _in_turn(how.batches)
    losses: list[float] = []
    for _ in range(how.steps):
        optimiser.zero_grad()
        total = 0.0
        for _ in range(how.accumulate):
            with torch.autocast("cpu", how.autocast or torch.bfloat16, enabled=how.autocast is not None):
                loss = how.case.loss(forward, next(batches)) / how.accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        take_step()
        losses.append(total)
    return Run(tuple(losses), {name: value.detach().clone() for name, value in model.state_dict().items()})


def in_float64(how: Recipe, model: nn.Module) -> Run:
    """The same training by eager in float64, without autocast. `model` is left as it is."""
    exact = copy.deepcopy(model).double()
    wide = tuple((x.double() if x.is_floating_point() else x, y) for x, y in how.batches)
    return train(Recipe(how.case, wide, how.optimiser, how.steps, how.accumulate), exact, exact)


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance of a run from the reference: the largest distance of their losses, and that of the trained models (parameters
    and statistics as one vector)."""

    loss: float
    state: float

    def furthest(self, other: Distance) -> Distance:
        return Distance(max(self.loss, other.loss), max(self.state, other.state))

    def within(self, eager: Distance, floor: Distance) -> bool:
        """True if it is at most the factors above times eager's; a floor is what no run can be nearer than."""
        return self.loss <= max(FACTOR * eager.loss, floor.loss) and self.state <= max(
            FACTOR * eager.state, floor.state
        )


def distance(run: Run, reference: Run) -> Distance:
    """The distance of `run` from `reference`."""
    loss = max(abs(mine - exact) for mine, exact in zip(run.losses, reference.losses, strict=True))
    squares = (
        (run.state[name].double() - exact).square().sum().item()
        for name, exact in reference.state.items()
        if exact.is_floating_point()
    )
    return Distance(loss, math.sqrt(sum(squares)))


def eager_distance(how: Recipe, model: nn.Module, reference: Run) -> Distance:
    """The largest distance between eager's float32 training of `model` and the reference, by rounding. `model` is left as it is."""
    generator = torch.Generator().manual_seed(0)
    worst = Distance(0.0, 0.0)
    for number in range(1 + PERTURBED):
        plain = copy.deepcopy(model)
        if number:
            with torch.no_grad():
                for parameter in plain.parameters():
                    sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                    parameter.mul_(1 + torch.finfo(torch.float32).eps * sign)
        worst = worst.furthest(distance(train(how, plain, plain), reference))
    return worst


def is_same_training(run: Run, reference: Run, eager: Distance) -> bool:
    """True if `run` is as near to the reference as rounding lets it be, given how far eager's runs are."""
    epsilon = _ROUNDINGS * torch.finfo(torch.float32).eps
    norm = math.sqrt(sum(v.double().square().sum().item() for v in reference.state.values() if v.is_floating_point()))
    floor = Distance(epsilon * max(map(abs, reference.losses)), epsilon * norm)
    return distance(run, reference).within(eager, floor)


def check(ours: Run, reference: Run, eager: Distance) -> None:
    """Fail where ours is not the same training as the reference (`is_same_training`), or does not train."""
    assert is_same_training(ours, reference, eager), f"{distance(ours, reference)} from float64, eager {eager}"
    quarter = max(1, len(ours.losses) // 4)
    assert _mean(ours.losses[-quarter:]) < 0.97 * _mean(ours.losses[:quarter]), "the loss does not fall"


def compare(how: Recipe, model: nn.Module, compile_model: Compile) -> Run:
    """Train copies of `model`, by eager in float64 and float32 and through `compile_model`, and check ours."""
    reference = in_float64(how, model)
    trained = copy.deepcopy(model)
    ours = train(how, trained, compile_model(trained))
    check(ours, reference, eager_distance(how, model, reference))
    return ours


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _in_turn(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
