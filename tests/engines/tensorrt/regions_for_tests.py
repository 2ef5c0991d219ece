"""Functions as regions of the TensorRT engine, which serves the CPU here. Its engines are not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.tensorrt import quantization
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest, SerializedEngine, build
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine
from torch_hybrid_backend.engines.tensorrt.installed import Installation, installation
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.engines.tensorrt.verdicts import Verdicts
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.store import Store

# TensorRT-RTX 1.4 builds no engine with values of 8 bits.
builds_bytes = pytest.mark.skipif(
    quantization.is_rtx_before(quantization.FIRST_RTX), reason="it needs TensorRT-RTX 1.5"
)
# The release of torch_tensorrt whose partitions golden files hold: others take a few operators more or less.
GOLDEN_RELEASE = "2.13"
BUILD = "tests.engines.tensorrt.no_gpu:build"
VERDICTS = Verdicts(Store.temporary(), "")  # for all tests of one process: judging takes longer than most of them


def engine(given: Services | Path | None = None, **options: Any) -> TensorRTEngine:
    """The engine for the CPU, which builds without a GPU and has a constant key for the machine."""
    config = options.pop("config", Config())
    options = {"entry": BUILD, "machine": lambda device: "a GPU and its driver", "verdicts": VERDICTS, **options}
    made = TensorRTEngine(config, given if isinstance(given, Services) else services(given), **options)
    made.devices = frozenset({"cpu"})
    return made


def has_golden_release() -> bool:
    """True if the installed release is that of the golden files."""
    found = installation()
    return isinstance(found, Installation) and found.release == GOLDEN_RELEASE


def region(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> Region:
    """The single region of a function. `dynamic`: all sizes of inputs except 1 are symbols."""
    mode = "symbolic" if dynamic else "fake"
    graph = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    graph.graph.eliminate_dead_code()
    cut = partition_graph(graph, [engine()], Config(min_region_nodes=1)).graph
    (found,) = (segment.region for segment in cut.segments if segment.engine_hint == "tensorrt")
    return found


def built(made: Region, *, tf32: bool = False, constants: dict[int, torch.Tensor] | None = None) -> SerializedEngine:
    """The region's engine, built in this process."""
    request = BuildRequest.of(made, ranges_of(made), tf32=tf32, constants=constants)
    return SerializedEngine.from_bytes(build(request.to_bytes(), lambda done: True))
