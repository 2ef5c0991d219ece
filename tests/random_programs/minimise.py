"""A failing program made small: fewer outputs, fewer lines, and values in place of what computed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.random_programs.program import Input, Line, Program, namespace, run_lines

Fails = Callable[[Program], bool]


def minimise(program: Program, fails: Fails, attempts: int = 80) -> Program:
    """The smallest program found that still fails; `fails` runs a candidate (it may raise for one that makes no sense)."""
    left = attempts

    def still_fails(candidate: Program) -> bool:
        nonlocal left
        left -= 1
        try:
            return left >= 0 and fails(candidate)
        except Exception:  # a candidate that lost what it needs is no failure of the backend
            return False

    for output in program.outputs:
        candidate = live(replace(program, outputs=(output,)))
        if still_fails(candidate):
            program = candidate
            break
    shrinking = True
    while shrinking and left > 0:
        shrinking = False
        for candidate in _candidates(program):
            if still_fails(candidate):
                program, shrinking = candidate, True
                break
    return program


def live(program: Program) -> Program:
    """Without lines that no output needs; statements stay where something they write to is needed."""
    needed = set(program.outputs)
    kept: list[Line] = []
    for line in reversed(program.lines):
        if not line.targets or needed.intersection(line.targets):
            needed.update(line.reads)
            kept.append(line)
    return replace(program, lines=tuple(reversed(kept))).with_live_inputs()


def _candidates(program: Program) -> list[Program]:
    found = []
    lines = program.lines
    # Cut in the middle first: what a line computes becomes an input.
    for position in sorted(range(len(lines)), key=lambda k: abs(k - len(lines) // 2)):
        if lines[position].targets:
            cut = _with_values(program, position)
            if cut is not None:
                found.append(cut)
        else:
            found.append(live(replace(program, lines=lines[:position] + lines[position + 1 :])))
    for output in program.outputs:
        rest = tuple(name for name in program.outputs if name != output)
        if rest:
            found.append(live(replace(program, outputs=rest)))
    found += [
        replace(
            program,
            inputs=tuple(replace(item, layout="contiguous") if item is other else item for item in program.inputs),
        )
        for other in program.inputs
        if other.layout != "contiguous"
    ]
    # Values that follow from a seed: the fault is not one of these very values.
    found += [
        replace(
            program,
            inputs=tuple(replace(item, values=None, scale=0.5) if item is other else item for item in program.inputs),
        )
        for other in program.inputs
        if other.values is not None
    ]
    # An earlier value instead of the output: a fault before it.
    found += [live(replace(program, outputs=(name,))) for line in lines[:-1] for name in line.targets]
    return found


def _with_values(program: Program, position: int) -> Program | None:
    """The line's results as inputs with the values they have in eager."""
    scope = namespace(False)
    scope.update({item.name: item.tensor() for item in program.inputs})
    run_lines(program.lines[: position + 1], scope, wide=False)
    line = program.lines[position]
    results = [scope[name] for name in line.targets]
    if not all(isinstance(result, torch.Tensor) for result in results):
        return None
    new = tuple(
        Input(name, tuple(result.shape), result.dtype, values=result.clone())
        for name, result in zip(line.targets, results, strict=True)
    )
    cut = replace(
        program, inputs=(*program.inputs, *new), lines=program.lines[:position] + program.lines[position + 1 :]
    )
    cut = live(cut)
    return cut if len(cut.lines) < len(program.lines) else None
