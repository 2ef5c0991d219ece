"""Small programs as plain data, drawn by hypothesis, and every way of changing one thing in them.

A program is inputs and operations over 2-D values; each result that nothing uses is an output, so that all of it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.partition.regions import partition_graph

UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "relu": torch.ops.aten.relu.default,
    "exp": torch.ops.aten.exp.default,
    "neg": torch.ops.aten.neg.default,
    "abs": torch.ops.aten.abs.default,
}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.ops.aten.add.Tensor,
    "sub": torch.ops.aten.sub.Tensor,
    "mul": torch.ops.aten.mul.Tensor,
    "maximum": torch.ops.aten.maximum.default,
}
SCALAR: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.ops.aten.add.Tensor,
    "mul": torch.ops.aten.mul.Tensor,
    "clamp": torch.ops.aten.clamp_min.default,
}
OVER_DIM: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, d: torch.ops.aten.sum.dim_IntList(x, [d], True).expand_as(x),
    "amax": lambda x, d: torch.ops.aten.amax.default(x, [d], True).expand_as(x),
    "softmax": lambda x, d: torch.ops.aten._softmax.default(x, d, False),
}
FAMILIES: dict[str, dict[str, Callable[..., torch.Tensor]]] = {
    "unary": UNARY,
    "binary": BINARY,
    "scalar": SCALAR,
    "over_dim": OVER_DIM,
}
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Operation:
    """`operands` are numbers of values: inputs first, then results; `number` is the scalar or the dimension."""

    family: str
    name: str
    operands: tuple[int, ...]
    number: float | int = 0


@dataclass(frozen=True)
class Program:
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: tuple[bool, ...]  # input by input: whether its memory is laid out by columns
    constant: tuple[bool, ...]  # input by input: whether it is a parameter
    operations: tuple[Operation, ...]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for operation in self.operations:
            function = FAMILIES[operation.family][operation.name]
            numbers = (operation.number,) if operation.family in ("scalar", "over_dim") else ()
            values.append(function(*(values[i] for i in operation.operands), *numbers))
        used = {i for operation in self.operations for i in operation.operands}
        return tuple(value for i, value in enumerate(values) if i not in used and i >= len(inputs))

    def region(self) -> Region:
        """The program as the one region that an engine which takes everything gets."""
        inputs = [
            torch.zeros(self.shape[::-1], dtype=self.dtype).t() if t else torch.zeros(self.shape, dtype=self.dtype)
            for t in self.transposed
        ]
        module = trace(self, *inputs)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, constant in zip(placeholders, self.constant, strict=True):
            node.meta["constant"] = constant
        (segment,) = partition_graph(module, [FakeEngine()], Config()).graph.segments
        return segment.region


@st.composite
def programs(draw: Any) -> Program:
    count = draw(st.integers(1, 3))
    operations: list[Operation] = []
    # The first operations use every input: what nobody reads is no part of a region.
    for position in range(draw(st.integers(count, 6))):
        newest = count + position - 1
        any_value = st.integers(0, newest)
        first = position if position < count else draw(any_value)
        family = draw(st.sampled_from(sorted(FAMILIES)))
        operands = (first, draw(any_value)) if family == "binary" else (first,)
        number: float | int = 0
        if family == "scalar":
            number = draw(st.sampled_from([0.5, 1.0, -2.0, 3.0, 1e-3]))
        elif family == "over_dim":
            number = draw(st.integers(0, 1))
        operations.append(Operation(family, draw(st.sampled_from(sorted(FAMILIES[family]))), operands, number))
    return Program(
        shape=draw(st.sampled_from([(4, 6), (5, 16), (32, 33)])),
        dtype=draw(st.sampled_from(DTYPES)),
        transposed=tuple(draw(st.booleans()) for _ in range(count)),
        constant=tuple(draw(st.booleans()) for _ in range(count)),
        operations=tuple(operations),
    )


def changes(program: Program) -> dict[str, Program]:
    """Every program that differs from this one in one thing, by what that is."""
    found: dict[str, Program] = {}
    rows, columns = program.shape
    found["rows"] = dataclasses.replace(program, shape=(rows + 1, columns))
    found["columns"] = dataclasses.replace(program, shape=(rows, columns + 1))
    found["dtype"] = dataclasses.replace(program, dtype=DTYPES[1 - DTYPES.index(program.dtype)])
    for i in range(len(program.transposed)):
        for name in ("transposed", "constant"):
            flags = list(getattr(program, name))
            flags[i] = not flags[i]
            found[f"{name} {i}"] = dataclasses.replace(program, **{name: tuple(flags)})
    for i, operation in enumerate(program.operations):
        others: dict[str, Operation] = {}
        for name in FAMILIES[operation.family]:
            if name != operation.name:
                others[f"operator {name}"] = dataclasses.replace(operation, name=name)
        if operation.family == "scalar":
            for number in (operation.number + 0.25, -operation.number, float("nan"), float("inf")):
                others[f"constant {number}"] = dataclasses.replace(operation, number=number)
        if operation.family == "over_dim":
            others["dimension"] = dataclasses.replace(operation, number=1 - operation.number)
        for position, operand in enumerate(operation.operands):
            for wire in range(len(program.transposed) + i):
                if wire != operand:
                    operands = (*operation.operands[:position], wire, *operation.operands[position + 1 :])
                    others[f"wire {position} from {wire}"] = dataclasses.replace(operation, operands=operands)
        for what, other in others.items():
            operations = (*program.operations[:i], other, *program.operations[i + 1 :])
            found[f"{what} of operation {i}"] = dataclasses.replace(program, operations=operations)
    return found
