"""Rows written in C++: the values that `index_copy_` writes, counted as a change, or an error before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_hybrid_backend.runtime.native import row_writes
from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.runtime.native.row_writes import write_rows


def _expected(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    at: list[Any] = [slice(None)] * target.dim()
    wanted = target.clone()
    for i, position in enumerate(index.tolist()):
        at[dim] = position
        wanted[tuple(at)] = source.select(dim - target.dim(), i)
    return wanted


@pytest.mark.parametrize("in_cpp", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_rows_are_those_of_the_source(dtype: torch.dtype, in_cpp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tensors of any strides, dimension and dtype in one call; positions count from the end too, and the last of equal ones stays."""
    if not in_cpp:
        monkeypatch.setattr(row_writes, "native_module", lambda: None)
        if dtype is torch.float8_e4m3fn:
            pytest.skip("index_copy_ does not know this dtype")

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape).to(torch.float32).to(dtype)

    index, one = torch.tensor([5, -1, 0]), torch.tensor([9, 3])[1:]
    cases = [
        (some(1, 4, 8, 6), 2, index, some(1, 4, 3, 6)),
        (some(2, 8, 4, 6).transpose(1, 2), 2, one, some(2, 4, 6, 1).transpose(2, 3)),
        (some(8, 3, 2)[:, ::2], 0, index, some(3, 2, 2)),
        (some(1, 1, 8), 2, index[::2], some(2)),
        (some(8), 0, one, some(1)),
        (some(3, 7, 5), 1, one, some(3, 1, 1).expand(3, 1, 5)),
    ]
    wanted = [_expected(*case) for case in cases]
    versions = [target._version for target, *_ in cases]
    tensors = [tensor for target, _, index, source in cases for tensor in (target, index, source)]
    write_rows(tensors, [(3 * n, dim, 3 * n + 1, 3 * n + 2) for n, (_, dim, *_) in enumerate(cases)])
    for (target, *_), expected, version in zip(cases, wanted, versions, strict=True):
        assert torch.equal(
            target.float() if dtype is torch.float8_e4m3fn else target,
            expected.to(target.dtype) if dtype is not torch.float8_e4m3fn else expected.float(),
        )
        assert target._version > version


def test_nothing_is_written_beyond_a_tensor() -> None:
    """A position that one target lacks is an error, as in eager, before the other one is written to."""
    first, second = torch.zeros(4, 2), torch.zeros(3, 2)
    for position in (3, -4):
        with pytest.raises(IndexError, match="out of bounds"):
            write_rows([first, second, torch.tensor([position]), torch.ones(1, 2)], [(0, 0, 2, 3), (1, 0, 2, 3)])
    if native_module() is not None:
        assert first.sum() == 0
    assert second.sum() == 0


def test_other_tensors_go_to_pytorch() -> None:
    """Subclasses, empty tensors and sources that are broadcast are left to the operator."""

    class Labelled(torch.Tensor):
        """A subclass that overrides nothing."""

    target = torch.zeros(4, 2).as_subclass(Labelled)
    write_rows([target, torch.tensor([1]), torch.ones(1, 2)], [(0, 0, 1, 2)])
    assert target.sum() == 2
    write_rows([torch.zeros(4, 0), torch.tensor([1]), torch.ones(1, 0)], [(0, 0, 1, 2)])
    write_rows([target, torch.tensor([], dtype=torch.int64), torch.ones(0, 2)], [(0, 0, 1, 2)])
    assert target.sum() == 2
    with pytest.raises((IndexError, RuntimeError)):
        write_rows([torch.zeros(4, 2), torch.tensor([1]), torch.ones(1, 3)], [(0, 0, 1, 2)])
