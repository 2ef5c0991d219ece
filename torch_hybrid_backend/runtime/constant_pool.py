"""What plans make of parameters, made once while several plans are tried on the same ones.

The first call runs a region as every variant of its kernels, then as the winner, then in the plan of the whole graph: each packs the
region's weights. Inside `with ConstantPool():` this thread packs and folds what is the same only once, and all of them share it:

    with ConstantPool() as once:
        ...                 # plans are built and called
        once.release_unused()       # from here on the plans that still live keep what they read, nothing else does

Outside of it every plan makes its own, when its parameters change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType

import torch

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.runtime.native.ops import Guard, GuardKind

# By weak reference: where an interrupt keeps `__exit__` from its work, sharing ends with the one who shared.
_active: ContextVar[weakref.ref[ConstantPool] | None] = ContextVar("torch_hybrid_backend_constant_pool", default=None)

Make = Callable[[], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """`sources` are kept alive: another tensor at the address of one that died is not the same tensor."""

    sources: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    guard: Guard
    made: tuple[weakref.ref[torch.Tensor], ...]


class ConstantPool:
    """Shares what is made of the same tensors in the same way. One thread at a time; others do not see it."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._held: list[torch.Tensor] = []
        self._lasting: list[torch.Tensor] = []
        self._token: Token[weakref.ref[ConstantPool] | None] | None = None

    def __enter__(self) -> ConstantPool:
        self._token = _active.set(weakref.ref(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _active.reset(self._token)
        self._entries.clear()
        self._held.clear()
        self._lasting.clear()

    def release_unused(self) -> None:
        """What was made, but for what is `lasting`, lives from now on only as long as something else keeps it."""
        self._held.clear()

    def get(
        self, how: Hashable, sources: Sequence[torch.Tensor], make: Make, *, lasting: bool = False
    ) -> list[torch.Tensor]:
        """What `make()` returns, or returned before for equal `how` and the same `sources`, unchanged since."""
        found = self._entries.get(how)
        if found is not None and _same(found, sources) and not found.guard.is_stale():
            made = [tensor for tensor in (reference() for reference in found.made) if tensor is not None]
            if len(made) == len(found.made):
                return made
        versions, guard = (
            _versions(sources),
            Guard(sources, GuardKind.EVERY_BYTE),
        )  # before making: a change meanwhile must be seen
        made = make()
        self._entries[how] = _Entry(tuple(sources), versions, guard, tuple(weakref.ref(tensor) for tensor in made))
        (self._lasting if lasting else self._held).extend(made)
        return made


def pooled(how: Hashable, sources: Sequence[torch.Tensor], make: Make, *, lasting: bool = False) -> list[torch.Tensor]:
    """`make()`, shared inside `with ConstantPool()`: see `ConstantPool.get`. `lasting`: kept until its end."""
    reference = _active.get()
    active = reference() if reference is not None else None
    return make() if active is None else active.get(how, sources, make, lasting=lasting)


def release_unused() -> None:
    """`ConstantPool.release_unused` of the block that this thread is in, if it is in one."""
    reference = _active.get()
    active = reference() if reference is not None else None
    if active is not None:
        active.release_unused()


def _same(entry: _Entry, sources: Sequence[torch.Tensor]) -> bool:
    return len(entry.sources) == len(sources) and all(
        (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())
        and LazyBits.of(a).are_of(b)
        and version == now
        for a, b, version, now in zip(entry.sources, sources, entry.versions, _versions(sources), strict=True)
    )


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
