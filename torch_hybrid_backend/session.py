"""Sessions: the engines there are, and what all graphs compiled under equal settings share. Part of the wiring, as `backend` is."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tvm.engine import TvmEngine
from torch_hybrid_backend.engines.unavailable import UnusableEngine
from torch_hybrid_backend.errors import ConfigError, HybridError
from torch_hybrid_backend.partition.cost_cache import machine_fingerprint
from torch_hybrid_backend.partition.regions import EAGER
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.sources import sources_version
from torch_hybrid_backend.store import Store

log = logging.getLogger(__name__)

# A region's time beside eager's is also that of the plan which runs its kernels. Times of a kernel's variants, all run by one plan, are kept
# under the kernel's key alone: they are what tuning takes minutes for.
TIMING_SOURCES = ("runtime", "_runtime.so", "measure.py")
_TIMED_BY = sources_version(*TIMING_SOURCES)
ENGINE_GROUP = "torch_hybrid_backend.engines"
EngineFactory = Callable[[Config, Store], Engine]

# The engines, in order; the order only breaks ties, measured cost decides. Third parties add theirs through the entry-point
# group `torch_hybrid_backend.engines`.
ENGINES: tuple[tuple[str, EngineFactory], ...] = (
    (
        "tvm",
        lambda config, store: TvmEngine(
            store, config.compile_threads, ProgramRunner, config.placement, machine_fingerprint, config.progress
        ),
    ),
    (EAGER, lambda config, store: EagerEngine()),
)


def engine_factories() -> dict[str, EngineFactory]:
    """Every known engine by name, third parties' included. Raises ConfigError for two engines of one name."""
    factories = dict(ENGINES)
    for entry in entry_points(group=ENGINE_GROUP):
        if entry.name in factories:
            raise ConfigError(f"two engines are called {entry.name!r}; uninstall one of the packages that bring them")
        factories[entry.name] = functools.partial(_third_party, entry)
    return factories


def _third_party(entry: EntryPoint, config: Config, _store: Store) -> Engine:
    try:
        engine: Engine = entry.load()(config)
        engine.available()
    except Exception as error:  # a third party's package may fail in any way; that costs its engine only
        return UnusableEngine(entry.name, error)
    return engine


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """What graphs compiled under equal settings share: the engines that can run here, and the cache."""

    engines: tuple[Engine, ...]
    store: Store

    def versions(self) -> dict[str, str]:
        """What an engine's kernels and their timings depend on, where the engine says so (`version`): that, and what runs and times them."""
        return {e.name: f"{version} {_TIMED_BY}" for e in self.engines if (version := getattr(e, "version", ""))}

    def prepare(self, operators: int) -> None:
        """Have the engines that ask for it get ready for a graph of so many operators, without waiting for them."""
        for engine in self.engines:
            prepare = getattr(engine, "prepare", None)
            if prepare is None:
                continue
            try:
                prepare(operators)
            except Exception as error:  # a third party's code: unprepared it may compile all the same
                log.warning("the engine %s cannot get ready: %s: %s", engine.name, type(error).__name__, error)


_sessions: dict[tuple[object, ...], Session] = {}
_sessions_lock = threading.Lock()


def open_session(config: Config) -> Session:
    """The engines and the cache for settings; one for all graphs compiled under equal ones in this process.

    An engine that cannot run here, or a cache that cannot be used, gives one WARNING; under `strict` HybridError is raised.
    """
    factories = engine_factories()
    names = config.select(tuple(factories))
    key = (
        os.getpid(),
        names,
        config.cache,
        config.cache_dir,
        config.cache_limit_mib,
        config.compile_threads,
        config.placement,
        config.progress,
        config.strict,  # a session that lacks something is none under strict
    )
    with _sessions_lock:
        if key not in _sessions:
            _sessions[key] = _new_session(config, names, factories)
        return _sessions[key]


def _new_session(config: Config, names: Sequence[str], factories: Mapping[str, EngineFactory]) -> Session:
    limit_bytes = config.cache_limit_mib << 20
    store = Store.open(config.cache_dir, enabled=config.cache, strict=config.strict, limit_bytes=limit_bytes)
    engines = []
    for name in names:
        engine = factories[name](config, store)
        available = engine.available()
        if isinstance(available, Refused):
            if config.strict:
                raise HybridError(f"the engine {name} cannot run here: {available.why}")
            log.warning("the engine %s cannot run here, what it would take runs in eager: %s", name, available.why)
            continue
        engines.append(engine)
    return Session(tuple(engines), store)
