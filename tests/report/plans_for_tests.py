"""Plans for the tests of reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.plan import (
    CallDecision,
    Conversion,
    Cost,
    GraphInput,
    KernelTime,
    ModuleCall,
    NodeDecision,
    Plan,
    Profile,
    Refusal,
    RegionDecision,
    Unconverted,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason

_SPEC = TensorSpec((8, 8), "float32", (8, 1), CPU)
_KERNELS = (f"matmul_gelu_{1:016x}", f"row_softmax_{2:016x}", f"matmul_gelu_{3:016x}", "mkldnn::_linear_pointwise")
_NO_LOWERING = Refusal("tvm", Reason.UNKNOWN_OPERATOR, "aten.sort.default has no lowering")
_LINE, _SORT_LINE = "model.py:12 in forward: y = x @ w", "model.py:13 in forward: y, _ = torch.sort(y)"


def _node(name: str, operator: str, engine: str, region: str, flops: int, source: str = _LINE) -> NodeDecision:
    refusals = () if region else (_NO_LINE if name == "item" else _NO_LOWERING,)
    return NodeDecision(name, operator, engine, region, source, flops, refusals, CPU)


_NO_LINE = Refusal("tvm", Reason.UNKNOWN_OPERATOR, "the sort it belongs to <is> & stays eager's")

PLAN = Plan(
    "graph",
    "inference",
    (
        _node("mm", "aten.mm.default", "tvm", "r0", 3_000_000),
        _node("relu", "aten.relu.default", "tvm", "r0", 0),
        _node("sort", "aten.sort.default", "eager", "", 0, _SORT_LINE),
        _node("sort_1", "aten.sort.default", "eager", "", 0, _SORT_LINE),
        _node("item", "getitem", "eager", "", 0, ""),
        _node("mm_1", "aten.mm.default", "eager", "r2", 1_000_000),
    ),
    (
        RegionDecision(
            "r0", "tvm", "ab" * 32, ("mm", "relu"), (_SPEC, _SPEC), (_SPEC,),
            (Cost("tvm", 12.34, "measured"), Cost("eager", 31.5, "measured")), (), 1.5e-6, 3_000_000, _KERNELS, _LINE, CPU,
            ("mkldnn::_linear_pointwise: linear layer of 8x8 by 8x8",) * 2,
        ),
        RegionDecision(
            "r2", "eager", "cd" * 32, ("mm_1",), (_SPEC, _SPEC), (_SPEC,), (),
            (Refusal("tvm", Reason.DEADLINE, "DeadlineError: it took over 300 s"),), None, 1_000_000, (), "", Device("cuda", 1),
        ),
    ),
)  # fmt: skip
EMPTY = Plan("graph", "backward", (), ())
GRAPHS = dataclasses.replace(EMPTY, cuda_graphs=(_KERNELS[:3], _KERNELS[1:2]))
_TIMES = (Cost("plan", 70.0, "measured"), Cost("eager", 48.5, "measured"))
_LOST = Refusal("plan", Reason.NOT_PROFITABLE, "a call takes 70.0 us, in eager 48.5 us")
_EAGER_NODES = tuple(dataclasses.replace(node, engine="eager") for node in PLAN.nodes)
NOT_USED = dataclasses.replace(PLAN, nodes=_EAGER_NODES, call=CallDecision("eager", _TIMES, (_LOST,)))
_WON = (Cost("plan", 40.0, "cached"), Cost("eager", 48.5, "cached"))
USED = dataclasses.replace(PLAN, call=CallDecision("plan", _WON, ()))
_LEFT = Unconverted("mm_1", "aten.mm.default", Reason.ACCURACY, "its results are off by <0.3> & more", _LINE)
_MADE = Conversion("int8+bf16", 0.1, 123, (("int8", 71), ("bfloat16", 4)), 2, 54, (_LEFT,), 0.0123)
CONVERTED = dataclasses.replace(
    PLAN,
    regions=(
        dataclasses.replace(PLAN.regions[0], precision=("int8", "bfloat16"), precision_error=0.0123),
        dataclasses.replace(PLAN.regions[1], precision=("float32",)),
    ),
    conversion=_MADE,
)
_UNCHECKED = Conversion("bf16", 0.02, 2, (), 0, 0, unchecked="verify=off")
NOT_COMPARED = dataclasses.replace(PLAN, conversion=_UNCHECKED, regions=())


def _operator(
    name: str, operator: str, inputs: tuple[str, ...], module: str, engine: str = "tvm", **facts: Any
) -> NodeDecision:
    region = "r0" if engine == "tvm" else ""
    refusals = () if region else (_NO_LOWERING,)
    facts = {"flops": 0, "outputs": (_SPEC,)} | facts
    return NodeDecision(
        name, operator, engine, region, _LINE, refusals=refusals, device=CPU, inputs=inputs, module=module, **facts
    )


def graph_of_blocks(blocks: int) -> Plan:
    """A plan with `blocks` equal blocks of four operators, one of them a view, in `layers`; then a sort in eager."""
    nodes, modules, last = [], [ModuleCall("layers", "Sequential", "")], "x"
    for i in range(blocks):
        path = f"layers.{i}"
        modules += [ModuleCall(path, "Block", "layers"), ModuleCall(f"{path}.linear", "Linear", path)]
        nodes += [
            _operator(f"t_{i}", "aten.t.default", (f"weight_{i}",), f"{path}.linear", is_view=True),
            _operator(f"mm_{i}", "aten.mm.default", (last, f"t_{i}"), f"{path}.linear", flops=1024),
            _operator(f"relu_{i}", "aten.relu.default", (f"mm_{i}",), path),
            _operator(f"add_{i}", "aten.add.Tensor", (last, f"relu_{i}"), path),
        ]
        last = f"add_{i}"
    region = tuple(node.name for node in nodes)
    nodes += [
        _operator("sort", "aten.sort.default", (last,), "", "eager", outputs=(_SPEC, _SPEC)),
        _operator("getitem", "getitem", ("sort",), "", "eager", is_view=True),
    ]
    costs = (Cost("tvm", 100.0 * blocks, "measured"), Cost("eager", 250.0 * blocks, "measured"))
    return Plan(
        "graph",
        "inference",
        tuple(nodes),
        (dataclasses.replace(PLAN.regions[0], node_names=region, costs=costs, kernels=("matmul_relu_add",) * blocks),),
        inputs=(
            GraphInput("x", _SPEC, is_constant=False, called="hidden_states"),
            *(GraphInput(f"weight_{i}", _SPEC, is_constant=True) for i in range(blocks)),
        ),
        outputs=("getitem",),
        modules=tuple(modules),
    )


def profiled(plan: Plan) -> Plan:
    """The plan with times: one kernel for the product, activation and sum of each block, one segment of eager, and 20 us of overhead."""
    nodes = {node.name: node for node in plan.nodes}
    kernels = [
        KernelTime(
            "r0",
            "matmul_relu_add",
            (f"t_{i}", f"mm_{i}", f"relu_{i}", f"add_{i}"),
            (f"layers.{i}.linear",),
            _LINE,
            50.0,
            1024,
            768,
        )
        for i in range(sum(name.startswith("mm_") for name in nodes))
    ]
    kernels.append(KernelTime("r1", "eager", ("sort", "getitem"), (), _SORT_LINE, 80.0, 0, 768))
    call_us = sum(kernel.microseconds for kernel in kernels) + 20.0
    return dataclasses.replace(plan, profile=Profile(call_us, 10, tuple(kernels), 20.0))
