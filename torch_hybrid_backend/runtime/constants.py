"""Constants that stay live: what was made from parameters is made again when they change.

Parameters are recognised by their memory (data pointers), so that one compiled graph serves several instances of a module,
and change is seen three ways, in this order of cost: another data pointer (`p.data = q`), another version counter
(`optimizer.step`, `load_state_dict`, any in-place operator), other contents (`p.data.mul_(2)` and `p.numpy()[0] = 1` bump no
counter; see `native.Guard` and docs/adr/0014-weight-writes-by-userfaultfd.md). Shapes, strides and dtypes are not compared: whoever
compiled the graph guards them.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.lazy_bits import LazyBits, copied
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime import constant_pool
from torch_hybrid_backend.runtime.constant_pool import shared, versions_of
from torch_hybrid_backend.runtime.native.ops import CALLS_PER_ROUND, Guard
from torch_hybrid_backend.runtime.native.tensor_states import snapshot

_log = logging.getLogger(__name__)

T = TypeVar("T")
Fold = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# Unbound and mapped: where there is no snapshot, it runs for every parameter in every call.
_data_ptr = torch.Tensor.data_ptr


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """The items at `positions` as a tuple; itemgetter is the fastest, where there are two of them or more."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if positions:
        [only] = positions
        return lambda inputs: (inputs[only],)
    return lambda inputs: ()


@dataclass(frozen=True, slots=True, eq=False)
class _Entry(Generic[T]):
    guarded: Callable[[Sequence[Any]], tuple[Any, ...]]  # the tensors whose contents matter
    versions: tuple[object, ...]
    guard: Guard
    made: T
    storages: tuple[weakref.ref[torch.UntypedStorage], ...]
    # `versions` and the key, compared in C++ where it can read the tensors.
    is_of: Callable[[Sequence[Any]], bool] | None


