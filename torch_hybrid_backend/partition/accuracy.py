"""The accuracy check of a region: its outputs must equal eager's within the tolerances of their dtypes (`TOLERANCES`).

Shapes, dtypes and strides must be equal. Integers and booleans must be exactly equal, but where numbers nearly equal decide them
(`partition.ties`); quantized outputs may differ by one step, because a value
may lie on either side of a tie. Results computed from quantized values may differ by what one step makes. NaN equals NaN.

Floating-point outputs pass if all elements are close to eager's. Otherwise the region is run in a wider dtype: float32 for half types, float64
for float32. Outputs pass if their root mean square error against the wider run is not much larger than eager's own error, by the rule of
`torch._dynamo.utils.same`, which PyTorch's benchmarks use. For large outputs the limit is relative to the output's size.

A wider run takes more memory than eager's. So only the outputs in question are computed, weights are widened layer by layer, and the weights of
products block by block. If the wider run would still take `BESIDE_EAGER_BYTES` more than eager's run, the root mean square difference from
eager decides.

If the device has too little memory for the comparison, the host compares. If the host has too little memory too, the outputs are not verified:
the refusal then says OUT_OF_MEMORY, not ACCURACY.
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
from torch_hybrid_backend.partition.ties import differs_at_ties
from torch_hybrid_backend.sizes.size import size_hint
from torch_hybrid_backend.torch_private import tree_map

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An element is close where |result - eager's| <= absolute + relative * |eager's|."""

    relative: float
    absolute: float


