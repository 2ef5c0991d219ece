"""This package: `torch.compile(model, backend="hybrid")`, with the options of the precision."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections import Counter
from typing import Any

import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import FLOAT32, Prepared, Setting, pytorch
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Plan


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """The model compiled as by `backend="hybrid"`, with the HYBRID_* settings of the environment.

    int8: `quantize`, with the extremes of the calibration inputs as ranges. Reports the plan's coverage and the converted operators.
    """
    plans: list[Plan] = []
    # Without background builds: the plan is timed, not eager.
    config = Config.from_env(os.environ).with_options({"background": False}, None)
    if setting.is_int8:
        model = torch_hybrid_backend.quantize(
            model, [_item(model, each) for each in setting.calibration], calibration="naive"
        )
    asked = setting.half or setting.precision
    if asked not in (FLOAT32, "int8") and not setting.training:
        options: dict[str, object] = {"precision": asked}
        if setting.precision_tolerance is not None:
            options["precision_tolerance"] = setting.precision_tolerance
        config = config.with_options(options, None)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)

    def report() -> dict[str, object]:
        converted = [dict(plan.conversion.converted) for plan in plans if plan.conversion]
        counts = sum(map(Counter, converted), Counter[str]())
        return coverage(plans) | ({"executed": dict(counts)} if counts else {})

    compile_model = functools.partial(torch.compile, backend=backend)
    if setting.training:
        return dataclasses.replace(pytorch.prepared(model, inputs, setting, compile_model), report=report)
    compiled = compile_model(model)
    return Prepared(lambda: inputs.call(compiled), report)


def _item(model: nn.Module, inputs: Inputs) -> Any:
    """The inputs as an item for `quantize`: a tuple of arguments, or all arguments by name."""
    if not inputs.kwargs:
        return inputs.args
    return inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments


def coverage(plans: list[Plan]) -> dict[str, object]:
    """The number of graphs and operators, and the shares of operators and floating-point operations that run outside eager."""
    nodes = [node for plan in plans for node in plan.nodes]
    compiled = [node for node in nodes if node.engine != EAGER]
    flops = sum(node.flops for node in nodes)
    return {
        "graphs": len(plans),
        "operators": len(nodes),
        "operators_compiled": round(len(compiled) / len(nodes), 4) if nodes else None,
        "flops_compiled": round(sum(node.flops for node in compiled) / flops, 4) if flops else None,
    }
