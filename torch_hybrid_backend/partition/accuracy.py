"""The accuracy gate: does a region's output equal eager's, within the tolerances of its dtype (`TOLERANCES`)?

Shapes, dtypes and strides must be equal; integers and booleans exactly so, but for those that a number was quantised to: they may be off by
one step, as what is quantised may lie on either side of a tie, and what is computed from them by what that makes.
Floating-point outputs pass where all elements are close to eager's, or else where their root mean square error against a run of the region in a
wider dtype is not much larger than eager's own (`torch._dynamo.utils.same`, as PyTorch's own benchmarks judge; in units of that output's size
where it is large): half types against float32,
float32 against float64. NaN equals NaN.

A wider run takes memory that eager does not: only what the outputs in question need is computed, weights are widened layer by layer, products'
block by block. Where it would still take `BESIDE_EAGER_BYTES` more than eager's, the root mean square difference from eager decides.

Where a device's memory does not suffice to compare, the host compares. Where the host's does not either, nothing was found out about the
outputs: they are not verified, which is a verdict of its own, never one about accuracy.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.precision import ROW_BITS, ROW_GROUPS
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.errors import OperatorRefusedError, failures, is_out_of_memory
from torch_hybrid_backend.generators import Replay
from torch_hybrid_backend.graph.eager_graph import TracedRun
from torch_hybrid_backend.graph.quantized import PRODUCTS, is_quantized, is_quantizing
from torch_hybrid_backend.graph.schema import draws, draws_numbers, is_item, is_view
from torch_hybrid_backend.graph.values import outputs_of, storage_root
from torch_hybrid_backend.machine import EXACT_PRECISIONS, float32_precision
from torch_hybrid_backend.partition.blocks import blocks, largest, mean_square
from torch_hybrid_backend.sizes.size import size_hint
from torch_hybrid_backend.torch_private import tree_map

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element is close where |result - eager's| <= absolute + relative * |eager's|."""

    relative: float
    absolute: float


