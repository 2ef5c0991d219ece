"""A check for all lowerings: trace, lower, interpret, compare with eager."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from loops.interpret import run_graph, trace
from torch_hybrid_backend.loops.policy import COMMON, Abilities

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
NUMBERS = (*FLOATS, torch.int64)
EVERYTHING = (*FLOATS, *INTEGERS, torch.bool)

# Half types: eager rounds after every step, the loops language only when it stores.
_TOLERANCE = {
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (4e-3, 4e-3),
    torch.float32: (2e-5, 1e-5),
    torch.float64: (1e-9, 1e-10),
}


def sample(
    *shape: int, dtype: torch.dtype = torch.float32, low: float = -3, high: float = 3, seed: int = 0
) -> torch.Tensor:
    """Random numbers in low .. high; for integers both ends occur, for bool both values."""
    generator = torch.Generator().manual_seed(seed + math.prod(shape) + len(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        low = max(low, torch.iinfo(dtype).min)
        return torch.randint(int(low), int(high) + 1, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).to(dtype)


def with_specials(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with NaN, infinities and both zeros in its first places."""
    flat = tensor.flatten().clone()
    specials = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=tensor.dtype)
    flat[: min(5, flat.numel())] = specials[: flat.numel()]
    return flat.reshape(tensor.shape)


def check(fn: Callable[..., object], *inputs: torch.Tensor, abilities: Abilities = COMMON) -> None:
    """`fn(*inputs)`, lowered for kernels of such abilities and interpreted, equals eager's: values, dtypes and shapes."""
    results = fn(*inputs)
    expected = list(results) if isinstance(results, (tuple, list)) else [results]
    actual = run_graph(trace(fn, inputs), inputs, abilities)
    assert len(actual) == len(expected)
    narrow = [t.dtype for t in inputs if t.dtype in (torch.bfloat16, torch.float16)]
    for got, want in zip(actual, expected, strict=True):
        rtol, atol = _TOLERANCE.get(narrow[0] if narrow and want.dtype.is_floating_point else want.dtype, (0, 0))
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
