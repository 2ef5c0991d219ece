"""The largest error of each scalar function as a Markdown table, measured over the whole range of its dtype.

python -m tools.function_errors docs/numerics.md      # rewrites the table between the two markers of a file; takes about two minutes
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import torch

from tools.generated import replaced, rewrite

START, END = "<!-- function errors:start -->", "<!-- function errors:end -->"
UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid"
).split()
BINARY = "pow atan2 hypot fmod remainder".split()
_EXACT: Mapping[str, Callable[..., Any]] = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "log1p": mpmath.log1p,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "pow": lambda x, y: x**y,
    "fmod": lambda x, y: x - y * mpmath.mpf(int(x / y)),
    "remainder": lambda x, y: x - y * mpmath.floor(x / y),
}


@dataclass(frozen=True)
class Error:
    """The largest error of normal results in units in the last place, with its arguments; that of denormal results in units of the smallest
    one; how many results are infinite or NaN where they should not be, or the other way round."""

    ulps: float
    at: tuple[float, ...]
    denormal: float
    wrong: int


def samples(dtype: torch.dtype, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands: random bits, numbers of common sizes, and pairs of special ones, all of them finite or infinite."""
    generator = torch.Generator().manual_seed(seed)
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]

    def one() -> torch.Tensor:
        limits = torch.iinfo(integer)
        bits = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=torch.int64)
        near = torch.randn(5, count, generator=generator, dtype=torch.float64)
        sizes = near * torch.tensor([1e-3, 1.0, 20.0, 0.01, 0.01])[:, None] + torch.tensor([0, 0, 0, 1, -1])[:, None]
        return torch.cat([bits.to(integer).view(dtype), sizes.flatten().to(dtype)])

    info = torch.finfo(dtype)
    ends = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, math.inf, -math.inf, info.max, info.min, info.tiny, info.tiny / 8, 89.0]
    x, y = (values.flatten() for values in torch.meshgrid(*[torch.tensor(ends, dtype=dtype)] * 2, indexing="ij"))
    first, second = torch.cat([one(), x]), torch.cat([one(), y])
    keep = ~(first.isnan() | second.isnan())
    return first[keep], second[keep]


def errors(dtype: torch.dtype, count: int) -> dict[str, Error]:
    """Largest errors of every function of a dtype, over about six times `count` arguments."""
    os.environ.setdefault("HYBRID_PLACEMENT", "estimate")

    def every(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*(getattr(torch, name)(x) for name in UNARY), *(getattr(torch, name)(x, y) for name in BINARY))

    x, y = samples(dtype, count)
    compiled = torch.compile(every, backend="hybrid", dynamic=False)
    compiled(
        torch.full_like(x, 0.75), torch.full_like(y, 0.5)
    )  # kernels are compared with eager, which overflows earlier
    results = zip((*UNARY, *BINARY), compiled(x, y), strict=True)
    return {name: _error(name, (x, y) if name in BINARY else (x,), result) for name, result in results}


def _error(name: str, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> Error:
    info = torch.finfo(result.dtype)
    digits = 23 if result.dtype == torch.float32 else 52
    own = getattr(torch, name)
    if result.dtype == torch.float32:
        exact = own(*(each.double() for each in inputs))
        nearest, off = exact.float(), (result.double() - exact).abs()
    else:
        # With steps in memory eager takes its kernels for single numbers: the remainders of those for vectors are NaN for large quotients.
        nearest = own(*(each.repeat_interleave(2)[::2] for each in inputs))
        rows = zip(*(each.tolist() for each in (*inputs, result)), strict=True)
        off = torch.tensor([_distance(name, *row) for row in rows], dtype=torch.float64)
    is_number = result.isfinite() & nearest.isfinite()
    agree = is_number | (result == nearest) | (result.isnan() & nearest.isnan())
    # At the edge of the range rounding decides.
    at_edge = (result.abs() > 0.999 * info.max) & (nearest.abs() > 0.999 * info.max)
    is_normal = is_number & (nearest.abs() >= info.tiny)
    ulps = torch.where(is_normal, off.double() / 2.0 ** (torch.frexp(nearest)[1].double() - 1 - digits), 0)
    denormal = torch.where(is_number & ~is_normal, off.double() / (info.tiny * info.eps), 0)
    worst = int(ulps.argmax())
    at = tuple(float(each[worst]) for each in inputs)
    return Error(float(ulps[worst]), at, float(denormal.max()), int((~(agree | at_edge)).sum()))


def _distance(name: str, *numbers: float) -> float:
    """|result - exact| of (arguments, result), 0 where one of them is 0 or not finite."""
    *arguments, result = numbers
    if not all(map(math.isfinite, numbers)) or 0 in numbers:
        return 0.0
    # A remainder needs all digits of the quotient.
    with mpmath.workprec(200 + sum(abs(math.frexp(argument)[1]) for argument in arguments)):
        exact = _EXACT.get(name) or getattr(mpmath, name)
        return float(abs(mpmath.mpf(result) - exact(*map(mpmath.mpf, arguments)).real))


def table(count32: int = 400_000, count64: int = 1_000) -> str:
    """A row for each function."""
    single, double = errors(torch.float32, count32), errors(torch.float64, count64)
    lines = ["| function | float32, ulp | at | denormal results | float64, ulp | at |", "|---|---|---|---|---|---|"]
    for name in (*UNARY, *BINARY):
        one, other = single[name], double[name]
        cells = (f"`{name}`", _ulps(one), _shown(one.at), f"{one.denormal:.2g}", _ulps(other), _shown(other.at))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ulps(error: Error) -> str:
    return f"{error.ulps:.2f}" + (f", {error.wrong} infinite or NaN" if error.wrong else "")


def _shown(at: tuple[float, ...]) -> str:
    return ", ".join(f"{number:.6g}" for number in at)


def with_current_table(text: str) -> str:
    """`text` with the table between its markers replaced. Raises ValueError where it has none."""
    replaced(text, START, END, "")  # before the minute that the table takes
    return replaced(text, START, END, table())


if __name__ == "__main__":
    rewrite(sys.argv[1:], with_current_table)