_ROOT_MEAN_SQUARE = 1e-4  # the default of `same`: every result may be off by a tenth of it
# Where eager has NaN, the result may differ from the wider run by this: `same` again.
_BETTER_THAN_NAN = 4e-2
# Relative to a float32 output's own root mean square: sums of 4,096 terms, added one by one, are off by half of it.
_RELATIVE_ROOT_MEAN_SQUARE = 4e-6
# Relative error allowed for products with rounded rows, by the bits of a row, without a wider run. A product is off by 3e-5 (16 bits) or 5e-3
# (8 bits) of itself. With 16 bits it is off by 8e-4 if a row of 4,096 has a single large element. Errors grow from layer to layer.
_OF_ROUNDED_ROWS: Mapping[int, float] = {16: 1e-3, 8: 0.02}
# Limits relative to a run with rounded rows: times its root mean square error, and times its largest error.
_TIMES_ROUNDED = 2, 4
NUDGE = (
    4e-6  # of the largest value: kernels' sums of a thousand products in float32 differ from eager's by a tenth of that
)
# float32: the default of `same`. Kernels sum in another order than eager; torch.testing's 1.3e-6 is for one rounding. float64 has the tolerance
# of float32, as there is no wider dtype to compare it in. The half types have torch.testing's tolerances: one and two units in the last place.
# A smaller tolerance would never pass, and each region would need a wider run.
TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-4, 1e-4),
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(1e-3, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5),
    # One unit in the last place: equal values may be rounded in different directions.
    torch.float8_e4m3fn: Tolerance(0.125, 2**-9),
    torch.float8_e5m2: Tolerance(0.25, 2**-16),
}
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_HALF = frozenset({torch.float16, torch.bfloat16})
# The dtypes that are widened for a run in the given dtype.
_NARROWER: Mapping[torch.dtype, frozenset[torch.dtype]] = {
    torch.float32: _HALF,
    torch.float64: _HALF | {torch.float32},
}
# Operators that copy elements out of a value; views do so too.
_TAKE_ELEMENTS = frozenset(
    {
        torch.ops.aten.embedding.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_select.default,
    }
)
# Memory that a wider run may take at once beyond eager's run.
BESIDE_EAGER_BYTES = 64 << 20
# Without a wider run: the relative error allowed against eager. It allows for a few dozen layers with two or three roundings each.
_WITHOUT_WIDER: Mapping[torch.dtype, float] = {torch.float16: 2.5e-3, torch.bfloat16: 0.02}
_FLOAT32_WITHOUT_WIDER = 2e-5
# Elements of a weight that are widened at once for a product: 8 MiB in float64.
_WEIGHT_ELEMENTS = 1 << 20
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    `why`: the reason why outputs do not pass; "" if they pass. `code`: ACCURACY if outputs differ, OUT_OF_MEMORY if they could not be
    compared for want of memory. `max_error`: the largest absolute difference of any compared element. `relative_error`: root mean square of
    the failing output's differences over that of eager's values; None if the output's values are not the reason.
    `note`: which comparison was left out for outputs that pass; "" for most.
    """

    why: str
    max_error: float
    code: Reason = Reason.ACCURACY
    relative_error: float | None = None
    note: str = ""

    @property
    def refused(self) -> Refused | None:
        """The refusal that a failed comparison stands for; None if the outputs pass."""
        return Refused(self.code, self.why) if self.why else None


@torch.no_grad()
def compare(
    region: Region,
    inputs: Sequence[object],
    expected: Sequence[object],
    actual: Sequence[object],
    replay: Replay | None = None,
) -> Comparison:
    """Compare an engine's outputs (`actual`) with eager's (`expected`), both computed from `inputs`.

    `replay`: made both runs draw the same numbers, if the region draws random numbers. The wider run costs a third run of the region, and
    happens only if elements are not close.
    """
    if why := _forms(region, expected, actual):
        return Comparison(why, 0.0)
    if replay is not None and not replay.agrees:
        return Comparison("it draws more or fewer numbers from the random number generator than eager", 0.0)
    rewind = replay.rewind if replay is not None else _nothing
    try:
        return _compare(region, inputs, expected, actual, rewind)
    except failures(RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: the error, which holds the computed tensors, is released by now.
    if not all(_is_on_host(value) for value in (*inputs, *expected)):
        _log.info("region %s is compared on the host: its device has too little memory for that", region.name)
        try:
            return _compare(region, _on_host(inputs), _on_host(expected), _on_host(actual), rewind, on_host=True)
        except failures(RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    why = "there is too little memory to compare its outputs with eager's and with a run in a wider dtype: they are not verified"
    return Comparison(why, 0.0, Reason.OUT_OF_MEMORY)


def difference(expected: Sequence[object], actual: Sequence[object]) -> str:
    """Description of the first output of two runs that differs by more than its dtype's tolerance; "" if none does."""
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
    """Description of the first output that differs in kind, dtype, shape, device, strides or, if no tensor, in value; "" if none does."""
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
    checked_graph = module if not far or draws_numbers(module) else _returning(module, far)
    no_run = [None] * len(expected)

    @functools.cache
    def fits(dtype: torch.dtype) -> bool:
        """True if a wider run takes little more host memory than eager's run (`BESIDE_EAGER_BYTES`); always true on another device."""
        on_device = not on_host and not all(map(_is_on_host, expected))
        return on_device or _peak_bytes(checked_graph, dtype) <= BESIDE_EAGER_BYTES + _peak_bytes(module, None)

    @functools.cache
    def ideal(dtype: torch.dtype) -> Sequence[object]:
        rewind()
        return reference_run(checked_graph, inputs, dtype, on_host=on_host) or no_run

    @functools.cache
    def nudged() -> list[Sequence[object]]:
        """Outputs of two wider runs: one with all quantized values a little larger, one a little smaller. Empty if nothing is quantized."""
        if not any(is_quantizing(node.target) for node in module.graph.nodes) or not fits(torch.float64):
            return []
        runs = []
        for nudge in (NUDGE, -NUDGE):
            rewind()
            runs.append(reference_run(checked_graph, inputs, torch.float64, on_host=on_host, nudge=nudge))
        return [run for run in runs if run is not None]

    @functools.cache
    def rounded(dtype: torch.dtype) -> Sequence[object]:
        """Outputs of a run in `dtype` with rows rounded as kernels may round them."""
        rewind()
        return reference_run(checked_graph, inputs, dtype, on_host=on_host, rounds_rows=True) or no_run

    def is_rounded(position: int, reference: torch.Tensor, result: torch.Tensor) -> bool:
        """True if a result is off as one of rounded rows is: from the wider run, or from eager's where that run does not fit."""
        if fits(torch.float64):
            return _is_off_as(result, ideal(torch.float64)[position], rounded(torch.float64)[position])
        return fits(torch.float32) and _is_off_as(result, reference, rounded(torch.float32)[position])

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
            or is_rounded(position, reference, result)
        ):
            continue
        wider = _wider(reference.dtype, module, on_host=on_host or _is_on_host(reference))
        if wider is not None and not fits(wider):
            if _relative_error(reference, result) <= _WITHOUT_WIDER.get(reference.dtype, _FLOAT32_WITHOUT_WIDER):
                note = f"compared with eager's results alone: a run in {str(wider).removeprefix('torch.')} takes too much memory"
                continue
        elif wider is not None and _near(reference, result, ideal(wider)[position]):
            continue
        has_wider_run = wider is not None or is_quantized(outputs[position])
        nudged_results = [run[position] for run in nudged()] if has_wider_run else []
        if not nudged_results or not _near_ties(result, ideal(torch.float64)[position], nudged_results):
            if not reference.is_floating_point() and not on_host:
                rewind()
                if differs_at_ties(checked_graph, inputs, result, reference, position):
                    continue
            what = f"{TensorSpec.of(reference).dtype}, shape {tuple(reference.shape)}"
            why = f"output {position} ({what}) differs from eager's by up to {error:.3g}"
            return Comparison(why, worst, relative_error=_relative_error(reference, result))
    return Comparison("", worst, note=note)


