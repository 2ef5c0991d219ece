"""The table of operators: every distinct operator and shape in the zoo's models, full size, with its count in each.

    python -m benchmarks.operators.shapes                 traces all models, batch 1 and 8; writes benchmarks/operators/shapes.json

A model is captured and goes through the passes as in a compilation, so the table holds what engines are given: batch norms are folded,
what parameters alone decide is a constant.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx

from benchmarks.models import ZOO, Size
from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.core.captured import CapturedGraph
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.loops import lowering
from torch_hybrid_backend.passes.context import PassContext
from torch_hybrid_backend.passes.hoist import hoist
from torch_hybrid_backend.passes.inline_subgraphs import inline_subgraphs
from torch_hybrid_backend.passes.pipeline import run_passes

TABLE = Path(__file__).with_name("shapes.json")

# Operator -> kind, by the part of its name before the overload. Convolutions are told apart by their groups.
_KINDS = {
    "addmm": "linear",
    "mm": "linear",
    "linear": "linear",
    "bmm": "bmm",
    "baddbmm": "bmm",
    "scaled_dot_product_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_attention_math": "attention",
    "layer_norm": "norm",
    "native_layer_norm": "norm",
    "native_group_norm": "norm",
    "group_norm": "norm",
    "rms_norm": "norm",
    "_fused_rms_norm": "norm",
    "_native_batch_norm_legit_no_training": "norm",
    "softmax": "softmax",
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "max_pool2d": "pool",
    "max_pool2d_with_indices": "pool",
    "avg_pool2d": "pool",
    "adaptive_avg_pool2d": "pool",
    "_adaptive_avg_pool2d": "pool",
    "upsample_bilinear2d": "pool",
    "embedding": "embedding",
    "index": "embedding",
    "gather": "embedding",
    "clone": "transpose",
    "copy": "transpose",
    "cat": "transpose",
    "constant_pad_nd": "transpose",
}
_REDUCTIONS = (
    "mean",
    "sum",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "cumsum",
    "var",
    "var_mean",
    "any",
    "all",
)
# A view in all but its promise to autograd: no peer moves anything.
_VIEW = "aten._unsafe_view.default"
# Elementwise operators on less are part of a fused kernel, or cost a call and no work.
_MIN_BYTES = 64 << 10
KINDS = (
    "conv",
    "grouped",
    "depthwise",
    "linear",
    "bmm",
    "attention",
    "norm",
    "softmax",
    "pool",
    "reduction",
    "embedding",
    "transpose",
    "elementwise",
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument. `strides` are empty for a contiguous one; `constant`: a parameter, or computed from parameters alone."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] = ()
    constant: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def make(self, generator: torch.Generator, below: int = 2) -> torch.Tensor:
        """Random contents: floats near 1 in size, other numbers from 0 to `below` - 1."""
        dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            dense = torch.randn(self.shape, generator=generator).to(dtype)
        else:
            dense = torch.randint(0, below, self.shape, generator=generator).to(dtype)
        if not self.strides:
            return dense
        # Where elements share memory, what lies there is random, not what each of them would be.
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) if dense.numel() else 0
        if 0 in self.strides:
            return dense.flatten()[:span].clone().as_strided(self.shape, self.strides)
        return dense.new_zeros(span).as_strided(self.shape, self.strides).copy_(dense)


@dataclass(frozen=True, slots=True)
class Case:
    """An operator on one set of shapes. `arguments` are the ATen operator's: tensors, numbers, lists of either; `keywords` likewise.

    `counts`: model -> how often it runs in one call, at `batch` samples.
    """

    kind: str
    op: str
    batch: int
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    counts: tuple[tuple[str, int], ...]

    @property
    def target(self) -> torch._ops.OpOverload:
        namespace, name, overload = self.op.split(".")
        found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments, in order."""
        leaves = torch.utils._pytree.tree_leaves((self.arguments, dict(self.keywords)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def title(self) -> str:
        """The operator and its shapes, short."""
        shapes = " ".join("x".join(map(str, t.shape)) or "scalar" for t in self.tensors)
        leaves = torch.utils._pytree.tree_leaves(self.arguments)
        numbers = [a for a in leaves if isinstance(a, int | float) and not isinstance(a, bool)]
        if self.kind in ("conv", "grouped", "depthwise"):
            x, w = self.tensors[:2]
            stride, groups = self.arguments[3], self.arguments[8]
            kernel = "x".join(map(str, w.shape[2:]))
            extra = (f" s{stride[0]}" if stride[0] > 1 else "") + (f" g{groups}" if groups > 1 else "")
            return f"{'x'.join(map(str, x.shape))} -> {w.shape[0]} k{kernel}{extra}"
        return f"{self.op.split('.')[1]} {shapes} {' '.join(map(str, numbers))}".strip()


def load(path: Path = TABLE) -> list[Case]:
    """The committed table."""
    return [_decode(row) for row in json.loads(path.read_text())]


def _encode_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        found: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype}
        if value.strides:
            found["strides"] = value.strides
        return found | ({"constant": True} if value.constant else {})
    return [_encode_value(item) for item in value] if isinstance(value, tuple) else value


def _decode_value(value: Any) -> Any:
    if isinstance(value, dict):
        shape, strides = tuple(value["shape"]), tuple(value.get("strides", ()))
        return Tensor(shape, value["dtype"], strides, value.get("constant", False))
    return tuple(map(_decode_value, value)) if isinstance(value, list) else value


def _encode(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": case.kind, "op": case.op, "batch": case.batch, "counts": dict(case.counts)}
    row["arguments"] = _encode_value(case.arguments)
    return row | ({"keywords": {k: _encode_value(v) for k, v in case.keywords}} if case.keywords else {})


def _decode(row: Mapping[str, Any]) -> Case:
    keywords = tuple((k, _decode_value(v)) for k, v in row.get("keywords", {}).items())
    arguments = _decode_value(row["arguments"])
    return Case(row["kind"], row["op"], row["batch"], arguments, keywords, tuple(row["counts"].items()))


class _Unlisted(Exception):
    """An argument that the table has no form for: a symbolic size, a memory format."""


def _argument(value: Any) -> Any:
    match value:
        case torch.fx.Node():
            fake = value.meta.get("val")
            if isinstance(fake, torch.Tensor) and all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
                strides = () if fake.is_contiguous() else tuple(fake.stride())
                dtype = str(fake.dtype).removeprefix("torch.")
                return Tensor(tuple(fake.shape), dtype, strides, bool(value.meta.get("constant")))
        case None | bool() | int() | float():
            return value
        case list() | tuple():
            return tuple(map(_argument, value))
    raise _Unlisted


def _kind(name: str, arguments: Sequence[Any]) -> str:
    if name == "convolution":
        weight, groups = arguments[1], arguments[8]
        return "conv" if groups == 1 else "depthwise" if weight.shape[1] == 1 else "grouped"
    return _KINDS.get(name) or ("reduction" if name in _REDUCTIONS else "elementwise")


def graph_cases(graph: torch.fx.Graph, model: str, batch: int) -> list[Case]:
    """The operators of a captured graph that compute something, one entry each time they occur."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
            continue
        if not lowering.supports(node):
            continue
        try:
            arguments = tuple(map(_argument, node.args))
            skipped = ("memory_format", "layout", "device", "pin_memory", "dtype")
            keywords = tuple((k, _argument(v)) for k, v in node.kwargs.items() if k not in skipped)
        except _Unlisted:
            continue
        if not any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(arguments)):
            continue
        name = str(node.target)
        if name == _VIEW:
            continue
        case = Case(_kind(name.split(".")[1], arguments), name, batch, arguments, keywords, ((model, 1),))
        if case.kind != "elementwise" or max(tensor.size_bytes for tensor in case.tensors) >= _MIN_BYTES:
            found.append(case)
    return found


def trace(model: str, batch: int, built: torch.nn.Module, size: Size = "full") -> list[Case]:
    """Every operator of a model of the zoo (`built` is it), as often as it occurs."""
    entry = ZOO[model]
    found: list[Case] = []

    def listed(captured: CapturedGraph) -> Any:
        gm = captured.graph_module
        inline_subgraphs(gm)
        run_passes(gm, PassContext.of(captured))
        found.extend(graph_cases(hoist(gm, captured.static_inputs).main.graph, model, batch))
        return lambda inputs: gm(*inputs)

    keep = frozenset(lowering.table())
    torch._dynamo.reset()
    compiled = torch.compile(built, backend=lambda gm, inputs: capture(gm, inputs, listed, keep), dynamic=False)
    with torch.no_grad():
        compiled(*entry.inputs(size, batch))
    return found


def merged(cases: Sequence[Case]) -> list[Case]:
    """Equal cases as one, counts added; kinds in the order of `KINDS`, then as found."""
    counts: dict[tuple[Any, ...], dict[str, int]] = {}
    for case in cases:
        key = (case.kind, case.op, case.batch, case.arguments, case.keywords)
        own = counts.setdefault(key, {})
        for model, count in case.counts:
            own[model] = own.get(model, 0) + count
    listed = [
        Case(kind, op, batch, arguments, keywords, tuple(own.items()))
        for (kind, op, batch, arguments, keywords), own in counts.items()
    ]
    return sorted(listed, key=lambda case: KINDS.index(case.kind))


def main(argv: Sequence[str] | None = None) -> int:
    """Trace and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators.shapes", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    cases: list[Case] = []
    for model in arguments.models:
        built = ZOO[model].build("full")
        for batch in arguments.batch:
            cases += trace(model, batch, built)
            print(f"{model}, batch {batch}: {len(cases)} operators so far", file=sys.stderr)
    rows = (json.dumps(_encode(case), separators=(",", ":")) for case in merged(cases))
    arguments.out.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