class LiveConstants(Generic[T]):
    """Keeps what `make(inputs, guard)` returned for each set of parameters, until they change or die.

    positions: of all constants among a call's inputs. guarded: those of them whose contents matter; of the others only
    the address does (their memory is read anew in every call). copied: of these, given the inputs, the ones that `make` copies all the same,
    so that their contents matter too.
    Threads may share it. It keeps no parameter alive as long as what `make` returns does not.
    """

    def __init__(
        self,
        positions: Sequence[int],
        guarded: Sequence[int],
        make: Callable[[Sequence[Any], Guard], T],
        capacity: int = 64,
        copied: Callable[[Sequence[Any]], Sequence[int]] | None = None,
    ) -> None:
        self._positions, self._guarded = tuple(positions), tuple(guarded)
        self._copied = copied
        self._constants = _picker(positions)
        self._make = make
        self._capacity = capacity
        self._entries: OrderedDict[tuple[int, ...], _Entry[T]] = OrderedDict()
        # Of `_entries` the last used, which the next call most likely uses too.
        self._recent: _Entry[T] | None = None
        self._forgotten = 0  # how often `forget` was called
        # Re-entrant: a parameter may die, and call _drop, while this thread holds it.
        self._lock = threading.RLock()
        with _everywhere_lock:
            _everywhere.add(self)

    def get(self, inputs: Sequence[Any]) -> T:
        """Return what was made from these inputs' constants, or make it now. Contents are not compared: see `compared`."""
        return self._current(inputs).made

    def compared(self, inputs: Sequence[Any]) -> T:
        """Return the same as `get`, with contents compared too."""
        entry = self._current(inputs)
        return self.refresh(inputs) if entry.guard.is_stale() else entry.made

    def refresh(self, inputs: Sequence[Any]) -> T:
        """Makes it anew, whatever was there. One WARNING where calls before this one may have used old contents."""
        key = self._key(inputs)
        entry = self._entries.get(key)
        if entry is not None and entry.guard.is_late():
            _log.warning(
                "weights were changed without PyTorch's version counters (through .data, .numpy() or C code): up to %d calls before"
                " this one may have used the old values. After such a change call torch_hybrid_backend.refresh(model)",
                CALLS_PER_ROUND,
            )
        return self._remake(key, inputs).made

    def watch_anew(self, inputs: Sequence[Any], made_with: Callable[[T, Guard], T]) -> None:
        """Give what was made from these inputs' constants a new guard, as their memory was mapped anew with the same contents.

        made_with: returns what was made, with that guard in place of the old one."""
        key = self._key(inputs)
        entry = self._entries.get(key)
        if entry is None:
            return
        guard = Guard(entry.guarded(inputs))
        after = replace(entry, guard=guard, made=made_with(entry.made, guard))
        with self._lock:
            if self._entries.get(key) is entry:
                self._entries[key] = self._recent = after

    def forget(self, storages: AbstractSet[int]) -> None:
        """Have the next call make anew what was made of constants in these storages, by `_cdata`."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                alive = (storage() for storage in entry.storages)
                if any(storage is not None and storage._cdata in storages for storage in alive):
                    del self._entries[key]
            self._recent = None
            self._forgotten += 1

    def _current(self, inputs: Sequence[Any]) -> _Entry[T]:
        recent = self._recent
        if recent is not None and recent.is_of is not None and recent.is_of(inputs):
            return recent
        key = self._key(inputs)
        entry = self._entries.get(key)
        if entry is None or entry.versions != versions_of(entry.guarded(inputs)):
            return self._remake(key, inputs)
        with self._lock:
            if self._entries.get(key) is entry:
                self._entries.move_to_end(key)
                self._recent = entry
        return entry

    def _key(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        return tuple(map(_data_ptr, self._constants(inputs)))

    def _remake(self, key: tuple[int, ...], inputs: Sequence[Any]) -> _Entry[T]:
        # Before making: a change while `make` runs must be seen by the next call.
        forgotten = self._forgotten
        positions = (*self._guarded, *(self._copied(inputs) if self._copied is not None else ()))
        guarded = _picker(positions)
        versions = versions_of(guarded(inputs))
        is_of = snapshot(inputs, self._positions, frozenset(positions))
        guard = Guard(guarded(inputs))
        with torch.no_grad():
            made = self._make(inputs, guard)
        drop = _DropOnDeath(weakref.ref(self), key)
        storages = {
            id(storage): storage for storage in (tensor.untyped_storage() for tensor in self._constants(inputs))
        }
        watched = tuple(weakref.ref(storage, drop) for storage in storages.values())
        entry = _Entry(guarded, versions, guard, made, watched, is_of)
        with self._lock:
            if self._forgotten != forgotten:
                return entry  # good for the call that it was made in, not for later ones
            self._entries[key] = self._recent = entry
            self._entries.move_to_end(key)
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        return entry

    def _drop(self, key: tuple[int, ...], died: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            entry = self._entries.get(key)
            # By identity: the same addresses may meanwhile belong to new parameters.
            if entry is not None and any(storage is died for storage in entry.storages):
                del self._entries[key]
                if self._recent is entry:
                    self._recent = None

    def all_made(self) -> list[T]:
        """Everything made and kept."""
        with self._lock:
            return [entry.made for entry in self._entries.values()]

    def __len__(self) -> int:
        return len(self._entries)


# All there are, for `refresh`.
_everywhere: weakref.WeakSet[LiveConstants[Any]] = weakref.WeakSet()
_everywhere_lock = threading.RLock()


def refresh(model: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Makes calls from here on use the present contents of these weights, however they were changed.

    model: a module, compiled or not, for all its parameters and buffers; or the tensors. Needed only after changes that PyTorch does
    not count (through `.data`, `.numpy()` or C code) where the kernel cannot watch memory; see docs/live_weights.md. What was
    folded or packed from these weights is made anew by the next call. Threads may call it; calls that run meanwhile may use either.
    Raises TypeError for anything else.

        model.layer.weight.data[3, 5] += 100
        torch_hybrid_backend.refresh(model)
    """
    if isinstance(model, torch.nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
    elif isinstance(model, Iterable) and not isinstance(model, torch.Tensor):
        tensors = list(model)
    else:
        tensors = [model]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"refresh takes a module, a tensor or tensors, not {type(tensor).__name__}")
    storages = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}
    constant_pool.forget(storages)
    with _everywhere_lock:
        caches = list(_everywhere)
    for cache in caches:
        cache.forget(storages)


