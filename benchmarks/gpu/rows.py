"""The rows of the benchmark, in the order in which they are measured: what tells most comes first, for time may run out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu import kernels, models, tensorrt

_FIRST = ("eager", "inductor", "hybrid")
_AUTOTUNED = ("eager", "inductor max-autotune", "hybrid max-autotune")


@dataclass(frozen=True, slots=True)
class Row:
    """`part`: "rooflines", "tests", "overhead", "tensorrt", "kernels" or "models"; `case`: a kind of kernels, or a model. `limit_s`: of its
    process; one whose time is shorter than `least_s` is not begun."""

    part: str
    case: str = ""
    dtype: str = ""
    batch: int = 1
    peers: tuple[str, ...] = ()
    limit_s: float = 90.0
    least_s: float = 15.0

    @property
    def name(self) -> str:
        """The name that `--rows` picks by: "models/resnet50/bf16/8/max-autotune"."""
        if self.part not in ("kernels", "models"):
            return self.part
        return "/".join(filter(None, (self.part, self.case, self.dtype, str(self.batch), self.mode)))

    @property
    def mode(self) -> str:
        """The mode of `torch.compile`, "" for the default one; "tensorrt" for the rows that compare engines."""
        return "max-autotune" if self.peers == _AUTOTUNED else tensorrt.PART if self.peers == tensorrt.PEERS else ""


def rows() -> tuple[Row, ...]:
    """All of them."""
    return tuple(_rows())


def tensorrt_rows() -> tuple[Row, ...]:
    """Those of `--tensorrt`: whether it runs, then each model that is no training step."""
    return tuple(_tensorrt_rows())


def _tensorrt_rows() -> Iterator[Row]:
    yield Row(tensorrt.PART, limit_s=150.0, least_s=30.0)
    for dtype, batch in (("bf16", 1), ("fp16", 1), ("fp32", 1), ("tf32", 1), ("bf16", 8)):
        for case in models.CASES.values():
            if not case.trains:
                yield Row("models", case.name, dtype, batch, tensorrt.PEERS, limit_s=400.0, least_s=60.0)


def _rows() -> Iterator[Row]:
    yield Row("rooflines", limit_s=60.0)
    yield Row("tests", limit_s=90.0)
    yield Row("overhead", limit_s=60.0)
    for kind in kernels.KINDS:
        yield Row("kernels", kind, "bf16", peers=_FIRST, limit_s=60.0)
    for batch in (1, 8):
        yield from _models("bf16", batch, _FIRST)
    yield from _models("bf16", 1, _AUTOTUNED, limit_s=180.0)
    for dtype in ("fp16", "fp32", "tf32"):
        yield from _models(dtype, 1, _FIRST)
    for kind in kernels.KINDS:
        for dtype in ("fp16", "fp32", "tf32"):
            if dtype != "tf32" or kind == "matmul":
                yield Row("kernels", kind, dtype, peers=_FIRST, limit_s=60.0)
    yield from _models("bf16", 8, _AUTOTUNED, limit_s=180.0)
    yield from _models("bf16", 64, _FIRST)


def _models(dtype: str, batch: int, peers: tuple[str, ...], limit_s: float = 120.0) -> Iterator[Row]:
    for case in models.CASES:
        yield Row("models", case, dtype, batch, peers, limit_s, least_s=30.0)
