"""The work of a row's worker (`torch_hybrid_backend.bench.worker`): messages that answer with figures. A worker has one row."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # with the imports, not with the first compilation

from benchmarks.gpu import device as on
from benchmarks.gpu import kernels, models, tensorrt
from benchmarks.models import Size
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.bench.peers.hybrid import coverage
from torch_hybrid_backend.bench.worker import State
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.core.program import DeviceLaunch, Program
from torch_hybrid_backend.runtime.program_runner import ProgramRunner

Compiled = Callable[..., Any]


def _hybrid(
    plans: list[Plan], mode: str | None, engines: str | None = None
) -> Callable[[Callable[..., Any]], Compiled]:
    config = Config.from_env(os.environ).with_options({"engines": engines} if engines else None, mode)
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    return lambda function: torch.compile(function, backend=backend)


def compile_with(peer: str, plans: list[Plan], dtype: str = "") -> Callable[[Callable[..., Any]], Compiled]:
    """Compile as a peer does; of ours the plans are appended to `plans`. Both are asked in the same mode: the default one, or "max-autotune".
    Some are ours with certain engines only (`tensorrt.ENGINES`)."""
    if peer in tensorrt.ENGINES:
        return _hybrid(plans, None, tensorrt.ENGINES[peer])
    peer, _, mode = peer.partition(" ")
    match peer:
        case "eager":
            return lambda function: function
        case "inductor":
            return lambda function: torch.compile(function, mode=mode or None)
        case "hybrid":
            return _hybrid(plans, mode or None)
        case "torch_tensorrt":
            return tensorrt.own_backend(dtype)
    raise ValueError(f"there is no peer {peer!r}; it must be one of {', '.join(('hybrid', *tensorrt.PEERS))}")


# Ceilings.


@dataclass(frozen=True, slots=True)
class Rooflines:
    """Answer: what the device does at most. "copy_gbytes": bytes read and written by a copy of over four times the second-level cache;
    "matmul_<dtype>_tflops"; "launch_us": one of a loop of the smallest operators."""

    device: str
    size: Size
    budget_s: float = 1.0

    def answer(self, state: State) -> dict[str, float]:
        count, edge = (1 << 30, 8192) if self.size == "full" else (1 << 20, 128)
        source = torch.randn(count // 4, device=self.device)
        target = torch.empty_like(source)
        found = {"copy_gbytes": 2 * source.nbytes / self._us(lambda: target.copy_(source)) / 1e3}
        for dtype in on.DTYPES:
            kind = on.allow(dtype)
            a, b = (torch.randn(edge, edge, device=self.device).to(kind) for _ in range(2))
            out = torch.empty_like(a)
            us = self._us(functools.partial(torch.mm, a, b, out=out))
            found[f"matmul_{dtype}_tflops"] = 2.0 * edge**3 / us / 1e6
        small = torch.zeros(1, device=self.device)
        found["launch_us"] = self._us(small.zero_)
        return {name: round(value, 3) for name, value in found.items()}

    def _us(self, call: Callable[[], object]) -> float:
        (timing,) = on.time_calls([call], self.budget_s / 6, self.device)
        return timing.low_us


# What the host takes.


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Answer: microseconds of the host. "bare_launch_us": one launch of a loop of nothing else; "per_kernel_us": one kernel more in a plan of
    the same kernels; "above_bare_us": their difference; "fixed_us": a plan of no kernel, by extrapolation. Nothing waits for the device but
    between rounds."""

    device: str
    kernels: int = 200
    rounds: int = 30

    def answer(self, state: State) -> dict[str, Any]:
        program, inputs = _smallest_program(self.device)
        one, many = (
            ProgramRunner(dataclasses.replace(program, steps=program.steps * count, origins=()))
            for count in (1, self.kernels)
        )
        bare = _bare_loop(program, inputs, self.kernels)
        taken: list[list[float]] = [[], [], []]
        calls = (lambda: one(inputs), lambda: many(inputs), bare)
        for _ in range(self.rounds + 2):
            for samples, call in zip(taken, calls, strict=True):
                on.wait(self.device)
                start = time.perf_counter_ns()
                call()
                samples.append((time.perf_counter_ns() - start) / 1e3)
        on.wait(self.device)
        first_us, all_us, bare_us = (statistics.median(samples[2:]) for samples in taken)
        per_kernel = (all_us - first_us) / (self.kernels - 1)
        bare_launch = bare_us / self.kernels
        figures = {
            "bare_launch_us": bare_launch,
            "per_kernel_us": per_kernel,
            "above_bare_us": per_kernel - bare_launch,
            "fixed_us": first_us - per_kernel,
        }
        return {name: round(value, 3) for name, value in figures.items()} | {"kernel": program.steps[0].label}


