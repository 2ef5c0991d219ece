"""Make a PyTorch model faster by one line: `torch.compile(model, backend="hybrid")`.

The line needs no import of this package. What the package offers beside it:

    explain(model, *args)    where every operator runs, and why
    warmup(model, *inputs)   compile for several inputs before serving
    refresh(model)           use the weights as they are now, however they were changed
    quantize(model, loader)  a module that multiplies integers of 8 bits, for this or any other backend
    compress(model, ...)     a copy with pruned and shared weights; save_compressed, load_compressed: small files of weights
    export(model, args, path)  a compiled model as one file, for other processes and machines
    export_generation(model, path, max_length=n)  a decoder of transformers as one file, for load(path).generate(ids)
    compile_generation(model, max_length=n)  the same in this process: compile_generation(...).generate(ids)
    load(path)               the model from such a file, without tracing or compiling; sign(path, key)
    serve.deployment(path)   a model from such a file behind HTTP, with Ray Serve (import torch_hybrid_backend.serve)
    wait_for_builds()        until nothing is built any more off the call (the setting `background`)
    bisect(model, x)         what in this backend makes a program wrong
    Config                   the settings
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from typing import TYPE_CHECKING, Any

from torch_hybrid_backend._version import __version__

if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError(
        "torch_hybrid_backend needs PyTorch 2.11 or later, which is not installed here: pip install torch", name="torch"
    )


def _check_torch() -> None:
    """Raise ImportError for a PyTorch that is too old."""
    from torch import __version__ as version

    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < (2, 11):
        raise ImportError(
            f"torch_hybrid_backend needs PyTorch 2.11 or later, and this is {version}: pip install --upgrade torch"
        )


if "torch" in sys.modules:  # else `__getattr__` and `backend` do so: importing the package must stay cheap
    _check_torch()
    from torch_hybrid_backend.driver.mega_cache import register

    register()

if TYPE_CHECKING:
    from torch_hybrid_backend.artifact.model import load
    from torch_hybrid_backend.artifact.signing import sign
    from torch_hybrid_backend.backend import explain, warmup
    from torch_hybrid_backend.builds.background import wait_for_builds
    from torch_hybrid_backend.compression.container import load_compressed, save_compressed
    from torch_hybrid_backend.compression.shared_weights import compress
    from torch_hybrid_backend.config import Config
    from torch_hybrid_backend.driver.bisection import bisect
    from torch_hybrid_backend.driver.export import export
    from torch_hybrid_backend.driver.generation import compile_generation, export_generation
    from torch_hybrid_backend.quantization.calibration import Collector
    from torch_hybrid_backend.quantization.quantize import quantize
    from torch_hybrid_backend.runtime.constants import refresh

_HOMES = {
    "Collector": "quantization.calibration",
    "Config": "config",
    "bisect": "driver.bisection",
    "compile_generation": "driver.generation",
    "compress": "compression.shared_weights",
    "explain": "backend",
    "export": "driver.export",
    "export_generation": "driver.generation",
    "load": "artifact.model",
    "load_compressed": "compression.container",
    "quantize": "quantization.quantize",
    "refresh": "runtime.constants",
    "save_compressed": "compression.container",
    "sign": "artifact.signing",
    "wait_for_builds": "builds.background",
    "warmup": "backend",
}
__all__ = [
    "Collector",
    "Config",
    "__version__",
    "bisect",
    "compile_generation",
    "compress",
    "explain",
    "export",
    "export_generation",
    "load",
    "load_compressed",
    "quantize",
    "refresh",
    "save_compressed",
    "sign",
    "wait_for_builds",
    "warmup",
]


def __getattr__(name: str) -> Any:
    # On first use: importing the package must stay cheap, and Dynamo and AOTAutograd take seconds to import.
    if name not in _HOMES:
        from torch_hybrid_backend.errors import did_you_mean

        hint = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. {hint}".rstrip(" ."))
    _check_torch()
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
