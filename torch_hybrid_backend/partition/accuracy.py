"""The accuracy gate: does a region's output equal eager's, within the tolerances PyTorch's own benchmarks use?

Shapes, dtypes and strides must be equal; integers and booleans exactly so. Floating-point outputs pass
`torch._dynamo.utils.same`: allclose first, and where that fails, the root mean square error against a float64 run of
the region may not be much larger than eager's own. NaN equals NaN. Where memory does not suffice to compare, nothing was found out about
the outputs: that is a verdict of its own, never one about accuracy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo.utils import same

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.eager_graph import TracedRun
from torch_hybrid_backend.errors import OperatorRefusedError, is_out_of_memory

_TOLERANCE = 1e-4  # the default of `same`, absolute and relative
_LOW = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Comparison:
    """`why` tells why the outputs do not pass, "" where they do: `code` is ACCURACY where they differ, OUT_OF_MEMORY where there was no memory
    to find out. `max_error` is the largest absolute difference of any element seen."""

    why: str
    max_error: float
    code: Reason = Reason.ACCURACY

    @property
    def refused(self) -> Refused | None:
        """The refusal that it stands for; None where the outputs pass."""
        return Refused(self.code, self.why) if self.why else None


@torch.no_grad()
def compare(
    region: Region, inputs: Sequence[object], expected: Sequence[object], actual: Sequence[object]
) -> Comparison:
    """Compare an engine's outputs (`actual`) with eager's (`expected`), both made from `inputs`.

    The float64 run costs a third run of the region, with twice the memory of eager's, and happens only where allclose fails.
    """
    try:
        return _compare(region, inputs, expected, actual)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = "there is no memory to compare its outputs with eager's and with a float64 run, so that nothing shows that they are right"
        return Comparison(why, 0.0, Reason.OUT_OF_MEMORY)


def _compare(
    region: Region, inputs: Sequence[object], expected: Sequence[object], actual: Sequence[object]
) -> Comparison:
    if len(expected) != len(actual):
        return Comparison(f"it returned {len(actual)} outputs, eager {len(expected)}", 0.0)
    exact = functools.cache(lambda: float64_run(region.graph_module, inputs) or [None] * len(expected))
    worst = 0.0
    for position, (reference, result) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(reference, torch.Tensor) or not isinstance(result, torch.Tensor):
            if type(reference) is not type(result) or reference != result:
                return Comparison(f"output {position} is {result!r}, eager's is {reference!r}", worst)
            continue
        why = _form(reference, result, region.outputs[position])
        if why:
            return Comparison(f"output {position} {why}", worst)
        error = _max_error(reference, result)
        worst = max(worst, error)
        if not _allclose(reference, result) and not _near(reference, result, exact()[position]):
            what = f"{TensorSpec.of(reference).dtype}, shape {tuple(reference.shape)}"
            return Comparison(f"output {position} ({what}) differs from eager's by up to {error:.3g}", worst)
    return Comparison("", worst)


def _form(reference: torch.Tensor, result: torch.Tensor, spec: TensorSpec | None) -> str:
    if result.dtype != reference.dtype:
        return f"has dtype {result.dtype}, eager's {reference.dtype}"
    if result.shape != reference.shape:
        return f"has shape {tuple(result.shape)}, eager's {tuple(reference.shape)}"
    if result.device != reference.device:
        return f"is on {result.device}, eager's on {reference.device}"
    # The strides of the graph's metadata are legal too: what follows in the graph was built for them.
    legal = [reference.stride()] + ([spec.strides] if spec is not None else [])
    if reference.numel() and not any(_same_strides(reference.shape, result.stride(), strides) for strides in legal):
        return f"has strides {result.stride()}, eager's {reference.stride()}"
    return ""


def _same_strides(shape: Sequence[int], a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether the strides address the same elements: those of dimensions of size 1 do not matter."""
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def _allclose(reference: torch.Tensor, result: torch.Tensor) -> bool:
    if not reference.dtype.is_floating_point and not reference.dtype.is_complex:
        return torch.equal(reference, result)
    return torch.allclose(reference, result, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _near(reference: torch.Tensor, result: torch.Tensor, ideal: object) -> bool:
    """Whether the result's root mean square error against `ideal`, the float64 run's output, is about that of eager's."""
    if not reference.dtype.is_floating_point or not isinstance(ideal, torch.Tensor):
        return False
    # One NaN or infinity makes the mean square of all elements NaN, which `same` takes for equal: take out those
    # on which both agree, and let the others fail unless the float64 run, too, has a number where eager has none.
    agreed = ((reference == result) | (reference.isnan() & result.isnan())) & ~reference.isfinite()
    reference, result, ideal = (values.masked_fill(agreed, 0) for values in (reference, result, ideal))
    if result.isnan().any() or (reference.isnan().any() and ideal.isnan().any()):
        return False
    return bool(same(reference, result, ideal, tol=_TOLERANCE, equal_nan=True, log_error=_silent))


def _silent(*_: object, **__: object) -> None:
    """The caller reports what differs, with the region's name; `same` need not log it."""


def _max_error(reference: torch.Tensor, result: torch.Tensor) -> float:
    if reference.numel() == 0:
        return 0.0
    wide = torch.complex128 if reference.dtype.is_complex else torch.float64
    a, b = reference.to(wide), result.to(wide)
    difference = (a - b).abs()
    # Equal infinities differ by NaN, and NaN equals NaN.
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, difference)
    return float(difference.max())


def float64_run(graph_module: torch.fx.GraphModule, inputs: Sequence[object]) -> list[object] | None:
    """The region's outputs computed in float64: inputs, constants and dtype arguments below it are widened.

    None where the region cannot be run so (an operator reinterprets bits, or does not take float64). Raises what operators raise for
    other reasons: for want of memory, say.
    """
    bits = torch.ops.aten.view.dtype
    if any(node.target is bits for node in graph_module.graph.nodes):
        return None
    try:
        with torch.no_grad():
            return list(_Widened(graph_module).run(*(_widen(value) for value in inputs)))
    except OperatorRefusedError:
        return None


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64) if value.dtype in _LOW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW else value
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_widen(item) for item in value)
    return value


class _Widened(TracedRun):
    """Runs a graph with every floating-point dtype argument and constant replaced by float64."""

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return tuple(map(_widen, args)), {name: _widen(value) for name, value in kwargs.items()}

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _widen(super().get_attr(target, args, dict(kwargs)))
