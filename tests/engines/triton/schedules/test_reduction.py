"""Row programs: persistent and looped, every combiner, and what lies between reductions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines.triton.regions_for_tests import HOPPER, check, compiled, kernels_of
from torch_hybrid_backend.engines.triton.emit import emit_kernel
from torch_hybrid_backend.engines.triton.target import Target

pytest.importorskip("triton")

_FUNCTIONS = {
    "sum": lambda x: x.sum(-1),
    "mean of columns": lambda x: x.mean(0),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "prod": lambda x: x.prod(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x > -2).all(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "var": lambda x: x.var(-1),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("shape", [(5, 1), (6, 37), (3, 64), (1, 300)])
def test_persistent(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """A whole row at once."""
    torch.manual_seed(0)
    check(tmp_path, _FUNCTIONS[name], 0.5 + torch.randn(shape))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_looped(name: str, tmp_path: Path) -> None:
    """In chunks, the last of which is not full."""
    torch.manual_seed(0)
    shape = (8201, 3) if name == "mean of columns" else (3, 8201)
    x = 1 + 1e-4 * torch.randn(shape) if name == "prod" else 0.5 + torch.randn(shape)
    check(tmp_path, _FUNCTIONS[name], x, tolerance=5e-4 if name == "prod" else 2e-5)


@pytest.mark.parametrize("where", [0, 20, 36])
def test_nan_is_the_most_extreme(where: int, tmp_path: Path) -> None:
    """NaN is the most extreme as the result, and as the first position of it."""
    x = torch.randn(4, 37)
    x[2, where] = x[2, 36] = float("nan")
    x[1] = float("-inf")
    for name in ("amax", "amin", "argmax", "argmin"):
        check(tmp_path, _FUNCTIONS[name], x)


def test_rows_are_shared_among_multiprocessors(tmp_path: Path) -> None:
    """A program has one row of few, of many, several."""
    for rows, expected in ((8, 1), (64, 8), (4096, 16)):
        region, _ = compiled(tmp_path, lambda x: x.sum(-1), torch.randn(rows, 64))
        (kernel,) = region.kernels.kernels
        assert emit_kernel(kernel, "kernel", HOPPER).launch.constants["ROWS"] == expected


@pytest.mark.parametrize("name", ["sum", "argmax", "var", "softmax", "log_softmax"])
@pytest.mark.parametrize(
    "shape",
    [(300, 130), pytest.param((37, 70), marks=pytest.mark.full), pytest.param((3, 300, 33), marks=pytest.mark.full)],
)
def test_columns(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Rows that are columns of memory: whole, where that saves a reading, and in chunks."""
    torch.manual_seed(0)
    check(tmp_path, lambda x: _FUNCTIONS[name](x.transpose(-1, -2)), 0.5 + torch.randn(shape))


def test_positions_are_the_tensor_s_own_where_memory_is_in_another_order(tmp_path: Path) -> None:
    """The first of the tensor's equal elements counts, in parts of it, too."""
    x = torch.randint(0, 4, (5, 7, 90)).float().permute(2, 1, 0)
    check(tmp_path, lambda x: x.flatten(1).argmax(1), x)
    check(tmp_path, lambda x: x.argmax(), torch.randint(0, 50, (40, 30, 50)).float().permute(2, 1, 0))


def test_tiles_follow_memory() -> None:
    """Whole cache lines of columns, two of them where there are enough; chunks of rows. What needs a second pass is held, where it fits."""
    target = Target(90, 132)

    def tile(function: Callable[[torch.Tensor], torch.Tensor], *shape: int, dtype: torch.dtype) -> tuple[int, int]:
        (kernel,) = kernels_of(function, torch.empty(shape, dtype=dtype), target=target)
        constants = emit_kernel(kernel, "kernel", target).launch.constants
        return constants["ROWS"], constants["COLUMNS"]

    assert tile(lambda x: x.sum(1), 256, 4000, 768, dtype=torch.float32) == (64, 64)
    assert tile(lambda x: x.sum(1), 8, 4000, 768, dtype=torch.float32) == (32, 128)
    assert tile(lambda x: x.sum(1), 8, 4000, 768, dtype=torch.bfloat16) == (64, 64)
    assert tile(lambda x: x.softmax(1), 8, 300, 768, dtype=torch.float32) == (32, 512)
    assert tile(lambda x: x.var(1), 8, 300, 768, dtype=torch.float32) == (32, 128)
    assert tile(lambda x: x.sum(1), 4096, 100_000, dtype=torch.float32) == (1, 2048)
    assert tile(lambda x: x.sum(1), 4096, 1000, dtype=torch.float32) == (1, 1024)
