"""Operators and modules of PyTorch's tables on inputs that lie in memory in other ways than side by side.

A call is captured and run as a traced graph, operator by operator. Its results must have eager's strides in every call, and `as_strided` behind
it, which reads all memory that the results span, must read eager's values. Kernels need no test of this kind: what they return is compared with
the traced strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map

from tests.operators import moduleinfos, opinfos
from tests.operators.execution import Flat
from tests.operators.tasks import Task, spread
from tests.operators.values import copied, difference, seed, tensors_of
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.graph.eager_graph import EagerGraph

Call = Callable[..., Any]


def _in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(*inverse)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    n = tensor.dim()
    return _in_order(tensor, [0, *range(2, n), 1]) if n in (4, 5) else tensor


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    return _in_order(tensor, range(tensor.dim())[::-1]) if tensor.dim() > 1 else tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    n = tensor.dim()
    return _in_order(tensor, [*range(n - 2), n - 1, n - 2]) if n > 2 else tensor


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.dim() else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 else tensor


LAYOUTS = {layout.__name__: layout for layout in (channels_last, permuted, transposed, gapped, expanded)}


class _Reading(torch.nn.Module):
    """A call, with `as_strided` of so much memory behind each tensor that it returns."""

    def __init__(self, call: Call, spans: Sequence[int]) -> None:
        super().__init__()
        self._call = call  # a module's parameters are this one's
        self._spans = spans

    def forward(self, *arguments: Any) -> list[torch.Tensor]:
        results = tensors_of(self._call(*arguments))
        return [tensor.as_strided((n,), (1,)) for tensor, n in zip(results, self._spans, strict=True)]


def differences(task: Task, limit: int) -> Iterator[str]:
    """Samples of a task, `limit` at most and spread over all, whose results differ from eager's."""
    table = moduleinfos if task.is_module else opinfos
    if not table.supported(task):
        return
    samples = table.samples(task)
    for number in spread(len(samples), limit):
        sample = samples[number]
        if sample.is_random:  # not checked when it is traced
            continue
        for name, arguments in _laid_out(sample.arguments):
            try:
                expected = _called(sample.subject.call, arguments)
            except Exception:  # whatever eager raises for inputs that lie so
                continue
            if not tensors_of(expected) or not all(_is_plain(t) for t in tensors_of((arguments, expected))):
                continue
            try:
                why = _compared(sample.subject.call, arguments, expected)
            except (DataDependentOutputException, DynamicOutputShapeException):  # no graph to look at
                break
            if why:
                yield f"{task.name}, sample {number}, {name}: {why}"


def _laid_out(arguments: Any) -> Iterator[tuple[str, Any]]:
    """The arguments with all tensors in a layout, and with the first one alone; none twice."""
    seen = {_strides(arguments)}
    for name, layout in LAYOUTS.items():
        for count in (None, 1):
            found = _with_layout(arguments, layout, count)
            if (strides := _strides(found)) not in seen:
                seen.add(strides)
                yield name if count is None else f"{name} first input", found


def _with_layout(arguments: Any, layout: Callable[[torch.Tensor], torch.Tensor], count: int | None) -> Any:
    tensors = tensors_of(arguments)[:count]

    def laid_out(leaf: Any) -> Any:
        return layout(leaf.detach()) if any(leaf is tensor for tensor in tensors) and _is_plain(leaf) else leaf

    return tree_map(laid_out, arguments)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0


def _strides(tree: Any) -> tuple[tuple[int, ...], ...]:
    """The strides of tensors, those of dimensions of size 1 left out, which address nothing."""
    return tuple(
        tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
        for tensor in tensors_of(tree)
        if _is_plain(tensor)
    )


def _called(call: Call, arguments: Any) -> Any:
    seed()
    with torch.no_grad():
        return call(*copied(arguments))


def _compared(call: Call, arguments: Any, expected: Any) -> str:
    for number, actual in enumerate(_captured(call, arguments)):
        if _strides(actual) != _strides(expected):
            return f"strides {_strides(actual)} in call {number}, eager's {_strides(expected)}"
    reading = _Reading(call, [TensorSpec.of(tensor).span for tensor in tensors_of(expected)])
    wanted = _called(reading, arguments)
    found = [difference(actual, wanted) for actual in _captured(reading, arguments)]
    return "".join(found)


def _captured(call: Call, arguments: Any) -> list[Any]:
    """The results of two calls of a traced graph."""

    def compile_graph(captured: CapturedGraph) -> EagerGraph:
        return EagerGraph(captured.graph_module)

    own = copied(arguments)
    flat = Flat(call, own)
    seed()
    with torch.no_grad():
        compiled = capture(flat, tensors_of(own), compile_graph, ())
    return [flat.results(_called(lambda *given: compiled(*tensors_of(given)), arguments)) for _ in range(2)]
