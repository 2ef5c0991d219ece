"""Constants made of the same tensors are made once for all who keep it, and never of tensors that changed."""

from __future__ import annotations

import functools
import gc
import platform
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from torch_hybrid_backend.runtime import constant_pool
from torch_hybrid_backend.runtime.constant_pool import ConstantPool, shared, shared_meanwhile
from torch_hybrid_backend.runtime.native.ops import give_back_freed_memory


class Doubling:
    """Makes twice a tensor, and counts."""

    def __init__(self, source: torch.Tensor, *, lasting: bool = False) -> None:
        self.source = source
        self.lasting = lasting
        self.made = 0

    def __call__(self) -> torch.Tensor:
        [doubled] = shared("doubled", [self.source.detach()], self._make, lasting=self.lasting)
        return doubled

    def _make(self) -> list[torch.Tensor]:
        self.made += 1
        return [self.source.detach() * 2]


def test_it_is_shared_while_it_is_kept() -> None:
    """The same tensor comes back, in other threads too; when nobody has it any more it is made anew."""
    double = Doubling(torch.randn(5))
    kept = double()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(double()))
    thread.start()
    thread.join()
    assert found[0] is kept
    assert double.made == 1
    del kept
    found.clear()
    double()
    assert double.made == 2


def _halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor / 2]


def test_nothing_is_left_of_what_died() -> None:
    """Neither of tensors whose parameters died, nor of those that nobody keeps."""
    entries, names = constant_pool._SHARED._entries, constant_pool._SHARED._names
    before = len(entries), len(names)
    double = Doubling(torch.randn(5), lasting=True)
    doubled = double()
    kept = shared("halved", [doubled], functools.partial(_halves, doubled.clone()))
    assert (len(entries), len(names)) == (before[0] + 2, before[1] + 2)
    del double, doubled, kept
    assert (len(entries), len(names)) == before


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda source: source.add_(1),
    "data in place": lambda source: source.data.mul_(3),
    "other data": lambda source: setattr(source, "data", torch.randn(5)),
    "other strides": lambda source: setattr(source, "data", torch.as_strided(source.data, (5,), (0,))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_tensors_are_not_the_same(change: Callable[[torch.Tensor], object]) -> None:
    """A constant made of a tensor before it changed is not used for it afterwards; what was made since is."""
    double = Doubling(torch.randn(5))
    before = double()
    change(double.source)
    after = double()
    torch.testing.assert_close(after, double.source * 2, rtol=0, atol=0)
    assert double() is after
    assert before is not after
    assert double.made == 2


def test_the_address_of_a_dead_tensor_is_no_match() -> None:
    """A tensor at the address of one that died is another tensor, though what was made of that lives."""
    kept = []
    for middle in (1.0, 2.0):
        source = torch.zeros(1001)
        source[3] = middle
        [made] = shared("doubled", [source], lambda source=source: [source * 2])  # type: ignore[misc]
        kept.append(made)
        del source
    assert [float(made[3]) for made in kept] == [2.0, 4.0]


def test_what_is_made_of_what_was_made_is_known_by_its_parameters() -> None:
    """A folded weight that nobody keeps is folded again, and what another plan packed of it is found; of a changed weight nothing is."""
    double, packs = Doubling(torch.randn(5), lasting=True), []

    def packed() -> torch.Tensor:
        doubled = double()
        [made] = shared("packed", [doubled], lambda: packs.append(1) or [doubled + 1])  # type: ignore[func-returns-value]
        return made

    first = packed()
    assert packed() is first
    assert (double.made, len(packs)) == (2, 1)
    double.source.mul_(-1)
    torch.testing.assert_close(packed(), double.source * 2 + 1, rtol=0, atol=0)
    assert len(packs) == 2


def test_forgotten_storages_are_made_anew() -> None:
    """After `refresh`, whatever tells of changes."""
    double = Doubling(torch.randn(5))
    before = double()
    constant_pool.forget({double.source.untyped_storage()._cdata})
    assert double() is not before


@pytest.mark.parametrize("lasting", [False, True])
def test_letting_go(lasting: bool) -> None:
    """In a block all is held, then only what lasts, or what somebody keeps; at the end of the block nothing is held."""
    double = Doubling(torch.randn(5), lasting=lasting)
    with ConstantPool() as once:
        double()
        kept = double()
        assert double.made == 1
        once.release_unused()
        assert double() is kept
        once.release_unused()
        reference = weakref.ref(kept)
        del kept
        assert (reference() is not None) is lasting
        double()
    assert double.made == (1 if lasting else 2)
    assert reference() is None


def test_an_interrupt_at_the_end_leaves_nothing() -> None:
    """Nothing is held once nobody refers to it, where the block's end never ran."""
    double = Doubling(torch.randn(5))
    once = ConstantPool()
    once.__enter__()
    reference = weakref.ref(double())
    assert reference() is not None
    del once
    gc.collect()
    assert reference() is None


def test_what_has_effects_is_shared_inside_a_block_only() -> None:
    """Elsewhere it is made each time."""
    source, made = torch.randn(5), []

    def make() -> list[torch.Tensor]:
        made.append(1)
        return [source * 2]

    with ConstantPool():
        assert shared_meanwhile("doubled", [source], make)[0] is shared_meanwhile("doubled", [source], make)[0]
    kept = shared_meanwhile("doubled", [source], make)
    assert shared_meanwhile("doubled", [source], make)[0] is not kept[0]
    assert len(made) == 3


def test_inference_tensors_have_no_versions() -> None:
    """Inference tensors are told apart by what they hold."""
    with torch.inference_mode():
        double = Doubling(torch.randn(5))
        before = double()
        assert double() is before
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
