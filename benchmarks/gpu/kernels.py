"""The kernel table: one operation each, large enough that caches hold none of it, and what it has to do at least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`shapes` of float inputs, (published, small); `rows`: how many rows of the first one are picked, for a gather.

    `flops`: of the shapes, where arithmetic decides; None where memory does: then what is read and written once is counted.
    """

    kind: str
    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[Shape, ...], tuple[Shape, ...]]
    flops: Callable[[Sequence[Shape]], float] | None = None
    rows: tuple[int, int] | None = None

    def inputs(self, size: str, dtype: torch.dtype, device: str) -> Tensors:
        """Standard normal numbers, the same for one size, dtype and device."""
        small = int(size == "small")
        torch.manual_seed(0)
        floats = tuple(torch.randn(shape, device=device).to(dtype) for shape in self.shapes[small])
        if self.rows is None:
            return floats
        return (*floats, torch.randint(floats[0].shape[0], (self.rows[small],), device=device))

    def work(self, inputs: Tensors, result: torch.Tensor) -> tuple[float, float]:
        """(floating-point operations, bytes) of a call: one of them is 0, that of the limit which is not this kernel's."""
        if self.flops is not None:
            return self.flops([tuple(t.shape) for t in inputs]), 0.0
        made = result.numel() * result.element_size()
        if self.rows is not None:  # of the table, only the rows that are asked for
            return 0.0, float(2 * made + inputs[-1].numel() * inputs[-1].element_size())
        return 0.0, float(made + sum(t.numel() * t.element_size() for t in inputs))


def _product(shapes: Sequence[Shape]) -> float:
    (m, k), (n, _) = shapes[:2]
    return 2.0 * m * k * n


def _causal(shapes: Sequence[Shape]) -> float:
    b, h, s, d = shapes[0]
    return 4.0 * b * h * s * s * d / 2


def _rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = (x + residual).float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


_PLANE = (1 << 16, 2048), (64, 128)  # 256 MiB in a half type: over four times the second-level cache of any GPU so far
_LONG = (4096, 1 << 16), (4, 3000)
_VECTOR = (2048,), (128,)


def _several(*shapes: tuple[Shape, Shape]) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    return tuple(full for full, _ in shapes), tuple(small for _, small in shapes)


CASES: tuple[KernelCase, ...] = (
    KernelCase(
        "pointwise", "gelu_mul_add", lambda x, y, z: functional.gelu(x) * y + z, _several(_PLANE, _PLANE, _PLANE)
    ),
    KernelCase("pointwise", "bias_silu", lambda x, b: functional.silu(x + b), _several(_PLANE, _VECTOR)),
    KernelCase(
        "norms",
        "layer_norm",
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b),
        _several(_PLANE, _VECTOR, _VECTOR),
    ),
    KernelCase("norms", "add_rms_norm", _rms_norm, _several(_PLANE, _PLANE, _VECTOR)),
    KernelCase("softmax", "softmax", lambda x: torch.softmax(x, -1), _several(_PLANE)),
    KernelCase("softmax", "log_softmax_long", lambda x: torch.log_softmax(x, -1), _several(_LONG)),
    KernelCase("reductions", "sum_of_rows", lambda x: x.float().sum(-1), _several(_PLANE)),
    KernelCase("reductions", "sum_of_columns", lambda x: x.float().sum(0), _several(_PLANE)),
    KernelCase("reductions", "mean_of_all", lambda x: x.float().square().mean(), _several(_PLANE)),
    KernelCase(
        "transposition",
        "transposed_add",
        lambda x, y: x.t() + y,
        _several(((16384, 16384), (96, 80)), ((16384, 16384), (80, 96))),
    ),
    KernelCase(
        "gather",
        "embedding",
        lambda t, i: functional.embedding(i, t),
        _several(((1 << 18, 2048), (500, 64))),
        rows=(1 << 16, 300),
    ),
    KernelCase(
        "matmul",
        "square",
        lambda a, b: a @ b.t(),
        _several(((8192, 8192), (64, 96)), ((8192, 8192), (80, 96))),
        _product,
    ),
    KernelCase(
        "matmul",
        "linear_gelu",
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        _several(((4096, 4096), (64, 96)), ((16384, 4096), (80, 96)), ((16384,), (80,))),
        _product,
    ),
    KernelCase("gemv", "one_row", functional.linear, _several(((1, 16384), (1, 256)), ((16384, 16384), (192, 256)))),
    KernelCase(
        "attention",
        "causal",
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        _several(*[((4, 32, 4096, 128), (1, 2, 48, 16))] * 3),
        _causal,
    ),
)
KINDS: tuple[str, ...] = tuple(dict.fromkeys(case.kind for case in CASES))


def share(
    flops: float, size_bytes: float, microseconds: float, ceilings: dict[str, float], dtype: str
) -> dict[str, float]:
    """The rate that a kernel reaches ("gbytes" per second, or "tflops"), and its share of the measured ceiling where that is known."""
    if flops:
        reached = {"tflops": flops / microseconds / 1e6}
        ceiling = ceilings.get(f"matmul_{dtype}_tflops")
        found = reached["tflops"]
    else:
        reached = {"gbytes": size_bytes / microseconds / 1e3}
        ceiling = ceilings.get("copy_gbytes")
        found = reached["gbytes"]
    if ceiling:
        reached["share"] = found / ceiling
    return {name: round(value, 4 if math.isclose(value, 0, abs_tol=10) else 1) for name, value in reached.items()}
