"""Built engines on a device, loaded with TensorRT alone: importing torch_tensorrt would take seconds.

TensorRT is the module of the installed distribution (`installed.Flavour.module`), as for torch_tensorrt.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.engines.tensorrt.installed import installation
from torch_hybrid_backend.engines.tensorrt.log import LogMessages, tensorrt_log, tensorrt_logger
from torch_hybrid_backend.errors import CompileError


def _tensorrt() -> Any:
    found = installation()
    if isinstance(found, Refused):
        raise ImportError(found.why)
    return importlib.import_module(found.flavour.module)


trt = _tensorrt()
_LEVELS = {
    trt.ILogger.Severity.INTERNAL_ERROR: logging.CRITICAL,
    trt.ILogger.Severity.ERROR: logging.ERROR,
    trt.ILogger.Severity.WARNING: logging.WARNING,
    trt.ILogger.Severity.INFO: logging.INFO,
    trt.ILogger.Severity.VERBOSE: logging.DEBUG,
}


class _Logger(trt.ILogger):  # type: ignore[misc, name-defined]
    """Sends TensorRT's messages to torch_tensorrt's logger: in a process, TensorRT keeps using the first logger that it is given."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: Any, message: str) -> None:
        tensorrt_logger.log(_LEVELS[severity], message)


_LOGGER = _Logger()


class Loaded:
    """An engine on the current device: a `runtime.LoadedEngine`. Raises CompileError if this TensorRT or GPU rejects the engine."""

    def __init__(self, plan: bytes) -> None:
        with tensorrt_log.collect(fully=True) as log:
            self._runtime = trt.Runtime(_LOGGER)
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise CompileError(f"TensorRT does not load the engine: {log.why}")
        self._config, self._kernels = _runtime_config(self._engine)

    def collect_log(self) -> contextlib.AbstractContextManager[LogMessages]:
        return tensorrt_log.collect()

    @property
    def scratch_bytes(self) -> int:
        size = getattr(self._engine, "device_memory_size_v2", None)  # `device_memory_size` overflows, and is deprecated
        return int(self._engine.device_memory_size if size is None else size)

    def context(self) -> Any:
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        made = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if made is None:
            raise CompileError("TensorRT could not create an execution context; the device may be out of memory")
        return made

    def can_be_captured(self, context: Any, stream: int) -> bool:
        asked = getattr(context, "is_stream_capturable", None)  # TensorRT-RTX alone: its calls may compile
        return True if asked is None else bool(asked(stream))

    def take_kernels(self, kernels: bytes) -> bool:
        if self._kernels is None:
            return False
        with self.collect_log():
            return bool(self._kernels.deserialize(kernels))

    def compiled_kernels(self) -> bytes:
        if self._kernels is None:
            return b""
        with self.collect_log():
            return bytes(self._kernels.serialize() or b"")


def _runtime_config(engine: Any) -> tuple[Any, Any]:
    """Settings of an engine's contexts, and the cache of kernels that TensorRT-RTX compiles in calls; (None, None) for TensorRT."""
    if not hasattr(trt, "IRuntimeCache"):
        return None, None
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    kernels = config.create_runtime_cache()
    config.set_runtime_cache(kernels)
    return config, kernels