_ROOT_MEAN_SQUARE = 1e-4  # the default of `same`: a tenth of it is what any result may be off by
# Where eager has NaN, numbers may be off from the wider run's by so much: `same` again.
_BETTER_THAN_NAN = 4e-2
# Of float32 outputs' own: sums of 4,096 terms, added one by one, are off by half of it.
_RELATIVE_ROOT_MEAN_SQUARE = 4e-6
# By the bits of rows: what outputs may be off by for rounded rows without a run that tells. A product is off by 3e-5 (16 bits) or 5e-3 (8) of
# itself; by 8e-4 with 16 where a single element of a row of 4,096 is not next to nothing. Errors grow from layer to layer.
_OF_ROUNDED_ROWS: Mapping[int, float] = {16: 1e-3, 8: 0.02}
# Against a run whose rows are rounded: of its root mean square error, and of its largest.
_TIMES_ROUNDED = 2, 4
NUDGE = (
    4e-6  # of the largest value: kernels' sums of a thousand products in float32 differ from eager's by a tenth of that
)
# float32: the default of `same`. Kernels sum in other orders than eager's: torch.testing's 1.3e-6 is for one rounding. float64 has what float32
# has, as it has no wider dtype to be judged by. The half types: torch.testing's, one and two units in the last place; more would not be closer
# to the truth, and less would never pass and cost each region a wider run.
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-4, 1e-4),
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    # One unit in the last place, as what is rounded may differ by a rounding.
    torch.float8_e4m3fn: Tolerance(0.125, 2**-9),
    torch.float8_e5m2: Tolerance(0.25, 2**-16),
}
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_HALF = frozenset({torch.float16, torch.bfloat16})
# What is widened for a run in a dtype.
_NARROWER: Mapping[torch.dtype, frozenset[torch.dtype]] = {
    torch.float32: _HALF,
    torch.float64: _HALF | {torch.float32},
}
# Beside views.
_TAKE_ELEMENTS = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_select.default,
    }
)
# What a wider run may take at once beyond eager's run.
BESIDE_EAGER_BYTES = 64 << 20
# Without it: what the root mean square of differences may be of eager's own. Errors of a few dozen layers, two or three roundings each.
_WITHOUT_WIDER: Mapping[torch.dtype, float] = {torch.float16: 2.5e-3, torch.bfloat16: 0.02}
_FLOAT32_WITHOUT_WIDER = 2e-5
# Of a weight that is widened for a product: 8 MiB in float64.
_WEIGHT_ELEMENTS = 1 << 20
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    `why`: the reason why outputs do not pass, "" if they do. `code`: ACCURACY if they differ, OUT_OF_MEMORY if there was no memory to find out,
    so that they are not verified. `max_error` is the largest absolute difference of any element seen; `relative_error`: of values that
    do not pass the root mean square of their differences over that of eager's, None where it is not for its values that an output does not.
    `note`: what outputs that pass were not judged by, "" of most."""

    why: str
    max_error: float
    code: Reason = Reason.ACCURACY
    relative_error: float | None = None
    note: str = ""

    @property
    def refused(self) -> Refused | None:
        """The refusal that it stands for; None where the outputs pass."""
        return Refused(self.code, self.why) if self.why else None


@torch.no_grad()
def compare(
    region: Region,
    inputs: Sequence[object],
    expected: Sequence[object],
    actual: Sequence[object],
    replay: Replay | None = None,
) -> Comparison:
    """Compare an engine's outputs (`actual`) with eager's (`expected`), both made from `inputs`. `replay`: what both were run by, where the
    region draws random numbers.

    The wider run costs a third run of the region, and happens only where elements are not close.
    """
    if why := _forms(region, expected, actual):
        return Comparison(why, 0.0)
    if replay is not None and not replay.agrees:
        return Comparison("it takes more or fewer numbers of the random generator than eager", 0.0)
    rewind = replay.rewind if replay is not None else _nothing
    try:
        return _compare(region, inputs, expected, actual, rewind)
    except failures(RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # The error is let go of: it holds what was computed.
    if not all(_is_on_host(value) for value in (*inputs, *expected)):
        _log.info("region %s is compared on the host: its device has too little memory for that", region.name)
        try:
            return _compare(region, _on_host(inputs), _on_host(expected), _on_host(actual), rewind, on_host=True)
        except failures(RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    why = "there is no memory to compare its outputs with eager's and with a run in a wider dtype, so that nothing shows that they are right"
    return Comparison(why, 0.0, Reason.OUT_OF_MEMORY)


def difference(expected: Sequence[object], actual: Sequence[object]) -> str:
    """Text that says how outputs of two runs of the same operators differ by more than their dtypes' tolerances; "" if they do not."""
    if len(expected) != len(actual):
        return f"it returned {len(actual)} outputs, not {len(expected)}"
    for position, (reference, result) in enumerate(zip(expected, actual, strict=True)):
        if isinstance(reference, torch.Tensor) and isinstance(result, torch.Tensor):
            if why := _form(reference, result, None):
                return f"output {position} {why}"
            if not _allclose(reference, result):
                return f"output {position} differs by up to {_max_error(reference, result):.3g}"
        elif repr(reference) != repr(result):  # numbers; NaN is NaN
            return f"output {position} is {result!r}, not {reference!r}"
    return ""


def _nothing() -> None:
    """Eager's run and the engine's drew no random numbers."""


