"""Call sites: where a model's forward multiplies, found as it runs, in eager and while Dynamo traces it.

A site is a call of an operator, named after the module in whose forward it is made: modules are followed by hooks, operators by a mode of
torch's. So functional calls (products of attention, weights kept as bare parameters) are seen like those of layers. Inside operators of
`torch.nn.functional` that are Python and take others' place, `multi_head_attention_forward` above all, nothing is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

KINDS = ("conv", "linear", "matmul")


@dataclass(frozen=True, slots=True)
class Operator:
    """A function of torch's: what kind of layer it is, where its two operands are, as (position, name), and the dimension of the second that
    counts output channels."""

    kind: str
    first: tuple[int, str]
    second: tuple[int, str]
    axis: int


_CONV = Operator("conv", (0, "input"), (1, "weight"), 0)
_MATMUL = Operator("matmul", (0, "input"), (1, "other"), -1)
_MAT2 = Operator("matmul", (0, "input"), (1, "mat2"), -1)
OPERATORS: dict[Callable[..., Any], Operator] = {
    torch.conv1d: _CONV,
    torch.conv2d: _CONV,
    torch.conv3d: _CONV,
    functional.linear: Operator("linear", (0, "input"), (1, "weight"), 0),
    torch.matmul: _MATMUL,
    torch.Tensor.matmul: _MATMUL,
    torch.Tensor.__matmul__: _MATMUL,
    torch.mm: _MAT2,
    torch.Tensor.mm: _MAT2,
    torch.bmm: _MAT2,
    torch.Tensor.bmm: _MAT2,
    torch.addmm: Operator("matmul", (1, "mat1"), (2, "mat2"), -1),
}

# (name, kind, channel dimension of a weight or None where both operands are activations, first operand, second operand,
#  the operator as a function of the two) -> its result
Visit = Callable[[str, str, "int | None", torch.Tensor, torch.Tensor, Callable[..., Any]], Any]


class CallSites(TorchFunctionMode):
    """While it is active, `visit` stands in for every operator of `OPERATORS` that modules followed by `follow` call."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self._visit = visit
        self._calls: list[list[Any]] = [["", 0]]  # innermost last: a module's name, and how many calls it has made

    def enter(self, name: str) -> None:
        """A module's forward begins."""
        self._calls.append([name, 0])

    def leave(self) -> None:
        """It has ended."""
        self._calls.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        operator = OPERATORS.get(function)
        if operator is None:
            return function(*args, **kwargs)
        here = self._calls[-1]
        here[1] += 1
        name = here[0] if here[1] == 1 else f"{here[0]}#{here[1]}"
        first, second = _operand(operator.first, args, kwargs), _operand(operator.second, args, kwargs)
        if not _is_taken(first) or not _is_taken(second):
            return function(*args, **kwargs)

        def compute(x: Any, w: Any) -> Any:
            positional, named = list(args), dict(kwargs)
            for (place, key), value in ((operator.first, x), (operator.second, w)):
                if place < len(positional):
                    positional[place] = value
                else:
                    named[key] = value
            return function(*positional, **named)

        kind, axis = operator.kind, operator.axis if operator.kind != "matmul" else None
        if axis is None and isinstance(second, nn.Parameter) and second.dim() == 2:
            kind, axis = "linear", 1  # a weight kept as (inputs, outputs), as GPT-2's
        return self._visit(name, kind, axis, first, second, compute)


def _operand(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def _is_taken(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and value.dim() > 0
        and value.numel() > 0
    )


def follow(model: nn.Module) -> None:
    """Have the modules of a model tell the active `CallSites` when they begin and end. Modules of `torch.nn` that compute without its operators
    are left alone: each hook is something that Dynamo guards."""
    for name, module in model.named_modules():
        if _may_call(module):
            module.register_forward_pre_hook(_Enter(name))
            module.register_forward_hook(_leave)


def _may_call(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.modules.")
    return not own or isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are layers of the kinds that are quantised, by name."""
    taken = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    return {name: module for name, module in model.named_modules() if isinstance(module, taken)}


class _Enter:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        mode = _active()
        if mode is not None:
            mode.enter(self._name)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    mode = _active()
    if mode is not None:
        mode.leave()


def _active() -> CallSites | None:
    """The innermost one of this thread."""
    for position in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(position)
        if isinstance(mode, CallSites):
            return mode
    return None
