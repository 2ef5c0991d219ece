"""Sessions: the engines there are, and what all graphs compiled under equal settings share. Part of the wiring, as `backend` is."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch
import torch.fx

from torch_hybrid_backend.config import CUDA_DRIVER, Config
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import EAGER, Engine, serves
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.engines.eager import EagerEngine
from torch_hybrid_backend.engines.tensorrt import installed as tensorrt_installed
from torch_hybrid_backend.engines.triton import installed
from torch_hybrid_backend.engines.unavailable import UnavailableEngine
from torch_hybrid_backend.errors import ArgumentError, ConfigError, HybridError, failures
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.machine import fingerprint
from torch_hybrid_backend.measuring.measure import timer_for
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.runtime.native.ops import use_cuda_driver
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.services import EngineFactory, Services
from torch_hybrid_backend.signatures import public_key
from torch_hybrid_backend.storage.shared import SharedCaches
from torch_hybrid_backend.storage.sources import sources_version
from torch_hybrid_backend.storage.store import Store

log = logging.getLogger(__name__)

# A region's time beside eager's is also that of the plan which runs its kernels. Times of a kernel's variants, all run by one plan, are kept
# under the kernel's key alone: they are what tuning takes minutes for.
TIMING_SOURCES = ("runtime", "_runtime.so", "measuring/measure.py")
_TIMED_BY = sources_version(*TIMING_SOURCES)
ENGINE_GROUP = "torch_hybrid_backend.engines"


def _triton(config: Config, services: Services) -> Engine:
    """Named in `engines`, and under Triton's own TRITON_INTERPRET=1, it serves the CPU: that variable alone is for kernels of the user's.
    Where it serves nothing it is not imported, which every process would wait for."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    interpreted = interpreted and "triton" in config.engines
    if not interpreted and not torch.cuda.is_available():
        return UnavailableEngine("triton", installed.NO_GPU, installed.described())
    from torch_hybrid_backend.engines.triton.engine import TritonEngine

    return TritonEngine(config, services, interpreted=interpreted)


def _tensorrt(config: Config, services: Services) -> Engine:
    """Make TensorRT's engine, which takes part if `engines` names it: its builds take minutes, and no GPU has run its engines yet."""
    installation = tensorrt_installed.installation()
    has_gpu = torch.cuda.is_available()
    lacks = installation if isinstance(installation, Refused) else None if has_gpu else tensorrt_installed.NO_GPU
    if "tensorrt" not in config.engines:
        why = "disabled by default; add it to the setting `engines` (HYBRID_ENGINES)" if lacks is None else lacks.why
        lacks = Refused(Reason.DISABLED, why)
    if lacks is not None:
        return UnavailableEngine("tensorrt", lacks, tensorrt_installed.described())
    from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine

    return TensorRTEngine(config, services)


# The engines, in order; the order only breaks ties, measured cost decides. Third parties add theirs through the entry-point
# group `torch_hybrid_backend.engines`.
ENGINES: tuple[tuple[str, EngineFactory], ...] = (
    ("tvm", TvmEngine),
    ("triton", _triton),
    ("tensorrt", _tensorrt),
    (EAGER, lambda config, services: EagerEngine()),
)


def engine_factories() -> dict[str, EngineFactory]:
    """Every known engine by name, third parties' included. Raises ConfigError for two engines of one name."""
    factories = dict(ENGINES)
    for entry in entry_points(group=ENGINE_GROUP):
        if entry.name in factories:
            raise ConfigError(f"two engines are called {entry.name!r}; uninstall one of the packages that bring them")
        factories[entry.name] = functools.partial(_third_party, entry)
    return factories


def _third_party(entry: EntryPoint, config: Config, services: Services) -> Engine:
    try:
        engine = _loaded(entry, config, services)
        engine.available()
    except failures(Exception) as error:  # a third party's package may fail in any way; that costs its engine only
        why = f"its package fails: {type(error).__name__}: {error}"
        return UnavailableEngine(entry.name, Refused(Reason.MISSING_DEPENDENCY, why))
    return engine


