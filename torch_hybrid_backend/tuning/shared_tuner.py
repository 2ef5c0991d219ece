"""Process among several that tune a model together: what it tries comes from `Claims`, and it times only while it holds its host's lock."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from torch_hybrid_backend.backend import compile_for_dynamo
from torch_hybrid_backend.codegen.engine import TIMINGS
from torch_hybrid_backend.codegen.kernel_cache import JobCompiler
from torch_hybrid_backend.codegen.search import KernelOptions
from torch_hybrid_backend.codegen.tune import Tuner, tuned_by
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import HybridError, failures
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.measuring.timing_cache import TimingCache, keeping_none, returning_only
from torch_hybrid_backend.storage.store import Content, collecting
from torch_hybrid_backend.tuning.claims import Entry, Interval, Wanted
from torch_hybrid_backend.tuning.host_lock import HostLock, host


class ClaimsOf(Protocol):
    """The part of `Claims` that a process which times calls, maybe from afar."""

    def claim(self, worker: str, wanted: Sequence[Wanted]) -> dict[str, str]: ...
    def report(self, worker: str, found: Sequence[Wanted], is_disturbed: bool) -> None: ...
    def used(self, interval: Interval) -> None: ...
    def stop(self) -> None: ...


class SharedTuner(Tuner):
    """Tunes what `claims` lets it. Holds the host's lock within `alone`, but not between rounds, nor while other hosts compile."""

    def __init__(
        self,
        worker: str,
        claims: ClaimsOf,
        timings: TimingCache,
        compiler: Callable[[JobCompiler], JobCompiler] | None = None,
    ) -> None:
        """`worker`: a name of this process. `compiler`: makes the compiler that is used in place of this process's own."""
        self._worker, self._claims, self._timings = worker, claims, timings
        self._compiler = compiler
        self._lock = HostLock()
        self._began = 0.0
        self.is_stopped = False  # by Ctrl-C

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the host's lock, with the exceptions above."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    @contextlib.contextmanager
    def waiting(self, is_elsewhere: bool) -> Iterator[None]:
        """Let another process time on this host while this one waits for other hosts, if `is_elsewhere`."""
        if is_elsewhere:
            self.release()
        try:
            yield
        finally:
            if is_elsewhere:
                self.acquire()

    def acquire(self) -> None:
        """Wait for the host's lock."""
        self._lock.acquire()
        self._began = time.monotonic()

    def release(self) -> None:
        """Release the host's lock, and tell for how long it was held."""
        if self._lock.is_held:
            interval = Interval(host(), self._worker, self._began, time.monotonic())
            self._lock.release()
            self._claims.used(interval)

    def claim(self, device: Device, options: Sequence[KernelOptions]) -> Mapping[str, str]:
        if self.is_stopped:
            return {}
        self.release()
        self._lock.give_way()
        self._began = time.monotonic()
        of_entries = {self._timings.entry_key(option.key, device): option for option in options}
        claimed = self._claims.claim(self._worker, [_wanted(key, option) for key, option in of_entries.items()])
        return {of_entries[key].key: name for key, name in claimed.items()}

    def report(self, device: Device, options: Sequence[KernelOptions], is_disturbed: bool) -> None:
        found = [_wanted(self._timings.entry_key(option.key, device), option) for option in options]
        self._claims.report(self._worker, found, is_disturbed)

    def stop(self) -> None:
        self.is_stopped = True
        self._claims.stop()

    def compiler(self, own: JobCompiler) -> JobCompiler:
        return own if self._compiler is None else self._compiler(own)


def _wanted(key: str, option: KernelOptions) -> Wanted:
    return Wanted(key, option.chosen.variant.name, dict(option.times), tuple(v.name for v in option.untried))


class TunedModel:
    """A model by its factory, tuned on the inputs that the factory gives. Inference: calls are under `torch.no_grad`."""

    def __init__(self, factory: Factory, config: Config) -> None:
        """Raises ConfigError for a factory that makes no model, HybridError for one that fails."""
        self._factory, self._config = factory, replace(config, background=False)
        self._runs_in_eager = False
        try:
            with factory.importable():
                self._model, self._args, self._kwargs = factory.load()()
        except HybridError:
            raise
        except SystemExit as error:
            raise HybridError(f"{factory.target}: the factory ended the program: SystemExit: {error}") from error
        except failures(Exception) as error:  # the user's code
            raise HybridError(f"{factory.target}: the factory failed: {_in_one_line(error)}") from error

    def tune(self, tuner: SharedTuner, *, keeps: bool) -> None:
        """Call the model once, compiled anew, and try what the tuner claims. `keeps`: keep times in this process's own cache, too."""
        with tuner.alone(), tuned_by(tuner), contextlib.nullcontext() if keeps else keeping_none():
            self._check_in_eager()
            self._call("tune")

    def settle(self, tuner: SharedTuner, timings: TimingCache, entries: Mapping[str, Entry]) -> list[Content]:
        """Call the model once with the fastest variants that are known, and return all that a later process needs for the same: kernels, traced
        graphs, times of engines, which are taken anew, and times of kernels, among them those that have no entry yet."""
        kept = timings.entries(TIMINGS)
        for key, entry in entries.items():
            # Disturbed times do not count yet, and were counted where they were taken.
            if entry.times and not entry.is_disturbed and kept.get(key) != entry.times:
                timings.put_entry(TIMINGS, key, entry.times)
        found: dict[tuple[str, str], Content] = {}
        with tuner.alone(), tuned_by(tuner), returning_only(TIMINGS), collecting(found):
            self._call("measure")
        return [content for content in found.values() if content.is_portable]

    def _call(self, placement: str) -> None:
        # Dynamo tells compilations apart by their backend: a new partial is a new compilation.
        backend: Any = functools.partial(compile_for_dynamo, config=replace(self._config, placement=placement))
        with self._factory.importable(), torch.no_grad():
            torch.compile(self._model, backend=backend)(*self._args, **self._kwargs)

    def _check_in_eager(self) -> None:
        """Raise HybridError if the model fails on its inputs. Dynamo would show a page of its own frames."""
        if self._runs_in_eager:
            return
        try:
            with self._factory.importable(), torch.no_grad():
                self._model(*self._args, **self._kwargs)
        except failures(Exception) as error:  # the user's code
            why = _in_one_line(error)
            raise HybridError(f"{self._factory.target}: the model fails on these inputs: {why}") from error
        self._runs_in_eager = True


def _in_one_line(error: Exception) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")
