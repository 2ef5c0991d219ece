"""A region that eager runs, as a program: then a plan calls PyTorch's operators itself, and needs no Python for it.

Enters: a region. Leaves: a `Program` with an `OperatorCall` for each operator, views included. Illegal: regions with an operator that the C
interface of PyTorch's dispatcher cannot call, with effects (writes, collectives, and random numbers unless `draws`), with values that are no
plain tensors of the host, and with sizes that depend on data; `NotNativeError` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from torch_hybrid_backend.core.program import OperatorArgument, OperatorCall, OperatorResult, Program, TensorArgument
from torch_hybrid_backend.core.region import EagerRun, Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.graph.operator_calls import arguments_of, why_python
from torch_hybrid_backend.graph.schema import is_item
from torch_hybrid_backend.torch_private import OpOverload


class NotNativeError(HybridError):
    """A region that needs Python; the message names the first operator that does, and says why."""


@dataclass(frozen=True, slots=True)
class OperatorRegion:
    """A region that eager runs, with its program."""

    eager: EagerRun
    program: Program

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a call from Python."""
        return self.eager(inputs)


def operator_region(region: Region, *, draws: bool = False) -> OperatorRegion:
    """A region with its program, in which operators may draw random numbers if `draws`. Raises NotNativeError where it has none."""
    if isinstance(region.eager, EagerGraph) and region.eager.uses_decompositions:
        raise NotNativeError(
            "PyTorch has no kernel for the form of an operator's inputs, and Python computes it otherwise"
        )
    return OperatorRegion(region.eager, _Builder(region, draws=draws).program())


class _Builder:
    def __init__(self, region: Region, *, draws: bool) -> None:
        self._region = region
        self._draws = draws
        self._buffers: list[TensorSpec] = []
        # A tensor is a buffer's TensorArgument, a size a Dim, several results a tuple; None where nobody reads it.
        self._values: dict[Node, OperatorArgument] = {}
        self._steps: list[OperatorCall] = []
        self._origins: list[frozenset[str]] = []

    def program(self) -> Program:
        region = self._region
        inputs, outputs = [], []
        given = iter(region.inputs)
        for node in region.graph_module.graph.nodes:
            if node.op == "output":
                outputs = [self._buffer(self._value(each)) for each in node.args[0]]
                continue
            if why := why_python(node, draws=self._draws):
                raise NotNativeError(why)
            value = node.meta.get("val")
            if node.op == "placeholder":
                spec = next(given).spec
                self._values[node] = dim(value) if spec is None else self._new(value)
                inputs.append(-1 if spec is None else self._buffer(self._values[node]))
            elif is_item(node):
                source = self._values[node.args[0]]
                assert isinstance(source, tuple), "an operator with several results is read by items"
                self._values[node] = source[node.args[1]]
            elif isinstance(value, int | torch.SymInt):
                self._values[node] = dim(value)
            else:
                self._call(node, node.target)
        signature = tuple(each.size if each.spec is None else each.spec for each in region.inputs)
        program = Program(
            tuple(self._buffers),
            tuple(inputs),
            tuple(outputs),
            (),
            tuple(self._steps),
            device=region.device,
            origins=tuple(self._origins),
        )
        return program if not program.names else replace(program, signature=signature)

    def _call(self, node: Node, target: OpOverload) -> None:
        schema = target._schema
        value = node.meta["val"]
        is_single = len(schema.returns) == 1
        results = [
            self._result(node, result, None if is_single else number)
            for number, result in enumerate((value,) if is_single else value)
        ]
        self._values[node] = results[0] if is_single else tuple(results)
        arguments = tuple(map(self._value, arguments_of(node).values()))
        overload = "" if target._overloadname == "default" else target._overloadname
        call = OperatorCall(schema.name, arguments, tuple(map(_unwrapped, results)), str(target), overload)
        try:
            call.describe()
        except HybridError as error:
            raise NotNativeError(f"{target}: {error}") from error
        self._steps.append(call)
        self._origins.append(frozenset({node.name}))

    def _result(self, node: Node, value: Any, number: int | None) -> OperatorArgument:
        """The buffer, or buffers, of a result that the node has alone, or among others as that of the number."""
        readers = list(node.users) if number is None else [u for u in node.users if u.args[1] == number]
        if isinstance(value, list | tuple):
            users = readers if number is None else [user for reader in readers for user in reader.users]
            read = {user.args[1] for user in users if is_item(user)}
            return tuple(self._new(each) if index in read else None for index, each in enumerate(value))
        return self._new(value) if readers else None

    def _new(self, value: torch.Tensor) -> TensorArgument:
        self._buffers.append(TensorSpec.of(value))
        return TensorArgument(len(self._buffers) - 1)

    def _value(self, argument: Any) -> OperatorArgument:
        if isinstance(argument, Node):
            return self._values[argument]
        return tuple(map(self._value, argument)) if isinstance(argument, list | tuple) else argument

    def _buffer(self, value: OperatorArgument) -> int:
        if not isinstance(value, TensorArgument):
            raise NotNativeError("it returns a number")
        return value.buffer


def _unwrapped(result: OperatorArgument) -> OperatorResult:
    if isinstance(result, tuple):
        return tuple(each.buffer if isinstance(each, TensorArgument) else None for each in result)
    return result.buffer if isinstance(result, TensorArgument) else None
