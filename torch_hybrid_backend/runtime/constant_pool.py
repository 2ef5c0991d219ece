"""Tensors that plans make of parameters, made once for all plans of the process that read the same in the same form.

    module at batch 8:  pack(weight, panels of 32) ----+
                                                       +--> one tensor, as long as one of the plans keeps it
    module at batch 9:  pack(weight, panels of 32) ----+

A plan that makes something of parameters, or of what was made of them, asks here with a name for the way it is made. It gets what another plan
has, where that is still kept and its parameters have not changed since. Nothing here keeps what was made, nor parameters, alive.

The first call runs a region as every variant of its kernels, then as the winner, then in the plan of the whole graph, one after the other:
inside `with ConstantPool():` what this thread makes or finds is kept between them.

    with ConstantPool() as once:
        ...                 # plans are built and called
        once.release_unused()       # from here on the plans that still live keep what they read, nothing else does
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from operator import attrgetter
from types import TracebackType
from typing import Any

import torch

from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.runtime.native.ops import Guard, GuardKind

# By weak reference: where an interrupt keeps `__exit__` from its work, sharing ends with the one who shared.
_active: ContextVar[weakref.ref[ConstantPool] | None] = ContextVar("torch_hybrid_backend_constant_pool", default=None)

Make = Callable[[], list[torch.Tensor]]

_version = attrgetter("_version")
_NO_VERSION = -1


def versions_of(tensors: Sequence[Any]) -> tuple[object, ...]:
    """The tensors' version counters. For one that counts none, on the CPU a constant, as a guard compares its contents; elsewhere what equals
    nothing, not even itself: what is made of it is made anew each time."""
    try:
        return tuple(map(_version, tensors))
    except failures(RuntimeError):  # inference tensors count no versions
        return tuple(_without_version(tensor) if tensor.is_inference() else tensor._version for tensor in tensors)


def _without_version(tensor: torch.Tensor) -> object:
    return _NO_VERSION if tensor.device.type == "cpu" else object()


class ConstantPool:
    """Keeps what is made of parameters by the thread that is inside, for its next plan. Others do not see it."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self._lasting: dict[int, torch.Tensor] = {}
        self._token: Token[weakref.ref[ConstantPool] | None] | None = None

    def __enter__(self) -> ConstantPool:
        self._token = _active.set(weakref.ref(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _active.reset(self._token)
        self._held.clear()
        self._lasting.clear()

    def hold(self, made: Sequence[torch.Tensor], *, lasting: bool) -> None:
        """Keep these: to the end of the block where they are `lasting`, else until `release_unused`."""
        (self._lasting if lasting else self._held).update((id(tensor), tensor) for tensor in made)

    def release_unused(self) -> None:
        """Let go of all that was made but is not `lasting`: it lives on only as long as something else keeps it."""
        self._held.clear()


def shared(how: Hashable, sources: Sequence[torch.Tensor], make: Make, *, lasting: bool = False) -> list[torch.Tensor]:
    """Tensors that `make()` returns, or returned before for equal `how` and the same `sources`, unchanged since, as far as it is still kept.

    Inside `with ConstantPool()` it is kept: see `ConstantPool.hold`. `lasting`: what is made of it in turn is shared even where it was not kept
    itself meanwhile, but made again.
    """
    made = _SHARED.get(how, sources, make, lasting=lasting)
    if (pool := _pool()) is not None:
        pool.hold(made, lasting=lasting)
    return made


def shared_meanwhile(how: Hashable, sources: Sequence[torch.Tensor], make: Make) -> list[torch.Tensor]:
    """Tensors as of `shared` inside `with ConstantPool()`, `make()` elsewhere: for what has effects beside the tensors that it returns."""
    return make() if _pool() is None else shared(how, sources, make)


def release_unused() -> None:
    """`ConstantPool.release_unused` of the block that this thread is in, if it is in one."""
    if (pool := _pool()) is not None:
        pool.release_unused()


def forget(storages: AbstractSet[int]) -> None:
    """Stop sharing what was made of tensors in these storages, by `_cdata`."""
    _SHARED.forget(storages)


def _pool() -> ConstantPool | None:
    reference = _active.get()
    return None if reference is None else reference()


# Where a tensor's elements lie, and how: address, dtype, sizes, strides, lazy bits.
_Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], LazyBits]
_Storage = weakref.ref[torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class _Made:
    """Names a tensor by what it was made of: the `number`-th that was made at that `time`. It is the same when it is made again because nobody
    kept it, and another when its parameters have changed."""

    time: object
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """Tensors that were made, where somebody keeps them. `storages`, `versions` and `guard` are of the sources that are parameters; `time`
    names this making."""

    storages: tuple[_Storage, ...]
    versions: tuple[object, ...]
    guard: Guard | None
    time: object
    made: tuple[weakref.ref[torch.Tensor], ...]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True if these, at the same addresses as its own, are its own, and unchanged."""
        same = all(map(_is_alive, self.storages, parameters))
        return same and self.versions == versions_of(parameters) and not (self.guard and self.guard.is_stale())


class _Shared:
    """The one of this process. Threads may ask at once."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._names: dict[_Place, tuple[_Storage, _Made]] = {}  # of what was made and lives
        # Re-entrant: a tensor may die, and call what removes it, while this thread holds it.
        self._lock = ForkLock()

    def get(
        self, how: Hashable, sources: Sequence[torch.Tensor], make: Make, *, lasting: bool = False
    ) -> list[torch.Tensor]:
        """See `shared`. What is `lasting` has its name as long as its parameters live; other entries go with what was made."""
        named = [(self._name(source), source) for source in sources]
        key = (how, *(_place(source) if name is None else name for name, source in named))
        parameters = [source for name, source in named if name is None]
        entry = self._entries.get(key)
        kept: list[torch.Tensor | None] = []
        if entry is not None and entry.is_of(parameters):
            kept = [reference() for reference in entry.made]
            found = [tensor for tensor in kept if tensor is not None]
            if len(found) == len(kept):
                return found
        else:  # before making: a change meanwhile must be seen
            storages = tuple(self._watched(source.untyped_storage(), key) for source in parameters)
            guard = Guard(parameters, GuardKind.EVERY_BYTE) if parameters else None
            entry = _Entry(storages, versions_of(parameters), guard, object(), ())
        made = make()
        if kept:
            made = [new if old is None else old for old, new in zip(kept, made, strict=True)]
        on_death = None if lasting and parameters else _Forget(weakref.ref(self), key)
        references = tuple(weakref.ref(tensor, on_death) for tensor in made)
        of_sources = {source.untyped_storage()._cdata for source in sources}
        with self._lock:
            self._entries[key] = replace(entry, made=references)
            for number, tensor in enumerate(made):
                if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in of_sources:
                    place = _place(tensor)
                    self._names[place] = (self._watched(tensor.untyped_storage(), place), _Made(entry.time, number))
        return made

    def forget(self, storages: AbstractSet[int]) -> None:
        with self._lock:
            for key, entry in list(self._entries.items()):
                alive = (storage() for storage in entry.storages)
                if any(storage is not None and storage._cdata in storages for storage in alive):
                    del self._entries[key]

    def drop(self, key: Hashable, died: weakref.ref[Any]) -> None:
        """Remove what is kept under `key` on account of what died."""
        with self._lock:
            entry, name = self._entries.get(key), self._names.get(key)  # type: ignore[call-overload]
            # By identity: the same addresses may meanwhile belong to others.
            if entry is not None and any(died is each for each in (*entry.storages, *entry.made)):
                del self._entries[key]
            if name is not None and name[0] is died:
                del self._names[key]  # type: ignore[arg-type]

    def _name(self, tensor: torch.Tensor) -> _Made | None:
        """Entry of a tensor that was made here; None of a parameter."""
        if tensor.layout is not torch.strided:
            return None
        found = self._names.get(_place(tensor))
        return found[1] if found is not None and _is_alive(found[0], tensor) else None

    def _watched(self, storage: torch.UntypedStorage, key: Hashable) -> _Storage:
        return weakref.ref(storage, _Forget(weakref.ref(self), key))


@dataclass(frozen=True, slots=True, eq=False)
class _Forget:
    """Called with the weak reference of what died."""

    shared: weakref.ref[_Shared]
    key: Hashable

    def __call__(self, died: weakref.ref[Any]) -> None:
        shared = self.shared()
        if shared is not None:
            shared.drop(self.key, died)


def _is_alive(storage: _Storage, tensor: torch.Tensor) -> bool:
    """True if this is the tensor's storage, and no dead one whose address it has."""
    alive = storage()
    return alive is not None and alive._cdata == tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> _Place:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), LazyBits.of(tensor)


_SHARED = _Shared()
