"""A model, exported: its file gives the bits of the plan that it was made of, in Python and in the runner."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.artifact.live_plans import live_plans
from tests.runner.runner_in_python import Runner
from torch_hybrid_backend.artifact import model as artifact_model
from torch_hybrid_backend.artifact.model import load
from torch_hybrid_backend.bench.calls import tensors
from torch_hybrid_backend.driver.export import export
from torch_hybrid_backend.errors import HybridError

RUNNER = Path(artifact_model.__file__).parents[1] / "runner" / "libhybrid_runner.so"
_TOLERANCE = 1e-3  # of the largest value: regions have been compared with eager one by one

# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Exported:
    """The outcome of an export. `refused`: the reason why there is no file, or "". `wrong`: how results of the file differ, or "".

    python_parts, needs_torch, sizes: as in `ExportReport`. in_runner: True if the runner gives the same bits.
    """

    name: str
    refused: str = ""
    wrong: str = ""
    python_parts: list[str] = field(default_factory=list)
    needs_torch: bool = False
    sizes: list[str] = field(default_factory=list)
    in_runner: bool = False


def attempt(
    name: str,
    module: nn.Module,
    calls: Sequence[Call],
    *,
    dynamic_shapes: Any = None,
    compares_eager: bool = True,
) -> Exported:
    """Export a module on the first of the calls, and compare all of them: with the live plan, and roughly with eager.

    Raises what the module raises, and any error but a refusal.
    """
    outcome = Exported(name)
    with tempfile.TemporaryDirectory(prefix="exported-") as folder, ExitStack() as stack:
        path = Path(folder) / "model.hybrid"
        expected = [tensors(module(*args, **kwargs)) for args, kwargs in copy.deepcopy(list(calls))]
        live = stack.enter_context(live_plans())
        try:
            args, kwargs = copy.deepcopy(calls[0])
            report = export(
                module, args, path, kwargs=kwargs, dynamic_shapes=dynamic_shapes, options={"placement": "estimate"}
            )
        except HybridError as error:
            outcome.refused = str(error)
            return outcome
        outcome.python_parts, outcome.needs_torch = list(report.python_parts), report.needs_torch
        outcome.sizes = list(report.sizes)
        # `load` compares the sample bit for bit.
        stack.enter_context(mock.patch.object(artifact_model, "is_close", lambda a, b, _: torch.equal(a, b)))
        try:
            loaded = load(path)
        except HybridError as error:
            outcome.wrong = str(error)
            return outcome
        runner = None if report.python_parts or report.needs_torch else Runner(RUNNER).open(path)
        entry = loaded.flat_entry()
        for number, (args, kwargs) in enumerate(calls):
            leaves = torch.utils._pytree.tree_leaves(copy.deepcopy((args, kwargs)))
            found = [each for each in entry.run(leaves) if isinstance(each, torch.Tensor)]
            given = torch.utils._pytree.tree_leaves(copy.deepcopy((args, kwargs)))
            if not _are_equal(found, live.results(given)):
                outcome.wrong = f"call {number}: its results are others than the live plan's"
            elif compares_eager and not _are_close(found, expected[number]):
                outcome.wrong = f"call {number}: its results are far from eager's"
            elif runner is not None:
                arrays = [leaf.numpy() for leaf in given if isinstance(leaf, torch.Tensor)]
                from_runner = [torch.from_numpy(each) for each in runner.run(*arrays, outputs=len(found))]
                if not _are_equal(found, from_runner):
                    outcome.wrong = f"call {number}: results of the runner are others than those in Python"
                outcome.in_runner = True
            if outcome.wrong:
                break
    return outcome


def _are_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )


def _are_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    for a, b in zip(found, expected, strict=True):
        largest = b.abs().nan_to_num(posinf=0.0).max().item() if b.numel() and b.is_floating_point() else 0.0
        if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True):
            return False
    return True
