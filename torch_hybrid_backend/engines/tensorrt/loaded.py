"""Built engines on a device: TensorRT alone, without torch_tensorrt, whose import takes seconds.

The module is that of the distribution that is installed (`installed.Flavour.module`); torch_tensorrt takes the same.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.engines.tensorrt.installed import installation
from torch_hybrid_backend.engines.tensorrt.log import Heard, their_log, their_logger
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
    """TensorRT's log goes where torch_tensorrt sends it: TensorRT uses one logger for a process, whoever comes first."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: Any, message: str) -> None:
        their_logger.log(_LEVELS[severity], message)


_LOGGER = _Logger()


class Loaded:
    """An engine on the current device: a `runtime.LoadedEngine`. Raises CompileError for one that this TensorRT or GPU does not take."""

    def __init__(self, plan: bytes) -> None:
        with their_log.heard(fully=True) as log:
            self._runtime = trt.Runtime(_LOGGER)
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise CompileError(f"TensorRT does not load the engine: {log.why}")
        self._config, self._kernels = _runtime_config(self._engine)

    def heard(self) -> contextlib.AbstractContextManager[Heard]:
        return their_log.heard()

    @property
    def scratch_bytes(self) -> int:
        size = getattr(self._engine, "device_memory_size_v2", None)  # the first name overflows, and is deprecated
        return int(self._engine.device_memory_size if size is None else size)

    def context(self) -> Any:
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        made = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if made is None:
            raise CompileError("TensorRT makes no context for an engine: there may be no memory for it")
        return made

    def can_be_captured(self, context: Any, stream: int) -> bool:
        asked = getattr(context, "is_stream_capturable", None)  # TensorRT-RTX compiles in a call, TensorRT does not
        return True if asked is None else bool(asked(stream))

    def take_kernels(self, kernels: bytes) -> bool:
        if self._kernels is None:
            return False
        with self.heard():
            return bool(self._kernels.deserialize(kernels))

    def compiled_kernels(self) -> bytes:
        if self._kernels is None:
            return b""
        with self.heard():
            return bytes(self._kernels.serialize() or b"")


def _runtime_config(engine: Any) -> tuple[Any, Any]:
    """The settings of an engine's contexts, and the kernels they share, which TensorRT-RTX compiles in calls; None and None of TensorRT."""
    if not hasattr(trt, "IRuntimeCache"):
        return None, None
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    kernels = config.create_runtime_cache()
    config.set_runtime_cache(kernels)
    return config, kernels