def _returning(module: torch.fx.GraphModule, positions: Collection[int]) -> torch.fx.GraphModule:
    """The graph reduced to what the outputs at these positions need; it returns None in place of the other outputs."""
    graph = torch.fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    assert isinstance(outputs, list | tuple)  # regions return several
    graph.output(tuple(output if position in positions else None for position, output in enumerate(outputs)))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(module, graph, "Checked")


def _peak_bytes(module: torch.fx.GraphModule, dtype: torch.dtype | None) -> int:
    """Peak bytes of a run of the graph, by the sizes it was traced with: values that it computes, and inputs while they are widened to
    `dtype`."""
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
    """The node that allocated a value's memory. For an item of several results: the node that returned them all."""
    root = storage_root(node)
    return _maker(root.all_input_nodes[0]) if is_item(root) else root


def _bytes_in(value: object, dtype: torch.dtype | None) -> int:
    """Bytes of the tensors, counting those of narrower dtypes as widened to `dtype`."""
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
    """The dtype of the wider run with which an output of `dtype` is compared; None if the output must be exact.

    Half types are compared in float32; in float64 if PyTorch's settings let float32 products be rounded (TF32, bfloat16).
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
    # The strides of the graph's metadata are legal too: later segments were built for them.
    legal = [reference.stride()] + ([spec.strides] if spec is not None else [])
    if reference.numel() and not any(_same_strides(reference.shape, result.stride(), strides) for strides in legal):
        return f"has strides {result.stride()}, eager's {reference.stride()}"
    return ""


def _same_strides(shape: Sequence[int], a: Sequence[object], b: Sequence[object]) -> bool:
    """True if the strides address the same elements. Strides of dimensions of size 1 do not matter."""
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def _allclose(reference: torch.Tensor, result: torch.Tensor) -> bool:
    if not reference.dtype.is_floating_point and not reference.dtype.is_complex:
        return torch.equal(reference, result)
    tolerance = TOLERANCES.get(reference.dtype, TOLERANCES[torch.float32])  # complex numbers, say
    pairs = (map(_comparable, pair) for pair in blocks(reference, result))
    return all(torch.allclose(a, b, tolerance.relative, tolerance.absolute, equal_nan=True) for a, b in pairs)


def _near(reference: torch.Tensor, result: torch.Tensor, ideal: object) -> bool:
    """True if the result's root mean square error against `ideal`, the wider run's output, is about that of eager's, as
    `torch._dynamo.utils.same` decides."""
    if not isinstance(ideal, torch.Tensor):
        return False
    squares = torch.zeros(3, dtype=torch.float64)  # sums of squares: eager's errors, the result's errors, the ideal
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
    # The absolute limit above is next to nothing for outputs in the hundreds. There float32 sums of thousands of terms differ by more if their
    # order differs, and eager's order may happen to be a very good one.
    compared_in = torch.float32 if result.dtype in _FLOAT8 else result.dtype
    return compared_in == torch.float32 and bool(error <= _RELATIVE_ROOT_MEAN_SQUARE * size)


def _is_near_rounded(reference: torch.Tensor, result: torch.Tensor, error: float, allowed: float) -> bool:
    """True if rounded rows may have caused the difference: its relative error is `allowed` at most, and no element stands out.
    `error`: the largest difference."""
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
    """True if the result's root mean square error is about as large as rounding ties the other way makes it, as the `nudged` runs show.

    With few quantized values it is chance whether eager and the kernel round a tie as the wider run does. Later values then differ by a whole
    step. Eager's own error does not show how much that is.
    """
    if not isinstance(ideal, torch.Tensor):
        return False

    def error(values: object) -> float:
        assert isinstance(values, torch.Tensor)
        return math.sqrt(mean_square(torch.sub, values, ideal))

    return error(result) <= _ROOT_MEAN_SQUARE / 10 + 2 * max(map(error, nudged))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; float8 tensors, which PyTorch does not compare, in float32."""
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

    Random operators draw in the dtype that they were traced in, as the drawn numbers depend on the dtype. on_host: constants and device
    arguments are moved to the host, where the inputs are. nudge: values are changed before they are quantized, by this share of the tensor's
    largest value. rounds_rows: rows of products that carry the mark are rounded (`core.precision.ROW_BITS`).

    None if the region cannot be run so: an operator reinterprets bits or does not take the dtype, or the host would have to draw the random
    numbers of another device. Other errors of operators, such as want of memory, are raised.
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
    """Bits to which the rows of this product may be rounded; 32 if they may not be rounded."""
    bits: int = node.meta.get(ROW_BITS, 32)
    return bits