def _is_on_host(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def _on_host(values: Sequence[object]) -> list[object]:
    return [value.cpu() if isinstance(value, torch.Tensor) else value for value in values]


def _forms(region: Region, expected: Sequence[object], actual: Sequence[object]) -> str:
    """Text that says what is wrong with the outputs but for the values of tensors; "" if nothing is."""
    if len(expected) != len(actual):
        return f"it returned {len(actual)} outputs, eager {len(expected)}"
    for position, (reference, result) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(reference, torch.Tensor) or not isinstance(result, torch.Tensor):
            if type(reference) is not type(result) or reference != result:
                return f"output {position} is {result!r}, eager's is {reference!r}"
        elif why := _form(reference, result, region.outputs[position]):
            return f"output {position} {why}"
    return ""


def _compare(
    region: Region,
    inputs: Sequence[object],
    expected: Sequence[object],
    actual: Sequence[object],
    rewind: Callable[[], None],
    on_host: bool = False,
) -> Comparison:
    module = region.graph_module
    far = {
        position
        for position, (reference, result) in enumerate(zip(expected, actual, strict=True))
        if isinstance(reference, torch.Tensor) and isinstance(result, torch.Tensor) and not _allclose(reference, result)
    }
    judged_graph = module if not far or draws_numbers(module) else _returning(module, far)
    no_run = [None] * len(expected)

    @functools.cache
    def fits(dtype: torch.dtype) -> bool:
        """True if the host has memory for a wider run, of what it has beside what eager takes."""
        on_device = not on_host and not all(map(_is_on_host, expected))
        return on_device or _peak_bytes(judged_graph, dtype) <= BESIDE_EAGER_BYTES + _peak_bytes(module, None)

    @functools.cache
    def ideal(dtype: torch.dtype) -> Sequence[object]:
        rewind()
        return reference_run(judged_graph, inputs, dtype, on_host=on_host) or no_run

    @functools.cache
    def nudged() -> list[Sequence[object]]:
        """The region run wide, all that it quantises a little larger, and a little smaller; nothing where it quantises nothing."""
        if not any(is_quantizing(node.target) for node in module.graph.nodes) or not fits(torch.float64):
            return []
        runs = []
        for nudge in (NUDGE, -NUDGE):
            rewind()
            runs.append(reference_run(judged_graph, inputs, torch.float64, on_host=on_host, nudge=nudge))
        return [run for run in runs if run is not None]

    @functools.cache
    def rounded() -> Sequence[object]:
        """The region run wide with rows rounded as kernels may round them."""
        rewind()
        run = reference_run(judged_graph, inputs, torch.float64, on_host=on_host, rounds_rows=True)
        return run or no_run

    worst, note = 0.0, ""
    outputs = outputs_of(module)
    row_bits = min(map(_row_bits, module.graph.nodes))
    for position, (reference, result) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(reference, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        error = _max_error(reference, result)
        worst = max(worst, error)
        if position not in far or (error <= 1 and is_quantized(outputs[position])):
            continue
        if row_bits in _OF_ROUNDED_ROWS and (
            _is_near_rounded(reference, result, error, _OF_ROUNDED_ROWS[row_bits])
            or (fits(torch.float64) and _is_off_as(result, ideal(torch.float64)[position], rounded()[position]))
        ):
            continue
        wider = _wider(reference.dtype, module, on_host=on_host or _is_on_host(reference))
        if wider is not None and not fits(wider):
            if _relative_error(reference, result) <= _WITHOUT_WIDER.get(reference.dtype, _FLOAT32_WITHOUT_WIDER):
                note = f"judged by eager's results alone: a run in {str(wider).removeprefix('torch.')} takes too much memory"
                continue
        elif wider is not None and _near(reference, result, ideal(wider)[position]):
            continue
        judged = wider is not None or is_quantized(outputs[position])
        moved = [run[position] for run in nudged()] if judged else []
        if not moved or not _near_ties(result, ideal(torch.float64)[position], moved):
            what = f"{TensorSpec.of(reference).dtype}, shape {tuple(reference.shape)}"
            why = f"output {position} ({what}) differs from eager's by up to {error:.3g}"
            return Comparison(why, worst, relative_error=_relative_error(reference, result))
    return Comparison("", worst, note=note)


def _returning(module: torch.fx.GraphModule, positions: Collection[int]) -> torch.fx.GraphModule:
    """The graph with what is computed for the outputs at these positions alone; None in place of the others."""
    graph = torch.fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    assert isinstance(outputs, list | tuple)  # regions return several
    graph.output(tuple(output if position in positions else None for position, output in enumerate(outputs)))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(module, graph, "Judged")


def _peak_bytes(module: torch.fx.GraphModule, dtype: torch.dtype | None) -> int:
    """Bytes that a run of the graph has at once of values that it computes, and in `dtype` of what it widens beside them; by the sizes it was
    traced with."""
    last: dict[Node, Node] = {}
    for node in module.graph.nodes:
        last.update((_maker(source), node) for source in node.all_input_nodes)
    dying: dict[Node, list[Node]] = {}
    for root, node in last.items():
        dying.setdefault(node, []).append(root)

    def is_computed(node: Node) -> bool:
        return node.op == "call_function" and _maker(node) is node

    live = peak = 0
    for node in module.graph.nodes:
        live += _bytes_in(node.meta.get("val"), dtype) if is_computed(node) else 0
        copies = 0
        if dtype is not None and node.op == "call_function" and not _takes_elements(node):
            weight = node.args[PRODUCTS[node.target]] if node.target in PRODUCTS else None
            narrow = (source for source in node.all_input_nodes if not is_computed(_maker(source)))
            copies = sum(_bytes_in(source.meta.get("val"), dtype) for source in narrow if source is not weight)
        peak = max(peak, live + copies)
        live -= sum(_bytes_in(root.meta.get("val"), dtype) for root in dying.get(node, ()) if is_computed(root))
    return peak


def _maker(node: Node) -> Node:
    """The node that made a value's memory, of an item of several results the node of all."""
    root = storage_root(node)
    return _maker(root.all_input_nodes[0]) if is_item(root) else root


def _bytes_in(value: object, dtype: torch.dtype | None) -> int:
    """Bytes of the tensors, those of narrower numbers as they are in `dtype`."""
    if isinstance(value, list | tuple):
        return sum(_bytes_in(each, dtype) for each in value)
    if not isinstance(value, torch.Tensor):
        return 0
    is_widened = dtype is not None and value.dtype in _NARROWER[dtype]
    size = dtype.itemsize if is_widened and dtype is not None else value.dtype.itemsize
    return size * math.prod(size_hint(size) for size in TensorSpec.of(value).shape)


def _takes_elements(node: Node) -> bool:
    return is_view(node) or node.target in _TAKE_ELEMENTS


def _wider(dtype: torch.dtype, graph_module: torch.fx.GraphModule, *, on_host: bool) -> torch.dtype | None:
    """The dtype that an output of `dtype` is judged by; None if the output must be exact.

    float64 instead of float32 where PyTorch's settings let products of float32 be rounded as those of half types are (TF32, bfloat16).
    """
    if not dtype.is_floating_point:
        return None
    if dtype not in _HALF:
        return torch.float64
    matmul, convolution = float32_precision("cpu" if on_host else "cuda")
    convolves = any(node.target in _CONVOLUTIONS for node in graph_module.graph.nodes)
    rounds = {matmul, convolution} if convolves else {matmul}
    return torch.float32 if rounds <= EXACT_PRECISIONS else torch.float64


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
    """True if the strides address the same elements: those of dimensions of size 1 do not matter."""
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def _allclose(reference: torch.Tensor, result: torch.Tensor) -> bool:
    if not reference.dtype.is_floating_point and not reference.dtype.is_complex:
        return torch.equal(reference, result)
    tolerance = TOLERANCES.get(reference.dtype, TOLERANCES[torch.float32])  # complex numbers, say
    pairs = (map(_comparable, pair) for pair in blocks(reference, result))
    return all(torch.allclose(a, b, tolerance.relative, tolerance.absolute, equal_nan=True) for a, b in pairs)


def _near(reference: torch.Tensor, result: torch.Tensor, ideal: object) -> bool:
    """True if the result's root mean square error against `ideal`, the wider run's output, is about that of eager's, as
    `torch._dynamo.utils.same` judges."""
    if not isinstance(ideal, torch.Tensor):
        return False
    squares = torch.zeros(3, dtype=torch.float64)  # of eager's errors, of the result's, and of the ideal: their sums
    eager_nan = ideal_nan = False
    is_close = is_better = True
    for pair in blocks(reference, result, ideal):
        a, b, c = _comparable(pair[0]), _comparable(pair[1]), pair[2].to(torch.float64)
        # One NaN or infinity makes the mean square of all elements NaN: take out those on which both agree, and let the
        # others fail unless the wider run, too, has a number where eager has none.
        agreed = ((a == b) | (a.isnan() & b.isnan())) & ~a.isfinite()
        a, b, c = (values.masked_fill(agreed, 0) for values in (a, b, c))
        if b.isnan().any():
            return False
        eager_nan |= bool(a.isnan().any())
        ideal_nan |= bool(c.isnan().any())
        is_close = is_close and torch.allclose(a, b, _ROOT_MEAN_SQUARE, _ROOT_MEAN_SQUARE)
        is_better = is_better and torch.allclose(c.to(b.dtype), b, _BETTER_THAN_NAN, _BETTER_THAN_NAN)
        squares += torch.stack([values.square().sum() for values in (a - c, b - c, c)]).cpu()
    if eager_nan and ideal_nan:
        return False
    if is_close or (eager_nan and is_better):
        return True
    eagers, error, size = (squares / reference.numel()).sqrt().tolist()
    is_noisy = reference.dtype in _HALF or reference.numel() < 1000 or reference.shape[2:] == (1, 1)
    if error <= (3 if is_noisy else 2) * eagers + _ROOT_MEAN_SQUARE / 10:
        return True
    # What passes here whatever eager's error is, is next to nothing for outputs in the hundreds: there float32 sums of thousands of terms
    # differ by more when they are taken in another order, and eager's order may happen to be a very good one.
    compared_in = torch.float32 if result.dtype in _FLOAT8 else result.dtype
    return compared_in == torch.float32 and bool(error <= _RELATIVE_ROOT_MEAN_SQUARE * size)


def _is_near_rounded(reference: torch.Tensor, result: torch.Tensor, error: float, allowed: float) -> bool:
    """True if rounded rows may have made the difference, which is `error` at most: `allowed` in the mean, and no element stands out."""
    if not reference.is_floating_point() or reference.numel() == 0:
        return False
    most = largest(_itself, reference)
    return math.isfinite(most) and _relative_error(reference, result) <= allowed and error <= 10 * allowed * most


def _is_off_as(result: torch.Tensor, ideal: object, rounded: object) -> bool:
    """True if the result is as near `ideal` as the `rounded` run is, in the mean and in each element."""
    if not isinstance(ideal, torch.Tensor) or not isinstance(rounded, torch.Tensor) or result.numel() == 0:
        return False
    of_mean, of_largest = _TIMES_ROUNDED
    return mean_square(torch.sub, result, ideal) <= of_mean**2 * mean_square(torch.sub, rounded, ideal) and largest(
        torch.sub, result, ideal
    ) <= of_largest * largest(torch.sub, rounded, ideal)


def _near_ties(result: torch.Tensor, ideal: object, nudged: Sequence[object]) -> bool:
    """True if the result's root mean square error is about what comes of other sides taken at ties, as the `nudged` runs show it.

    Where few values are quantised it is chance whether eager, the kernel, both or neither take the same side as the wider run, and what
    follows differs by a whole step: no error of eager's tells how much that is.
    """
    if not isinstance(ideal, torch.Tensor):
        return False

    def error(values: object) -> float:
        assert isinstance(values, torch.Tensor)
        return math.sqrt(mean_square(torch.sub, values, ideal))

    return error(result) <= _ROOT_MEAN_SQUARE / 10 + 2 * max(map(error, nudged))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; floats of 8 bits, which PyTorch does not compare, in float32."""
    return tensor.float() if tensor.dtype in _FLOAT8 else tensor


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


def _max_error(reference: torch.Tensor, result: torch.Tensor) -> float:
    def error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        # Equal infinities differ by NaN, and NaN equals NaN.
        return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())

    return largest(error, reference, result)


def _relative_error(reference: torch.Tensor, result: torch.Tensor) -> float:
    off, size = mean_square(torch.sub, result, reference), mean_square(_itself, reference)
    return math.sqrt(off / size) if size else (math.inf if off else math.nan)


def reference_run(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[object],
    dtype: torch.dtype,
    *,
    on_host: bool = False,
    nudge: float = 0.0,
    rounds_rows: bool = False,
) -> list[object] | None:
    """The region's outputs computed in `dtype`, float32 or float64: inputs, constants and dtype arguments below it are widened.

    Random operators draw in the dtype that they were traced in: the numbers depend on it. on_host: constants and device arguments are the
    host's, as the inputs are. nudge: what is quantised is moved by this share of the largest value beside it. rounds_rows: rows of products
    that carry the mark are rounded (`core.precision.ROW_BITS`). None where the region cannot be run so (an operator reinterprets bits, or does
    not take the dtype; the host would have to draw the numbers of another device). Raises what operators raise for other reasons: for want of
    memory, say.
    """
    bits = torch.ops.aten.view.dtype
    if any(node.target is bits for node in graph_module.graph.nodes) or (on_host and draws_numbers(graph_module)):
        return None
    run = _Widened(graph_module, dtype, on_host, nudge, rounds_rows)
    try:
        with torch.no_grad():
            return list(run.run(*inputs))
    except OperatorRefusedError:
        return None


def _row_bits(node: torch.fx.Node) -> int:
    """To how many bits the rows of this product may be rounded; 32: not at all."""
    bits: int = node.meta.get(ROW_BITS, 32)
    return bits


def _rounded_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows, (..., K), as kernels may round them: to `bits` bits of the largest number of a group."""
    k, size = rows.shape[-1], ROW_GROUPS[bits]
    padded = torch.nn.functional.pad(rows, (0, -k % size))
    groups = padded.reshape(*padded.shape[:-1], -1, size)
    step = groups.abs().amax(-1, keepdim=True) / (127 << (bits - 8))
    rounded = torch.where(step > 0, (groups / step).round() * step, groups)
    return rounded.flatten(-2)[..., :k]


class _Widened(TracedRun):
    """Runs a graph with every narrower floating-point value and dtype argument replaced by `dtype`, on the host if need be.

    A value is widened where an operator computes with it, and no longer: what is wide of a model's parameters is one layer's at a time. What
    only takes elements out of a value takes them before they are widened: a few rows of a large table.
    """

    def __init__(
        self, graph_module: torch.fx.GraphModule, dtype: torch.dtype, on_host: bool, nudge: float, rounds_rows: bool
    ) -> None:
        super().__init__(graph_module)
        self._dtype = dtype
        self._on_host = on_host
        self._nudge = nudge
        self._rounds_rows = rounds_rows

    def widen(self, value: Any) -> Any:
        narrower = _NARROWER[self._dtype]
        if isinstance(value, torch.Tensor):
            value = value.cpu() if self._on_host else value
            return value.to(self._dtype) if value.dtype in narrower else value
        if isinstance(value, torch.dtype):
            return self._dtype if value in narrower else value
        if isinstance(value, torch.device):
            return torch.device("cpu") if self._on_host else value
        if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            return type(value)(map(self.widen, value))
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in PRODUCTS:
            return self._product(target, args, kwargs)
        if not is_quantizing(target):
            return super().call_function(target, args, kwargs)
        # Operators on quantised tensors take and return float32 whatever they are given: the wider run goes on from there.
        narrow, *rest = args
        if narrow.dtype.is_floating_point:
            if self._nudge and narrow.numel():
                narrow = narrow + self._nudge * narrow.abs().amax()
            narrow = narrow.float()
        return tree_map(self.widen, super().call_function(target, (narrow, *rest), kwargs))

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if not self._on_host and _takes_elements(n):
            return args, kwargs
        if draws(n):
            given: tuple[Any, dict[str, Any]] = torch.fx.node.map_arg((n.args, n.kwargs), self._as_traced)
            return given
        if self._rounds_rows and n.target in PRODUCTS and (bits := _row_bits(n)) in ROW_GROUPS:
            rows = PRODUCTS[n.target] - 1
            args = (*args[:rows], _rounded_rows(args[rows], bits), *args[rows + 1 :])
        weight = PRODUCTS.get(n.target, -1)  # `_product` widens it, block by block
        wide = tuple(arg if number == weight else self.widen(arg) for number, arg in enumerate(args))
        return wide, {name: self.widen(value) for name, value in kwargs.items()}

    def _product(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A product whose weight is widened a few columns at a time."""
        place = PRODUCTS[target]
        weight, dimension = args[place], 0 if target is torch.ops.aten.linear.default else 1
        columns = weight.shape[dimension]
        step = max(1, columns * _WEIGHT_ELEMENTS // max(1, weight.numel()))
        if step >= columns:
            return super().call_function(target, (*args[:place], self.widen(weight), *args[place + 1 :]), kwargs)
        rows = args[place - 1]
        result = rows.new_empty(*rows.shape[:-1], columns)
        for start in range(0, columns, step):
            count = min(step, columns - start)
            own = [
                arg.narrow(-1, start, count) if isinstance(arg, torch.Tensor) and arg.shape[-1:] == (columns,) else arg
                for arg in args
            ]
            own[place - 1], own[place] = rows, self.widen(weight.narrow(dimension, start, count))
            result.narrow(-1, start, count).copy_(super().call_function(target, tuple(own), kwargs))
        return result

    def _as_traced(self, n: torch.fx.Node) -> Any:
        """A value in the dtype that it was traced in."""
        value, traced = self.env[n], n.meta.get("val")
        return value.to(traced.dtype) if isinstance(traced, torch.Tensor) else value
