"""What is made of the same tensors is made once, while that is asked for, and never of tensors that changed."""

from __future__ import annotations

import gc
import platform
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from torch_hybrid_backend.runtime.constant_pool import ConstantPool, pooled
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory


class Doubling:
    """Makes twice a tensor, and counts."""

    def __init__(self, source: torch.Tensor, *, lasting: bool = False) -> None:
        self.source = source
        self.lasting = lasting
        self.made = 0

    def __call__(self) -> torch.Tensor:
        [doubled] = pooled("doubled", [self.source.detach()], self._make, lasting=self.lasting)
        return doubled

    def _make(self) -> list[torch.Tensor]:
        self.made += 1
        return [self.source.detach() * 2]


def test_it_is_shared_inside_only() -> None:
    """Inside the block the same tensor comes back; outside of it, and in a block of its own, everyone gets a new one."""
    double = Doubling(torch.randn(5))
    with ConstantPool():
        assert double() is double()
        with ConstantPool():
            double()
    double()
    assert double.made == 3


def test_other_threads_do_not_share() -> None:
    """A block is its thread's own: another thread may change parameters at any time."""
    double = Doubling(torch.randn(5))
    with ConstantPool():
        double()
        thread = threading.Thread(target=double)
        thread.start()
        thread.join()
    assert double.made == 2


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda source: source.add_(1),
    "data in place": lambda source: source.data.mul_(3),
    "other data": lambda source: setattr(source, "data", torch.randn(5)),
    "other strides": lambda source: setattr(source, "data", torch.as_strided(source.data, (5,), (0,))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_tensors_are_not_the_same(change: Callable[[torch.Tensor], object]) -> None:
    """What was made of a tensor before it changed is not used for it afterwards."""
    double = Doubling(torch.randn(5))
    with ConstantPool():
        double()
        change(double.source)
        torch.testing.assert_close(double(), double.source * 2, rtol=0, atol=0)
    assert double.made == 2


def test_the_address_of_a_dead_tensor_is_no_match() -> None:
    """A tensor at the address of one that died, with equal samples, is still another tensor."""
    results = []
    with ConstantPool():
        for middle in (1.0, 2.0):
            source = torch.zeros(1001)
            source[3] = middle  # no element that is sampled
            [made] = pooled("doubled", [source], lambda source=source: [source * 2])  # type: ignore[misc]
            results.append(float(made[3]))
            del source
    assert results == [2.0, 4.0]


@pytest.mark.parametrize("lasting", [False, True])
def test_letting_go(lasting: bool) -> None:
    """Afterwards only what lasts, or what somebody keeps, is there to share; at the end of the block nothing is held."""
    double = Doubling(torch.randn(5), lasting=lasting)
    with ConstantPool() as once:
        kept = double()
        once.release_unused()
        assert double() is kept
        reference = weakref.ref(kept)
        del kept
        gc.collect()
        assert (reference() is not None) is lasting
        double()
    gc.collect()
    assert double.made == (1 if lasting else 2)
    assert reference() is None


def test_an_interrupt_at_the_end_leaves_nothing() -> None:
    """Where the block's end never ran, nothing is shared or held once nobody refers to it."""
    double = Doubling(torch.randn(5))
    once = ConstantPool()
    once.__enter__()
    reference = weakref.ref(double())
    assert reference() is not None
    del once
    gc.collect()
    assert reference() is None
    assert double() is not double()
    with ConstantPool():
        assert double() is double()
    assert double.made == 4


def test_inference_tensors_have_no_versions() -> None:
    """They are told apart by what they hold."""
    with torch.inference_mode():
        double = Doubling(torch.randn(5))
        with ConstantPool():
            assert double() is double()
            double.source.mul_(3)
            torch.testing.assert_close(double(), double.source * 2, rtol=0, atol=0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_freed_memory_is_given_back() -> None:
    """Blocks below the threshold for mappings of their own, freed under one that is still in use, leave the process."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("other C libraries keep no freed memory, or cannot be asked to give it back")
    size = 64 << 10  # a small block is never a mapping of its own
    blocks = [torch.ones(size // 4) for _ in range(1024)]
    last = torch.ones(size // 4)
    full = _resident_bytes()
    del blocks
    give_back_freed_memory()
    assert full - _resident_bytes() > 32 << 20
    assert last.sum() == size // 4
