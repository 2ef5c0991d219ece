"""The other sides: ATen, oneDNN and MKL with weights packed ahead, inductor's generated code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.operators import inductor as generated_code
from benchmarks.operators.ours import Problem

Call = Callable[[], Any]
_CONVOLUTIONS = ("conv", "grouped", "depthwise")


def peers(problem: Problem, *, inductor: bool) -> dict[str, Call]:
    """By name, everything to compare with. `inductor`: compile the operator with it too, where it generates code of its own."""
    found: dict[str, Call] = {"aten": problem.eager()}
    kind = problem.case.kind
    if kind in _CONVOLUTIONS:
        found |= _onednn_convolution(problem)
    elif kind == "linear" and problem.case.tensors[-1].constant:
        found |= _packed_linear(problem)
    if inductor and (call := generated_code.generated(problem)):
        found["inductor"] = call
    return found


def _onednn_convolution(problem: Problem) -> dict[str, Call]:
    """Call oneDNN's convolution as inductor with freezing calls it: channels last."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = problem.arguments()[0]
    if transposed or x.dim() != 4:
        return {}
    ops = torch.ops.mkldnn
    packed = ops._reorder_convolution_weight(weight, padding, stride, dilation, groups, list(x.shape))
    attribute = "none" if problem.epilogue == "none" else "relu"

    def call(x: torch.Tensor, other: torch.Tensor | None) -> Call:
        if other is None:
            return lambda: ops._convolution_pointwise(
                x, packed, bias, padding, stride, dilation, groups, attribute, [], ""
            )
        return lambda: ops._convolution_pointwise.binary(
            x, other, packed, bias, padding, stride, dilation, groups, "add", 1.0, attribute, [], ""
        )

    def last(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.contiguous(memory_format=torch.channels_last)

    channels_last = last(x)
    assert channels_last is not None
    return {"onednn": call(channels_last, last(problem.residual))}


def _packed_linear(problem: Problem) -> dict[str, Call]:
    arguments = problem.arguments()[0]
    bias, x, weight = arguments if problem.case.op.startswith("aten.addmm") else (None, *arguments)
    if x.dim() != 2 or (bias is not None and bias.dim() != 1):
        return {}
    plain = weight.t().contiguous()
    return {
        "onednn": _onednn_linear(x, plain, bias, problem.residual, problem.epilogue),
        "mkl": _mkl_linear(x, plain, bias, problem.residual, problem.epilogue),
    }


def _onednn_linear(
    x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, epilogue: str
) -> Call:
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(plain, x.shape[0])
    if other is not None:
        # oneDNN adds and activates in one call only as add, then relu on the result.
        return lambda: torch.relu_(ops._linear_pointwise.binary(x, other, packed, bias, "add"))
    attribute = "none" if epilogue == "none" else "relu"
    return lambda: ops._linear_pointwise(x, packed, bias, attribute, [], "")


def _mkl_linear(
    x: torch.Tensor, plain: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None, epilogue: str
) -> Call:
    """MKL fuses nothing behind a product: what follows works on its result in place."""
    ops, rows = torch.ops.mkl, x.shape[0]
    packed = ops._mkl_reorder_linear_weight(plain, rows)

    def call() -> torch.Tensor:
        product: torch.Tensor = ops._mkl_linear(x, packed, plain, bias, rows)
        if other is not None:
            product.add_(other)
        return product if epilogue == "none" else product.relu_()

    return call