def _rounded_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows, (..., K), as kernels may round them: to integers of `bits` bits, scaled by the largest value of each group."""
    k, size = rows.shape[-1], ROW_GROUPS[bits]
    padded = torch.nn.functional.pad(rows, (0, -k % size))
    groups = padded.reshape(*padded.shape[:-1], -1, size)
    step = groups.abs().amax(-1, keepdim=True) / (127 << (bits - 8))
    rounded = torch.where(step > 0, (groups / step).round() * step, groups)
    return rounded.flatten(-2)[..., :k]


class _Widened(TracedRun):
    """Runs a graph with every narrower floating-point value and dtype argument replaced by `dtype`, on the host if need be.

    A value is widened only while an operator computes with it, so at any time one layer's parameters are wide. Operators that only take
    elements out of a value run before the elements are widened: a few rows of a large table, say.
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
        # Operators on quantized tensors take and return float32 only: the wider run continues from their float32 result.
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
            traced_arguments: tuple[Any, dict[str, Any]] = torch.fx.node.map_arg((n.args, n.kwargs), self._as_traced)
            return traced_arguments
        if self._rounds_rows and n.target in PRODUCTS and (bits := _row_bits(n)) in ROW_GROUPS:
            rows = PRODUCTS[n.target] - 1
            args = (*args[:rows], _rounded_rows(args[rows], bits), *args[rows + 1 :])
        weight = PRODUCTS.get(n.target, -1)  # `_product` widens the weight, block by block
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
            part = [
                arg.narrow(-1, start, count) if isinstance(arg, torch.Tensor) and arg.shape[-1:] == (columns,) else arg
                for arg in args
            ]
            part[place - 1], part[place] = rows, self.widen(weight.narrow(dimension, start, count))
            result.narrow(-1, start, count).copy_(super().call_function(target, tuple(part), kwargs))
        return result

    def _as_traced(self, n: torch.fx.Node) -> Any:
        """A value in the dtype that it was traced in."""
        value, traced = self.env[n], n.meta.get("val")
        return value.to(traced.dtype) if isinstance(traced, torch.Tensor) else value