def _loaded(entry: EntryPoint, config: Config, services: Services) -> Engine:
    """The engine that an entry point makes. Raises what its package raises, and ConfigError if that is no engine."""
    factory = entry.load()
    try:
        engine = factory(config, services)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # it was called, and something in it failed
        raise ConfigError(
            f"{entry.value} must be a callable engine(config, services) that returns an Engine: {error}"
        ) from error
    if not isinstance(engine, Engine):
        lacking = [member for member in vars(Engine) if not member.startswith("_") and not hasattr(engine, member)]
        raise ConfigError(
            f"{entry.value} returned an object of type {type(engine).__name__}, which must be an Engine, and lacks "
            f"{', '.join(lacking)}; core.engine.EngineBase has the defaults"
        )
    if engine.name != entry.name:
        raise ConfigError(f"{entry.value} made an engine called {engine.name!r}; it must be called {entry.name!r}")
    return engine


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """Things that graphs compiled under equal settings share: the engines that can run here, and the services they were given."""

    engines: tuple[Engine, ...]
    services: Services

    def versions(self, device: Device) -> dict[str, str]:
        """By engine what its timings on a device depend on: what it says itself, and what runs and times its kernels. An engine that says
        nothing, and whose timings are not kept, is left out."""
        versions = {engine.name: _version(engine, device) for engine in self.engines if serves(engine, device)}
        return {name: f"{version} {_TIMED_BY}" for name, version in versions.items() if version}

    def keeps_packed(self, weights: torch.fx.Node) -> bool:
        """True if an engine for their device reads the weights that a node looks up in a codebook packed."""
        device = device_of(weights)
        return device is not None and any(serves(e, device) and _keeps_packed(e, weights) for e in self.engines)

    def prepare(self, operators: int) -> None:
        """Have the engines get ready for a graph of so many operators, without waiting for them."""
        for engine in self.engines:
            try:
                engine.prepare(operators)
            except failures(Exception) as error:  # a third party's code: unprepared it may compile all the same
                log.warning("the engine %s cannot get ready: %s: %s", engine.name, type(error).__name__, error)


def _keeps_packed(engine: Engine, weights: torch.fx.Node) -> bool:
    try:
        return engine.keeps_packed(weights)
    except failures(Exception) as error:  # a third party's code: such weights are then made ahead
        log.warning("the engine %s cannot tell what it keeps packed: %s: %s", engine.name, type(error).__name__, error)
        return False


def _version(engine: Engine, device: Device) -> str:
    try:
        return engine.version(device)
    except failures(Exception) as error:  # a third party's code: without a version its timings are not kept
        why = f"{type(error).__name__}: {error}"
        log.warning("the engine %s cannot tell its version, its timings are not kept: %s", engine.name, why)
        return ""


_sessions: dict[tuple[int, Config], Session] = {}
_sessions_lock = threading.Lock()


def open_session(config: Config) -> Session:
    """The engines and the cache for settings; one for all graphs compiled under equal ones in this process.

    An engine that cannot run here, or a cache that cannot be used, gives one WARNING; under `strict` HybridError is raised. Raises ConfigError
    for engines that do not exist, HybridError for another `cuda_driver` than this process uses.
    """
    key = (os.getpid(), config)
    with _sessions_lock:
        if key not in _sessions:
            _sessions[key] = _new_session(config)
        return _sessions[key]


def open_services(config: Config) -> Services:
    """Services that the engines for settings are given. A cache that cannot be used gives one WARNING, or CacheError under `strict`."""
    limit_bytes = config.cache_limit_mib << 20
    behind = SharedCaches(config.cache_shared, trusted_keys(config)) if config.cache_shared and config.cache else None
    store = Store.open(
        config.cache_dir, enabled=config.cache, strict=config.strict, limit_bytes=limit_bytes, behind=behind
    )
    progress = functools.partial(Progress, shown=config.progress)
    return Services(store, TimingCache(store, fingerprint), ProgramRunner, timer_for, progress)


def trusted_keys(config: Config) -> list[bytes]:
    """The public keys whose entries in shared caches count. Raises ConfigError for what is no key."""
    try:
        return [
            bytes.fromhex(text) if re.fullmatch("[0-9a-fA-F]{64}", text) else public_key(Path(text).expanduser())
            for text in config.cache_keys
        ]
    except ArgumentError as error:
        raise ConfigError(f"HYBRID_CACHE_KEYS (or options['cache_keys']): {error}") from error


def all_engines(config: Config) -> list[Engine]:
    """Every known engine, also those that cannot run here or are switched off."""
    services = open_services(config)
    return [make(config, services) for make in engine_factories().values()]


def _new_session(config: Config) -> Session:
    factories = engine_factories()
    names = config.select(tuple(factories))
    if config.cuda_driver != CUDA_DRIVER:
        use_cuda_driver(config.cuda_driver)
    services = open_services(config)
    made = [(name, factories[name](config, services)) for name in names]
    return Session(tuple(engine for name, engine in made if _can_run(name, engine, config)), services)


def _can_run(name: str, engine: Engine, config: Config) -> bool:
    available = engine.available()
    if not isinstance(available, Refused):
        return True
    if available.code in (Reason.NO_DEVICE, Reason.DISABLED) and name not in config.engines:
        log.debug("the engine %s is not used: %s", name, available.why)
        return False
    if config.strict:
        raise HybridError(f"the engine {name} cannot run here: {available.why}")
    log.warning("the engine %s cannot run here, its operators fall back to eager: %s", name, available.why)
    return False
