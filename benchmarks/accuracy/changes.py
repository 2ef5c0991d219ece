"""Changes of a model: a precision of the backend's, calibrated quantization, compression. Each gives a callable in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

import torch_hybrid_backend
from benchmarks.accuracy.task import Call, Prepared
from torch_hybrid_backend.core.precision import PRECISIONS
from torch_hybrid_backend.quantization.calibration import LEGAL

Change = Callable[[Prepared], Call]


def _compiled(model: torch.nn.Module, **options: object) -> Call:
    torch._dynamo.reset()
    compiled: Call = torch.compile(model, backend="hybrid", dynamic=False, options=options)
    return compiled


def _with_precision(precision: str) -> Change:
    return lambda task: _compiled(task.model, precision=precision)


def _quantized(**how: Any) -> Change:
    return lambda task: _compiled(torch_hybrid_backend.quantize(task.model, task.calibration, **how))


def _compressed(**how: Any) -> Change:
    return lambda task: _compiled(torch_hybrid_backend.compress(task.model, **how))


CHANGES: dict[str, Change] = {
    **{precision: _with_precision(precision) for precision in PRECISIONS},
    **{f"quantize-{how}": _quantized(calibration=how) for how in LEGAL},
    **{f"quantize-{how}-smooth": _quantized(calibration=how, smooth=0.5) for how in LEGAL},
    "clusters-16": _compressed(clusters=16),
    "clusters-256": _compressed(clusters=256),
    "sparsity-0.3": _compressed(sparsity=0.3),
    "sparsity-0.5": _compressed(sparsity=0.5),
    "sparsity-0.5-clusters-16": _compressed(sparsity=0.5, clusters=16),
}
DEFAULT = ("bf16", "int8", "int8-weights", "int4-weights", "quantize-none", "quantize-naive", "quantize-entropy")
