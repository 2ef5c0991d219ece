"""Numbers that PyTorch's kernels on NVIDIA GPUs draw, element by element in plain Python; and a generator of that kind for the CPU.

Written from the paper (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and from PyTorch 2.13's
aten/src/ATen/native/cuda/DistributionTemplates.h and Dropout.cu as loops over their blocks and threads: nothing is shared with the package.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from torch_hybrid_backend import generators

_WORD = (1 << 32) - 1
BLOCK = 256
Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32 with 10 rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


class PhiloxGenerator:
    """Stands for a GPU's generator: a seed and an offset, which counts numbers."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed = seed
        self.offset = offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset

    def get_state(self) -> torch.Tensor:
        """Both, as 16 bytes."""
        return torch.tensor([*struct.pack("<QQ", self.seed, self.offset)], dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.seed, self.offset = struct.unpack("<QQ", bytes(state.tolist()))

    @property
    def state(self) -> tuple[int, int]:
        return self.seed, self.offset

    @state.setter
    def state(self, state: tuple[int, int]) -> None:
        self.seed, self.offset = state

    def install(self, monkeypatch: pytest.MonkeyPatch) -> PhiloxGenerator:
        """Draw from it on every device."""
        monkeypatch.setattr(generators, "default_generator", lambda device: self)
        return self


class EagerOnGpu:
    """Eager's operators on a GPU whose random kernels have `blocks` blocks at most: NumPy arrays, flat in the order of memory."""

    def __init__(self, generator: PhiloxGenerator, blocks: int) -> None:
        self._generator = generator
        self._blocks = blocks

    def _threads(self, numel: int) -> int:
        return BLOCK * min(self._blocks, -(-numel // BLOCK))

    def _take(self, numel: int, unroll: int) -> Callable[[int], Iterator[Words]]:
        """The groups of each thread from here on; the generator advances as `calc_execution_policy` says."""
        seed, offset = self._generator.state
        self._generator.set_offset(offset + 4 * ((numel - 1) // (self._threads(numel) * unroll) + 1))
        key = (seed & _WORD, seed >> 32)

        def of(thread: int) -> Iterator[Words]:
            at = offset // 4
            while True:
                yield philox((at & _WORD, at >> 32, thread & _WORD, thread >> 32), key)
                at += 1

        return of

    def _grid_stride(self, numel: int, unroll: int, made: Callable[[Words], list[float]]) -> np.ndarray:
        """`distribution_elementwise_grid_stride_kernel`."""
        threads, groups = self._threads(numel), self._take(numel, unroll)
        result = np.empty(numel)
        for thread in range(threads):
            words = groups(thread)
            for begin in range(thread, numel, threads * unroll):
                numbers = made(next(words))
                for i in range(unroll):
                    if begin + threads * i < numel:
                        result[begin + threads * i] = numbers[i]
        return result

    def uniform(self, numel: int, dtype: str = "float32") -> np.ndarray:
        """In (0, 1], before any conversion; `curand_uniform4` or `curand_uniform2_double`."""
        if dtype == "float64":
            return self._grid_stride(numel, 2, _uniform2_double)
        return self._grid_stride(numel, 4, lambda words: [_uniform(word) for word in words])

    def normal(self, numel: int) -> np.ndarray:
        """`curand_normal4`, with exact functions where cuRAND's are approximate."""
        return self._grid_stride(numel, 4, _normal4)

    def kept(self, numel: int, p: float, vector: int) -> np.ndarray:
        """The mask of `native_dropout`: `fused_dropout_kernel_vec`, or `fused_dropout_kernel` for a vector of 1."""
        keep = np.float32(1.0 - p)
        if vector == 1:
            return self._grid_stride(numel, 4, lambda words: [_uniform(word) for word in words]) < keep
        threads, groups = self._threads(numel), self._take(numel, 4)
        result = np.empty(numel, bool)
        for thread in range(threads):
            words = groups(thread)
            for begin in range(thread * vector, numel, threads * vector):
                numbers = [_uniform(word) for _ in range(-(-vector // 4)) for word in next(words)]
                result[begin : begin + vector] = [np.float32(number) < keep for number in numbers[:vector]]
        return result


def _uniform(word: int) -> float:
    return float(np.float32(np.float32(word) * np.float32(2.0**-32)) + np.float32(2.0**-33))


def _uniform2_double(words: Words) -> list[float]:
    return [(x ^ (y << 21)) * 2.0**-53 + 2.0**-54 for x, y in (words[:2], words[2:])]


def _normal4(words: Words) -> list[float]:
    result = []
    for x, y in (words[:2], words[2:]):
        distance = math.sqrt(-2.0 * math.log(_uniform(x)))
        angle = (y + 0.5) * 2.0**-32 * 2 * math.pi
        result += [distance * math.sin(angle), distance * math.cos(angle)]
    return result
