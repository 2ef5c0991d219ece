"""TensorRT beside the others, for `--tensorrt`: whether it runs here at all, what a call of an engine costs, Torch-TensorRT's own backend, what
builds take, and what a second process finds.

TensorRT comes from where Python finds it: a folder brought along on PYTHONPATH will do. Its C++ run-time is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import torch_hybrid_backend
from benchmarks.gpu import device as on
from torch_hybrid_backend.bench.worker import State
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.engines.tensorrt.engine import TensorRTEngine
from torch_hybrid_backend.engines.tensorrt.installed import installation
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.partition.regions import partition_graph
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.store import FAILURES

PART = "tensorrt"
# The engines of each peer of ours; eager takes what none of them does.
ENGINES = {"triton": "triton,eager", "tensorrt": "tensorrt,eager", "hybrid tensorrt": "tensorrt,triton,eager"}
PEERS = ("eager", "inductor", "torch_tensorrt", *ENGINES)
_BUILD_S = 120.0
_ROUNDS = 200


def builds(peer: str) -> bool:
    """True if a peer of ours builds engines of TensorRT's."""
    return "tensorrt" in ENGINES.get(peer, "")


def own_backend(dtype: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Torch-TensorRT's `torch.compile` backend with its defaults, but for types as the model has them and TF32 where it is asked for."""
    import torch_tensorrt
    from torch_tensorrt.dynamo._settings import CompilationSettings

    wanted = {"disable_tf32": dtype != "tf32", "use_python_runtime": True, "use_explicit_typing": True}
    known = {field.name for field in dataclasses.fields(CompilationSettings)}
    options = {name: value for name, value in wanted.items() if name in known}
    assert torch_tensorrt.__version__
    return lambda function: torch.compile(function, backend="torch_tensorrt", options=options)


def settle(call: Callable[[], object]) -> float:
    """Seconds until nothing is being built for a call that was made, and the call is placed anew among what was built."""
    start = time.perf_counter()
    for _ in range(2):  # the second call has engines chosen anew, off the call
        torch_hybrid_backend.wait_for_builds()
        call()
    torch_hybrid_backend.wait_for_builds()
    call()
    return time.perf_counter() - start


class BuildCount:
    """The number of engines that were built, or failed to be, since it was made."""

    def __init__(self) -> None:
        self._store = open_services(Config.from_env(os.environ)).store
        self._before = self._entries()

    def __int__(self) -> int:
        return len(self._entries() - self._before)

    def _entries(self) -> set[tuple[str, str]]:
        return {(kind, key) for kind in ("tensorrt", FAILURES) for key in self._store.keys(kind)}


@dataclass(frozen=True, slots=True)
class Probe:
    """Does TensorRT run on this GPU? A matrix product and what follows it is built, loaded, run and compared. Answer: "gap", the exact error,
    or "installed", "build_s", and what a call costs the host in microseconds, on memory that is there: "engine_us", "eager_us" of the same
    operators one by one."""

    device: str

    def answer(self, state: State) -> dict[str, Any]:
        found = installation()
        if isinstance(found, Refused):
            return {"gap": found.why}
        config = Config.from_env(os.environ).with_options({"engines": "tensorrt,eager"}, None)
        services = open_services(config)
        engine = TensorRTEngine(config, services)
        available = engine.available()
        if isinstance(available, Refused):
            return {"installed": str(found), "gap": available.why}
        try:
            return {"installed": str(found), **probed(engine, services, self.device)}
        except Exception as error:  # whatever it is: it is the answer
            return {"installed": str(found), "gap": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}


def probed(engine: TensorRTEngine, services: Services, device: str) -> dict[str, float]:
    """The figures of `Probe`. Raises what keeps it from running."""
    torch.manual_seed(0)
    x, w = torch.randn(256, 512, device=device), torch.randn(512, 128, device=device)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) + 1

    region = _region(engine, function, x, w)
    inputs = [{"x_1": x, "w_1": w}[each.name] for each in region.inputs]
    start = time.perf_counter()
    compiled = _compiled(engine, region)
    build_s = time.perf_counter() - start
    with torch.no_grad():
        (result,), expected = compiled(inputs), function(x, w)
        on.wait(device)
        if why := on.mistake([expected], [function(x.double(), w.double())], [result], "fp32"):
            raise CompileError(why)
        calls = {"engine_us": lambda: compiled(inputs), "eager_us": lambda: function(x, w)}
        return {"build_s": round(build_s, 2)} | {name: _host_us(call, device) for name, call in calls.items()}


def _region(engine: TensorRTEngine, function: Callable[..., Any], *inputs: torch.Tensor) -> Region:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    cut = partition_graph(graph, [engine], Config(min_region_nodes=1))
    for node in cut.nodes:
        for refusal in node.refusals:
            raise CompileError(f"{node.operator} is refused: {refusal.why}")
    (segment,) = cut.graph.segments
    return segment.region


def _compiled(engine: TensorRTEngine, region: Region) -> CompiledRegion:
    (made,) = engine.compile([region], Deadline(_BUILD_S))
    if isinstance(made, PendingRegion):
        done = threading.Event()
        made.when_done(done.set)
        done.wait()
        made = made.result()
    if isinstance(made, Exception):
        raise made
    assert isinstance(made, CompiledRegion)
    return made


def _host_us(call: Callable[[], object], device: str) -> float:
    """Microseconds of the host alone: nothing is waited for while calls are made."""
    taken = []
    for _ in range(_ROUNDS):
        on.wait(device)
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    on.wait(device)
    return round(sorted(taken)[_ROUNDS // 2], 3)


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Compile the model that was built (`work.Build`) for a peer in a process that finds the caches of an earlier one. Answer: seconds until
    two calls have answered and nothing is being built ("warm_s"), how many engines were built ("warm_builds")."""

    peer: str

    def answer(self, state: State) -> dict[str, Any]:
        from benchmarks.gpu.work import compile_with

        built, count = state.kept["built"], BuildCount()
        start = time.perf_counter()
        with torch.no_grad():
            compiled = compile_with(self.peer, [], state.kept["row"].dtype)(built.model)
            call = functools.partial(built.call, compiled)
            call(), call()
            torch_hybrid_backend.wait_for_builds()
            on.wait(state.kept["row"].device)
        return {"warm_s": round(time.perf_counter() - start, 2), "warm_builds": int(count)}
