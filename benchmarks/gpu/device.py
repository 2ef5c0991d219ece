"""The device that is measured: a GPU, or the CPU where the benchmark itself is tried."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.machine import fingerprint
from torch_hybrid_backend.measuring.measure import Call, Timing, measure

_MIB = 1 << 20
_LEAST_ROUND_NS = 5_000_000
_MOST_CALLS = 1000
DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
# The root mean square of a result's errors over that of the result. Eager's own, if larger, times three.
_TOLERANCES = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "tf32": 4e-3}
_OF_EAGER = 3.0


def allow(dtype: str) -> torch.dtype:
    """The torch dtype of one of `DTYPES`; float32 products are rounded to TF32 from now on where it is "tf32"."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    return DTYPES[dtype]


def wait(device: str) -> None:
    """Until all work is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def describe(device: str) -> dict[str, object]:
    """The properties that decide times on the device."""
    if device != "cuda":
        return {"device": device}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // _MIB,
        "l2_mib": properties.L2_cache_size // _MIB,
        "fingerprint": fingerprint(Device("cuda", 0)),
    }


class LoopTimer:
    """A round of a call is as many of it, one after the other, as take milliseconds, and one wait: a call costs what the slower of host and
    device takes, as it does in a loop of a program's."""

    now = staticmethod(time.perf_counter_ns)

    def __init__(self, device: str) -> None:
        self._device = device
        self._counts: dict[Call, int] = {}

    def round(self, calls: Sequence[Call]) -> list[int]:
        return [self._taken(call) for call in calls]

    def _taken(self, call: Call) -> int:
        count = self._counts.get(call, 1)
        wait(self._device)
        start = self.now()
        for _ in range(count):
            call()
        wait(self._device)
        nanoseconds = (self.now() - start) // count
        self._counts[call] = max(1, min(_MOST_CALLS, _LEAST_ROUND_NS // max(nanoseconds, 1)))
        return nanoseconds


def time_calls(calls: Sequence[Call], budget_s: float, device: str) -> tuple[Timing, ...]:
    """The calls in interleaved rounds, for about `budget_s` seconds."""
    return measure(calls, budget_s, warmup_rounds=2, timer=LoopTimer(device))


def allocated_mib(device: str) -> float:
    """The memory that PyTorch's allocator holds for tensors now, and from now on its peak is counted anew; 0 on the CPU, where it counts
    nothing."""
    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / _MIB


def peak_mib(device: str) -> float:
    """The most that it held since `allocated_mib`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() / _MIB if device == "cuda" else 0.0


def outside_mib(device: str) -> float:
    """The device's memory in use beside what PyTorch's allocator holds: engines, kernels, libraries; 0 on the CPU."""
    if device != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / _MIB


def leaves(value: Any) -> list[torch.Tensor]:
    """Copies of the tensors of a result: the next call may overwrite them (CUDA graphs do)."""
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def mistake(
    expected: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], result: Sequence[torch.Tensor], dtype: str
) -> str:
    """The fault of a result, or "". expected: eager's; exact: in a wider dtype, or the same."""
    if [(t.shape, t.dtype) for t in expected] != [(t.shape, t.dtype) for t in result]:
        return f"wrong answer: {_shown(result)}, eager's are {_shown(expected)}"
    for number, (own, wide, got) in enumerate(zip(expected, exact, result, strict=True)):
        if not own.is_floating_point():
            if not torch.equal(own, got):
                return f"wrong answer: output {number} differs from eager's"
            continue
        eager_error, error = _error(own, wide), _error(got, wide)
        if not error <= max(_TOLERANCES[dtype], _OF_EAGER * eager_error):
            return f"wrong answer: output {number} is off by {error:.2g} of its size, eager's by {eager_error:.2g}"
    return ""


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN where they are finite at different places."""
    value, exact = value.double(), exact.double()
    finite = exact.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return float("nan")
    size = exact[finite].square().mean().sqrt()
    error = (value[finite] - exact[finite]).square().mean().sqrt()
    return (error / size.clamp(min=1e-30)).item() if finite.any() else 0.0


def _shown(values: Sequence[torch.Tensor]) -> list[str]:
    return [f"{value.dtype} {tuple(value.shape)}" for value in values]
