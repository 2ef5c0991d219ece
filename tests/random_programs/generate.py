"""Random programs: a profile says of what, a `Draw` which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.random_programs.draw import Draw
from tests.random_programs.program import Program
from tests.random_programs.scope import Scope, Step, TakenBackError
from tests.random_programs.vocabulary import (
    complex_numbers,
    layers,
    mutation,
    networks,
    parts,
    pictures,
    pointwise,
    quantized,
    reductions,
    scaled,
    sequences,
    shapes,
)

# One operator, which the template proposes, or an idiom: several that belong together, written by the template itself.
Template = Callable[[Scope], "Step | None"]
GROUPS: dict[str, tuple[tuple[Template, int], ...]] = {
    "pointwise": pointwise.TEMPLATES,
    "reductions": reductions.TEMPLATES,
    "shapes": shapes.TEMPLATES,
    "layers": layers.TEMPLATES,
    "mutation": mutation.TEMPLATES,
    "pictures": pictures.TEMPLATES,
    "sequences": sequences.TEMPLATES,
    "networks": networks.TEMPLATES,
    "quantized": quantized.TEMPLATES,
    "scaled": scaled.TEMPLATES,
    "complex": complex_numbers.TEMPLATES,
    "chains": ((parts.views_of_views, 1),),
}
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33)


@dataclass(frozen=True)
class Profile:
    """The make-up of a program: weights of the groups of templates, dtypes, sizes of dimensions."""

    weights: dict[str, int]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    sizes: tuple[int, ...] = SIZES


_F32 = (torch.float32,)
PROFILES: dict[str, Profile] = {
    "mixed": Profile({"pointwise": 6, "reductions": 3, "shapes": 4, "layers": 2}),
    "pointwise": Profile({"pointwise": 8, "shapes": 2}),
    "reductions": Profile({"pointwise": 4, "reductions": 6, "shapes": 2}),
    "views": Profile({"pointwise": 3, "shapes": 8, "mutation": 2}),
    "layers": Profile({"pointwise": 4, "layers": 5, "shapes": 1, "reductions": 1}),
    "mutation": Profile({"pointwise": 4, "shapes": 4, "mutation": 5, "reductions": 1}),
    "halves": Profile(
        {"pointwise": 6, "reductions": 2, "shapes": 3, "layers": 1}, (torch.float16, torch.bfloat16, torch.float32)
    ),
    "doubles": Profile({"pointwise": 6, "reductions": 3, "shapes": 3, "layers": 2}, (torch.float64, torch.float32)),
    "pictures": Profile({"pictures": 6, "shapes": 1, "chains": 1, "pointwise": 1, "mutation": 1}),
    "sequences": Profile({"sequences": 6, "shapes": 1, "chains": 1, "pointwise": 1, "reductions": 1}),
    "networks": Profile({"networks": 6, "chains": 1, "pointwise": 1, "reductions": 1}),
    "quantized": Profile(
        {"quantized": 4, "scaled": 8, "shapes": 1, "pointwise": 1}, sizes=(1, 2, 3, 5, 8, 16, 17, 32, 33, 64)
    ),
    "libraries": Profile(
        {"pictures": 3, "sequences": 3, "networks": 3, "chains": 2, "mutation": 2, "pointwise": 2, "layers": 1},
        (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64),
        sizes=(1, 1, 2, 3, 4, 6, 8, 16),
    ),
    "small": Profile(
        {"pointwise": 6, "reductions": 4, "shapes": 5, "layers": 1, "mutation": 1},
        sizes=(0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3),
    ),
    "complex": Profile({"complex": 5, "pointwise": 3, "shapes": 2, "mutation": 1}),
}


def generate(draw: Draw, length: int, profile: Profile) -> Program:
    """A program of `length` lines: a few less where lines were taken back too often, or an idiom more."""
    scope = Scope(draw, profile.dtypes, profile.sizes)
    for _ in range(draw.integer(1, 3)):
        rank = draw.choose([1, 2, 2, 3, 3, 4])
        scope.fresh(
            [min(draw.choose(profile.sizes), 9 if rank > 2 else 64) for _ in range(rank)], draw.choose(profile.dtypes)
        )
    groups = [name for name, weight in profile.weights.items() for _ in range(weight)]
    for _ in range(3 * length):
        if len(scope.lines) >= length:
            break
        templates = GROUPS[draw.choose(groups)]
        template = draw.choose([template for template, weight in templates for _ in range(weight)])
        try:
            step = template(scope)
        except TakenBackError:
            continue
        if step is not None:
            scope.apply(step)
    return _finished(scope, draw)


def _finished(scope: Scope, draw: Draw) -> Program:
    """Return the values that nothing reads, and some of the rest."""
    read = {name for line in scope.lines for name in line.reads}
    made = [name for line in scope.lines for name in line.targets]
    outputs = [name for name in made if name not in read]
    outputs += draw.some([name for name in made if name in read], 8)
    if not outputs:
        outputs = [item.name for item in scope.inputs[:1]]
    return scope.program(outputs).with_live_inputs()


@st.composite
def programs(draw: st.DrawFn, length: int, profiles: tuple[str, ...] = tuple(PROFILES)) -> Program:
    """The hypothesis strategy: programs of up to `length` lines."""
    source = Draw.hypothesis(draw)
    return generate(source, source.integer(1, length), PROFILES[source.choose(profiles)])


def seeded(seed: int, length: int, profile: str) -> Program:
    """The program that belongs to a seed."""
    return generate(Draw.seeded(seed), length, PROFILES[profile])