@dataclass(frozen=True, slots=True, eq=False)
class _DropOnDeath:
    """Called with the weak reference of a storage that died. Weak itself: an entry must not keep its cache alive."""

    cache: weakref.ref[LiveConstants[Any]]
    key: tuple[int, ...]

    def __call__(self, died: weakref.ref[torch.UntypedStorage]) -> None:
        cache = self.cache()
        if cache is not None:
            cache._drop(self.key, died)


@dataclass(frozen=True, slots=True)
class ViewOfInput:
    """A folded value that is a view of a parameter: made anew in each call, so that it keeps no parameter alive."""

    position: int  # of the parameter among the call's inputs
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: LazyBits

    def of(self, inputs: Sequence[Any]) -> torch.Tensor:
        view = inputs[self.position].detach().as_strided(self.size, self.stride, self.offset)
        return self.bits.view_of(view)


@dataclass(frozen=True, slots=True, eq=False)
class FoldPart:
    """A part of a fold that shares no work with the others.

    reads: numbers of the fold's arguments; gives: numbers of its results. text: what it computes, equal for equal parts of other graphs; "" for
    views of parameters, which take no memory.
    """

    reads: tuple[int, ...]
    gives: tuple[int, ...]
    run: Fold
    text: str

    def __call__(self, constants: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        own = [constants[number] for number in self.reads]
        if not self.text:
            return self.run(own)
        return shared(self.text, own, lambda: list(self.run(own)), lasting=True)


@dataclass(frozen=True, slots=True, eq=False)
class DividedFold:
    """A fold of parts that graphs share one by one: what depends on the size of a call's inputs, a mask say, does not keep the others apart."""

    parts: tuple[FoldPart, ...]

    def __call__(self, constants: list[torch.Tensor]) -> list[torch.Tensor]:
        found = {number: made for part in self.parts for number, made in zip(part.gives, part(constants), strict=True)}
        return [found[number] for number in range(len(found))]


def run_fold(hoisted: HoistedInputs, fold: Fold | None, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The folded values of a call's inputs; empty where nothing was folded. Raises HybridError for a missing fold."""
    if fold is None:
        if any(isinstance(source, FoldedValue) for source in hoisted.main):
            raise HybridError("the main graph reads folded values, but there is no function to fold them")
        return []
    constants = [inputs[position].detach() for position in hoisted.fold]
    with torch.no_grad():
        return list(fold(constants))


def without_owning(
    folded: Sequence[torch.Tensor], hoisted: HoistedInputs, inputs: Sequence[Any]
) -> list[torch.Tensor | ViewOfInput]:
    """`folded`, with views of the parameters they were folded from replaced by their description."""
    owners = {inputs[position].untyped_storage()._cdata: position for position in hoisted.fold}
    kept: list[torch.Tensor | ViewOfInput] = []
    for tensor in folded:
        position = owners.get(tensor.untyped_storage()._cdata)
        if position is not None and tensor.dtype == inputs[position].dtype:
            offset = int(tensor.storage_offset())
            kept.append(ViewOfInput(position, tuple(tensor.shape), tensor.stride(), offset, LazyBits.of(tensor)))
        else:
            kept.append(copied(tensor) if position is not None else tensor)
    return kept


def resolve(value: torch.Tensor | ViewOfInput, inputs: Sequence[Any]) -> torch.Tensor:
    """The tensor that `value` is in this call."""
    return value.of(inputs) if isinstance(value, ViewOfInput) else value


def main_inputs(
    hoisted: HoistedInputs, folded: Sequence[torch.Tensor | ViewOfInput], inputs: Sequence[Any]
) -> list[Any]:
    """The main graph's inputs, in order, for one call of the un-hoisted graph."""
    return [
        inputs[source.position] if isinstance(source, CallInput) else resolve(folded[source.index], inputs)
        for source in hoisted.main
    ]
