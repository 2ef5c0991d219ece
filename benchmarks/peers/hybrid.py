"""This package: `torch.compile(model, backend="hybrid")`, below float32 with its options."""

from __future__ import annotations

import functools
import os
from collections import Counter

import torch
from torch import nn

import torch_hybrid_backend
from benchmarks.peers import FLOAT32, Prepared, Setting
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Plan


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """Compiled as `backend="hybrid"` does it, with the HYBRID_* settings of the environment; reports the plan's coverage, and what it
    converted.

    int8: `quantize` with the extremes of the calibration inputs. Random weights are off by more than trained ones: no layer returns to float32.
    """
    plans: list[Plan] = []
    config = Config.from_env(os.environ)
    if setting.is_int8:
        model = torch_hybrid_backend.quantize(model, list(setting.calibration), calibration="naive")
    asked = setting.half or setting.precision
    if asked not in (FLOAT32, "int8"):
        config = config.with_options({"precision": asked, "precision_tolerance": 1.0}, None)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    compiled = torch.compile(model, backend=backend)

    def report() -> dict[str, object]:
        converted = [dict(plan.conversion.converted) for plan in plans if plan.conversion]
        counts = sum(map(Counter, converted), Counter[str]())
        return coverage(plans) | ({"executed": dict(counts)} if counts else {})

    return Prepared(lambda: compiled(*inputs), report)


def coverage(plans: list[Plan]) -> dict[str, object]:
    """Graphs, and the shares of their operators and of their floating-point operations that run outside eager."""
    nodes = [node for plan in plans for node in plan.nodes]
    compiled = [node for node in nodes if node.engine != EAGER]
    flops = sum(node.flops for node in nodes)
    return {
        "graphs": len(plans),
        "operators": len(nodes),
        "operators_compiled": round(len(compiled) / len(nodes), 4) if nodes else None,
        "flops_compiled": round(sum(node.flops for node in compiled) / flops, 4) if flops else None,
    }
