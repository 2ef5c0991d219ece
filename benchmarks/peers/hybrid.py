"""This package: `torch.compile(model, backend="hybrid")`."""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

from benchmarks.peers import Prepared, Setting
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Plan


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """Compiled as `backend="hybrid"` does it, with the HYBRID_* settings of the environment; reports the plan's coverage."""
    plans: list[Plan] = []
    backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
    compiled = torch.compile(model, backend=backend)
    return Prepared(lambda: compiled(*inputs), lambda: coverage(plans))


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
