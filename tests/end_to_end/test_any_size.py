"""Kernels that take sizes as arguments: one compilation is right at every size, 0 and 1 included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from tests.end_to_end.any_size import AnySize
from torch_hybrid_backend.config import Config

# (n, t): below, at and above vectors, register tiles and panels; primes; nothing; one.
SIZES = (
    (3, 7),
    (0, 5),
    (4, 0),
    (1, 1),
    (1, 17),
    (2, 33),
    (7, 16),
    (5, 13),
    (2, 64),
    (3, 100),
    (16, 31),
    (29, 2),
    (43, 15),
)
LONG = ((2, 7), (1, 1), (2, 1100), (1, 1025), (3, 512))


@dataclasses.dataclass(frozen=True)
class Case:
    """`fn` of tensors whose shapes hold "n" and "t" where a size varies. `dtypes` per tensor; "mask" is a boolean tensor."""

    fn: Callable[..., Any]
    shapes: Sequence[tuple[int | str, ...]]
    dtypes: Sequence[str] = ()
    sizes: Sequence[tuple[int, int]] = SIZES
    nonempty: bool = False  # eager refuses empty tensors

    def tensors(self, n: int, t: int, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for i, shape in enumerate(self.shapes):
            size = [{"n": n, "t": t, "2t": 2 * t, "t+1": t + 1}.get(d, d) for d in shape]  # type: ignore[call-overload]
            dtype = self.dtypes[i] if self.dtypes else "float32"
            if dtype == "mask":
                made.append(torch.rand(size, generator=generator) > 0.4)
            elif dtype == "int64":
                made.append(torch.randint(0, 11, size, generator=generator))
            else:
                made.append(torch.randn(size, generator=generator).to(getattr(torch, dtype)))
        return made

    @property
    def dynamic(self) -> list[list[int]]:
        return [[d for d, size in enumerate(shape) if isinstance(size, str)] for shape in self.shapes]


NT, NTC = ("n", "t"), ("n", "t", 24)
QKV = [("n", 3, "t", 20)] * 3
CASES = {
    "contiguous": Case(lambda x, y: (x * y + 1).relu(), [NTC, NTC]),
    "inner axis": Case(lambda x, y: torch.tanh(x) - y, [("n", 5, "t"), (5, 1)]),
    "bias": Case(lambda x, b: F.gelu(x + b), [NTC, (24,)]),
    "broadcast": Case(lambda x, y: x.unsqueeze(1) * y.unsqueeze(0), [("n", 24), ("t", 24)]),
    "transposed": Case(lambda x: x.transpose(1, 2).contiguous() + 1, [NTC]),
    "merged": Case(lambda x: x.reshape(-1, 24) * 2, [NTC]),
    "split heads": Case(lambda x: x.view(x.shape[0], x.shape[1], 4, 6).transpose(1, 2).exp(), [NTC]),
    "flat": Case(lambda x: x.reshape(-1).sin() + 1, [NTC]),
    "cat": Case(lambda x, y: torch.cat([x, y, x * 2], 1), [NTC, ("n", "2t", 24)]),
    "cat batch": Case(lambda x, y: torch.cat([x, y], 0) + 1, [("n", 6), ("t", 6)]),
    "cat columns": Case(lambda x, y: torch.cat([x, y], 1) * 2, [("n", "t"), ("n", "2t")]),
    "stack": Case(lambda x, y: torch.stack([x, y], -1), [NT, NT]),
    "slice": Case(lambda x: x[:, 1:] - x[:, :-1], [("n", "t+1", 24)]),
    "last": Case(lambda x: x[:, -1] * 2, [NTC], nonempty=True),
    "pad": Case(lambda x: F.pad(x, (0, 0, 2, 1)), [NTC]),
    "pad columns": Case(lambda x: F.pad(x, (1, 2, 0, 1)) + 1, [("n", "t")]),
    "flip": Case(lambda x: x.flip(1) + 1, [NTC]),
    "roll": Case(lambda x: x.roll(1, 1) + 1, [NTC], nonempty=True),
    "positions": Case(lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1), [NTC]),
    "causal": Case(
        lambda x: x.masked_fill(torch.ones(x.shape[-1], x.shape[-1]).triu(1).bool(), 0.0), [("n", "t", "t")]
    ),
    "size as number": Case(lambda x: x / x.shape[1] + x.shape[0], [("n", "t+1")]),
    "compared with a size": Case(lambda x: torch.where(x < x.shape[1], x % (x.shape[0] + 1), x - x.shape[1]), [NT]),
    "embedding": Case(lambda w, i: F.embedding(i, w) * 2, [(11, 24), NT], ["float32", "int64"]),
    "gather": Case(lambda x, i: x.gather(1, i), [("n", 11, 4), ("n", "t", 4)], ["float32", "int64"]),
    "index": Case(lambda x, i: x[i], [(11, "t"), ("n",)], ["float32", "int64"]),
    "where": Case(torch.where, [NT, NT, NT], ["mask", "float32", "float32"]),
    "integers": Case(lambda x, y: (x * 3 + y) // 2 % 5, [NT, NT], ["int64", "int64"]),
    "bfloat16": Case(lambda x, y: (x * y).sigmoid(), [NTC, NTC], ["bfloat16", "bfloat16"]),
    "softmax": Case(lambda x: x.softmax(-1), [("n", 3, "t")]),
    "softmax over middle": Case(lambda x: x.softmax(1), [NTC]),
    "log_softmax": Case(lambda x: x.log_softmax(-1), [NT]),
    "layer norm": Case(lambda x, w, b: F.layer_norm(x, (24,), w, b), [NTC, (24,), (24,)]),
    "mean": Case(lambda x: x.mean(1), [NTC]),
    "mean of rows": Case(lambda x: x.mean(-1), [("n", 3, "t")]),
    "sum of all": Case(lambda x: x.sum(), [NTC]),
    "sum over batch": Case(lambda x: x.sum((0, 1)), [NTC]),
    "deviation": Case(lambda x: x.std(1), [("n", "t+1", 24)]),
    "variance": Case(lambda x: torch.var_mean(x, -1), [("n", "t+1")]),
    "maximum": Case(lambda x: x.amax(1), [NTC], nonempty=True),
    "position of maximum": Case(lambda x: x.argmax(-1), [NT], nonempty=True),
    "any": Case(lambda m: m.any(1), [("n", "t", 5)], ["mask"]),
    "product": Case(lambda x: x.prod(-1), [("n", "t")]),
    "linear": Case(F.linear, [NTC, (40, 24), (40,)]),
    "linear gelu": Case(lambda x, w, b: F.gelu(F.linear(x, w, b)) + 1, [NTC, (37, 24), (37,)]),
    "linear residual": Case(lambda x, w: x + F.linear(x, w), [NTC, (24, 24)]),
    "matrix vector": Case(lambda x, v: x @ v, [("n", "t", 70), (70,)]),
    "columns": Case(lambda x, y: x @ y, [(9, 24), (24, "t")]),
    "scores": Case(lambda x, y: x @ y.transpose(1, 2), [("n", "t", 20), ("n", "2t", 20)]),
    "depth": Case(lambda x, y: x @ y, [("n", 19, "t"), ("n", "t", 33)]),
    "gram": Case(lambda x: x.transpose(1, 2) @ x, [("n", "t", 18)]),
    "all": Case(torch.bmm, [("n", "t", "2t"), ("n", "2t", "t+1")]),
    "half matmul": Case(lambda x, w: x @ w, [NTC, (24, 40)], ["bfloat16", "bfloat16"]),
    "attention": Case(F.scaled_dot_product_attention, QKV),
    "attention by parts": Case(lambda q, k, v: (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v, QKV, sizes=SIZES[:8]),
    "causal attention": Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "masked attention": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [*QKV, ("n", 1, "t", "t")]
    ),
    "cross attention": Case(
        F.scaled_dot_product_attention, [("n", 2, "t", 20), ("n", 2, "t+1", 20), ("n", 2, "t+1", 12)]
    ),
    "long attention": Case(F.scaled_dot_product_attention, [("n", 2, "t", 16)] * 3, sizes=LONG),
    "long rows": Case(lambda x: x.softmax(-1) + x.mean(-1, keepdim=True), [("n", "t")], sizes=LONG),
    "convolution": Case(lambda x, w, b: F.relu(F.conv2d(x, w, b, padding=1)), [("n", 5, 9, 9), (18, 5, 3, 3), (18,)]),
    "depthwise": Case(lambda x, w: F.conv2d(x, w, groups=20, stride=2), [("n", 20, 9, 9), (20, 1, 3, 3)]),
    "pointwise": Case(lambda x, w: F.silu(F.conv2d(x, w)), [("n", 20, 7, 7), (33, 20, 1, 1)]),
    "two convolutions": Case(
        lambda x, v, w: F.adaptive_avg_pool2d(F.conv2d(F.conv2d(x, v).relu(), w), 1).flatten(1),
        [("n", 3, 9, 9), (20, 3, 3, 3), (17, 20, 3, 3)],
    ),
    "max pooling": Case(lambda x: F.max_pool2d(x, 3, 2, 1), [("n", 6, 9, 9)]),
    "group norm": Case(lambda x, w, b: F.group_norm(x, 3, w, b), [("n", 6, 5, 5), (6,), (6,)]),
    "batch norm": Case(lambda x, m, v: F.batch_norm(x, m, v.abs() + 1), [("n", 6, 5, 5), (6,), (6,)]),
}


# One of each kind; the others are in `make test-full`.
_ALWAYS = (
    "inner axis", "slice", "compared with a size",
    "cat", "cat columns", "pad columns", "embedding", "softmax", "softmax over middle", "layer norm", "deviation", "position of maximum",
    "linear gelu", "columns", "depth", "masked attention", "two convolutions",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_one_compilation_is_right_at_every_size(name: str, kernel_directory: Path) -> None:
    """The kernels compiled for one pair of sizes agree with eager in float64 at all the others, and no operator is left to eager."""
    case = CASES[name]
    config = Config(cache_dir=kernel_directory, placement="estimate", verify="off", strict=True, engines=("tvm",))
    compiled = AnySize(case.fn, case.tensors(*case.sizes[0]), case.dynamic, config)
    for n, t in case.sizes:
        tensors = case.tensors(n, t, seed=n + t)
        if case.nonempty and any(tensor.numel() == 0 for tensor in tensors):
            continue
        found = compiled(*tensors)
        _check(case.fn, tensors, found, f"n={n}, t={t}")
    plan = compiled.graph.plan
    assert plan is not None
    taken = [node for node in plan.nodes if node.engine == "tvm"]
    left = [node.operator for node in plan.nodes if node.engine != "tvm" and node.operator.startswith("aten")]
    assert taken
    assert not left


def _check(fn: Callable[..., Any], tensors: list[torch.Tensor], found: list[torch.Tensor], where: str) -> None:
    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    eager, exact = _flat(fn(*tensors)), _flat(fn(*map(wide, tensors)))
    assert len(eager) == len(found)
    for reference, ideal, result in zip(eager, exact, found, strict=True):
        assert (result.shape, result.dtype) == (reference.shape, reference.dtype), where
        # Strides of dimensions of size 1 address nothing.
        pairs = zip(result.shape, result.stride(), reference.stride(), strict=True)
        assert result.numel() == 0 or all(a == b for size, a, b in pairs if size != 1), where
        if result.dtype == torch.bfloat16:
            torch.testing.assert_close(result.double(), ideal.double(), rtol=1e-2, atol=1e-2, equal_nan=True, msg=where)
        else:
            torch.testing.assert_close(
                result, ideal.to(result.dtype), rtol=2e-5, atol=2e-5, equal_nan=True, msg=lambda m: f"{where}: {m}"
            )


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple | list) else [result]