def _smallest_program(device: str) -> tuple[Program, list[torch.Tensor]]:
    """A kernel on four numbers, and the time it takes."""
    regions: list[CompiledRegion] = []
    config = Config.from_env(os.environ).with_options({"placement": "estimate"}, None)
    backend = functools.partial(compile_graph, config=config, on_regions=lambda found: regions.extend(found.values()))
    x = torch.ones(4, device=device)
    torch.compile(lambda x: torch.relu(x) + 1, backend=backend)(x)
    if not regions or regions[0].program is None:
        raise RuntimeError("no engine runs the smallest kernel there is")
    return regions[0].program, [x]


def _bare_loop(program: Program, inputs: Sequence[torch.Tensor], count: int) -> Callable[[], int]:
    """`count` launches of a program's kernel in C; of nothing where the kernel is none of a GPU."""
    library = _compiled_c(Path(__file__).parent / "bare_launch.c")
    library.BareLaunches.restype = ctypes.c_int64
    launch, function, parameters = ctypes.cast(library.NoLaunch, ctypes.c_void_p), ctypes.c_void_p(), None
    threads = shared = 0
    step = program.steps[0]
    if type(step) is DeviceLaunch:
        driver = ctypes.CDLL("libcuda.so.1")
        module, code = ctypes.c_void_p(), Path(step.module).read_bytes()
        for status in (
            driver.cuModuleLoadData(ctypes.byref(module), code),
            driver.cuModuleGetFunction(ctypes.byref(function), module, step.symbol.encode()),
        ):
            if status != 0:
                raise RuntimeError(f"the driver cannot load {step.symbol}: {status}")
        launch = ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p)
        result = torch.empty_like(inputs[0])
        addresses = [inputs[0].data_ptr(), result.data_ptr(), *(0 for _ in step.scratch)]
        values = [ctypes.c_uint64(address) for address in addresses]
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        threads, shared = step.threads, step.shared_bytes
        kept: object = (values, result)
    else:
        kept = None

    def run(_kept: object = kept) -> int:
        nanoseconds: int = library.BareLaunches(launch, 1, threads, shared, function, parameters, count)
        if nanoseconds < 0:
            raise RuntimeError(f"a bare launch failed: {-nanoseconds}")
        return nanoseconds

    return run


def _compiled_c(source: Path) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc, gcc or clang) for the loop of bare launches")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


