"""Compiler processes that load while Dynamo traces.

Dynamo calls the backend when its trace is done, and uses one core for it. Compiler processes that are started then load while AOTAutograd
traces, on the same cores. Started on the other cores when Dynamo begins, they are ready before the first kernel is known. Whether a graph needs
a compiler is known only after the trace; so a program of which the cache has a graph gets none ahead.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from pathlib import Path

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.engines.cpu.engine import TvmEngine
from torch_hybrid_backend.errors import CacheError, ConfigError, ignored
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.torch_private import around_compilations, is_compiling_for

_MOST_PROCESSES = 4  # more start when a graph turns out to need them


def begin_with_first_trace(package: str) -> None:
    """Have the first trace of Dynamo's for a backend of a package start compiler processes."""
    started = functools.cache(_start)

    def begin() -> None:
        if is_compiling_for(package):
            started()

    around_compilations(begin, lambda: None)


def program_key() -> str:
    """SHA-256 of how this program was started, and of the time at which its main file was last written."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    written = ""
    if main is not None:
        with ignored(OSError):
            written = str(Path(main).stat().st_mtime_ns)
    return hashlib.sha256("\0".join(["program", *sys.orig_argv, written]).encode(errors="replace")).hexdigest()


def _start() -> None:
    try:
        config = Config.from_env(os.environ)
        engines = config.select(config.engines or (TvmEngine.NAME,))
    except ConfigError:  # the backend, which knows the options, raises it where it matters
        return
    others = min(
        config.compile_threads - 1, _MOST_PROCESSES
    )  # Dynamo has a core for itself: beside two loads it took 0.4 s more on two cores
    if others > 0 and TvmEngine.NAME in engines and not is_known(config):
        TvmEngine.load_compiler(config, others)


def is_known(config: Config) -> bool:
    """True if the cache knows this program, or was filled elsewhere. A cache that is not there is not made: options may name another."""
    if config.cache_shared:
        return True
    if not config.cache or not config.cache_dir.is_dir():
        return False
    try:
        store = Store(config.cache_dir)
    except CacheError:  # the backend tells of it
        return False
    return store.is_read_only or program_key() in SeenGraphs(store)