# Rows that peers share.


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A case of the kernel table on several peers. Answer: a list of results, one for each: microseconds, what is reached and its share."""

    case: str
    peers: tuple[str, ...]
    dtype: str
    device: str
    size: Size
    ceilings: dict[str, float]
    budget_s: float = 1.0

    def answer(self, state: State) -> list[dict[str, Any]]:
        (case,) = (each for each in kernels.CASES if each.name == self.case)
        inputs = case.inputs(self.size, on.allow(self.dtype), self.device)
        expected = case.function(*inputs)
        wide = torch.float64 if self.dtype in ("fp32", "tf32") else torch.float32
        exact = case.function(*(t.to(wide) if t.is_floating_point() else t for t in inputs))
        flops, size_bytes = case.work(inputs, expected)
        results: dict[str, dict[str, Any]] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for peer in self.peers:
            results[peer] = {"model": f"{case.name} {self.dtype}", "batch": 1, "peer": peer, "kind": case.kind}
            plans: list[Plan] = []
            try:
                compiled = compile_with(peer, plans)(case.function)
                compiled(*inputs)
                why = on.mistake([expected], [exact], on.leaves(compiled(*inputs)), self.dtype)
            except Exception as error:  # a peer that cannot run a kernel is a result
                why = _first_line(error)
            if why:
                results[peer]["gap"] = why
            else:
                calls[peer] = functools.partial(compiled, *inputs)
                if plans:
                    results[peer]["engines"] = sorted({region.engine for plan in plans for region in plan.regions})
        del exact
        timings = on.time_calls(list(calls.values()), self.budget_s, self.device) if calls else ()
        for peer, timing in zip(calls, timings, strict=True):
            reached = kernels.share(flops, size_bytes, timing.median_us, self.ceilings, self.dtype)
            results[peer] |= {"median_ms": round(timing.median_us / 1e3, 5), **reached}
        return list(results.values())


@dataclass(frozen=True, slots=True)
class Build:
    """Build a model on its device, and run it in eager in a wider dtype, which results are judged by. There is no answer."""

    case: str
    batch: int
    dtype: str
    device: str
    size: Size

    def answer(self, state: State) -> None:
        kept = state.kept
        case, dtype = models.CASES[self.case], on.allow(self.dtype)
        kept["row"], kept["calls"] = self, {}
        with torch.set_grad_enabled(case.trains):
            built = models.wider(case, self.size, self.batch, dtype, self.device)
            kept["exact"] = _results(case, built, built.model)
            del built
            before = on.allocated_mib(self.device)
            if not case.trains:  # else each peer has a model of its own: a step changes it
                kept["built"] = case.build(self.size, self.batch, dtype, self.device)
        kept["shared_mib"] = on.allocated_mib(self.device) - before


def _results(case: models.ModelCase, built: models.Built, compiled: Compiled) -> list[torch.Tensor]:
    """Results of the second call: ours takes its plan from that on. Of a training step the losses of both, the second of which tells whether
    the first step was right."""
    first, second = (on.leaves(built.call(compiled)) for _ in range(2))
    return [*first, *second] if case.trains else second


@dataclass(frozen=True, slots=True)
class PreparePeer:
    """Compile the model for a peer and check it; eager comes first. Answer: its result without times: seconds of compiling, the
    plan's coverage, and on a GPU the peak memory of a call: the model's, and what the peer holds and takes besides, in PyTorch's allocator
    ("peak_mib") and elsewhere ("outside_mib"). Where engines are built off the call, the seconds of that ("build_s"); the result is that of
    the engines."""

    peer: str

    def answer(self, state: State) -> dict[str, Any]:
        row: Build = state.kept["row"]
        case = models.CASES[row.case]
        plans: list[Plan] = []
        others_mib = on.allocated_mib(row.device) - state.kept["shared_mib"]  # of peers that were prepared before
        outside_mib = on.outside_mib(row.device)
        figures: dict[str, Any] = {}
        with torch.set_grad_enabled(case.trains):
            built: models.Built = state.kept.get("built") or case.build(
                row.size, row.batch, on.DTYPES[row.dtype], row.device
            )
            start = time.perf_counter()
            compiled = compile_with(self.peer, plans, row.dtype)(built.model)
            result = _results(case, built, compiled)
            on.wait(row.device)
            figures["compile_s"] = round(time.perf_counter() - start, 2)
            call = functools.partial(built.call, compiled)
            if tensorrt.builds(self.peer):
                figures["build_s"] = round(tensorrt.settle(call), 2)
                result = on.leaves(call())
            state.kept.setdefault("expected", result)
            if why := on.mistake(state.kept["expected"], state.kept["exact"], result, row.dtype):
                return {"gap": why}
            on.allocated_mib(row.device)
            call()
            peak = on.peak_mib(row.device)
        state.kept["calls"][self.peer] = call
        if peak:
            figures["peak_mib"] = round(peak - others_mib, 1)
            figures["outside_mib"] = round(on.outside_mib(row.device) - outside_mib, 1)
        return figures | (_coverage(plans, self.peer) if plans else {})


def _coverage(plans: list[Plan], peer: str) -> dict[str, Any]:
    """The operators that the plans cover. Engines that are built off the call have a graph placed anew: its last plan counts."""
    if not tensorrt.builds(peer):
        return coverage(plans)
    found = list({plan.graph: plan for plan in plans}.values())
    return coverage(found) | {"engines": sorted({region.engine for plan in found for region in plan.regions})}


@dataclass(frozen=True, slots=True)
class TimePeers:
    """Time the peers that were prepared against each other. Answer: by peer, milliseconds of a call."""

    budget_s: float

    def answer(self, state: State) -> dict[str, dict[str, Any]]:
        row: Build = state.kept["row"]
        calls: dict[str, Callable[[], Any]] = state.kept["calls"]
        with torch.set_grad_enabled(models.CASES[row.case].trains):
            timings = on.time_calls(list(calls.values()), self.budget_s, row.device)
        return {
            peer: {
                "median_ms": round(timing.median_us / 1e3, 5),
                "spread_ms": round(timing.spread_us / 1e3, 5),
                "rounds": timing.rounds,
            }
            for peer, timing in zip(calls, timings, strict=True)
        }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
