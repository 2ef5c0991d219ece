"""What runs in a worker's process: one model on one peer, prepared, checked, then timed on demand.

A process per peer keeps caches, thread pools and allocators of one from helping or hurting another. The parent
(`benchmarks.process`) sends a message that has `answer(state)`, and gets what that returns: `Prepare` once, then `Round`s, `Memory` last.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.utils import same

from benchmarks import peers
from benchmarks.catalogue import MODELS
from benchmarks.models import Size, tensors
from benchmarks.peers import Peer, Prepared, Setting
from torch_hybrid_backend.measure import sample
from torch_hybrid_backend.partition.deviation import relative_error

_MIB = 1 << 20
_CALIBRATION_SEEDS = range(100, 108)
# From here on a result has less to do with eager's than zeros have.
_WORST_RMS_ERROR = 1.0


class Message(Protocol):
    def answer(self, state: State) -> Any:
        """Do what the message asks for; the result is sent back."""


@dataclass(slots=True)
class State:
    """What a worker keeps between messages."""

    prepared: Prepared = field(default_factory=lambda: Prepared(lambda: None))
    preparing_mib: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict)  # what other messages than those here keep


@dataclass(frozen=True, slots=True)
class Work:
    """One model at one batch size, and where its reference results are (see `Reference`)."""

    model: str
    size: Size
    batch: int
    threads: int
    folder: Path
    precision: str = peers.FLOAT32

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """The model and its inputs, equal in every process."""
        torch.set_num_threads(self.threads)
        entry = MODELS[self.model]
        return entry.build(self.size), entry.inputs(self.size, self.batch)

    def calibration(self) -> list[tuple[torch.Tensor, ...]]:
        """Other inputs than those that are timed, for the ranges of activations: the same for every peer."""
        return [MODELS[self.model].inputs(self.size, self.batch, seed) for seed in _CALIBRATION_SEEDS]

    @property
    def reference(self) -> Path:
        """The file of eager's outputs and of those in float64."""
        return self.folder / "reference.pt"


@dataclass(frozen=True, slots=True)
class Reference:
    """Run the model in eager, in float32 and in float64, and write both results. Answer: floating-point operations of one call."""

    work: Work

    def answer(self, state: State) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        model, inputs = self.work.build()
        with FlopCounterMode(display=False) as counter:
            expected = tensors(model(*inputs))
        exact = tensors(model.double()(*(v.double() if v.is_floating_point() else v for v in inputs)))
        torch.save({"expected": expected, "exact": exact}, self.work.reference)
        return counter.get_total_flops()


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to `Prepare`. `error` is empty where the peer may be timed, else why it may not.

    `compile_s`: seconds from the built model to its second result, less two steady calls. `import_s`: of the peer's packages.
    `max_error`: largest absolute difference from eager in float32, over all outputs. `rms_error`: root mean square of the difference over
    that of eager's, of the floating-point output for which it is largest.
    """

    error: str
    import_s: float
    compile_s: float
    max_error: float
    rms_error: float | None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Convert or compile the model for the peer, and check its results. Answer: `Ready`."""

    work: Work
    peer: Peer
    scratch: Path

    def answer(self, state: State) -> Ready:
        precision = self.peer.precision or self.work.precision
        if self.peer.needs(precision):
            peers.search_folder_apart()
        model, inputs = self.work.build()
        setting = Setting(self.work.threads, self.scratch, precision)
        if setting.is_int8:
            setting = dataclasses.replace(setting, calibration=self.work.calibration())
        self.scratch.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        prepare = self.peer.load()
        import_s = time.perf_counter() - start
        start = time.perf_counter()
        state.prepared = prepare(model, inputs, setting)
        call = state.prepared.call
        call(), call()
        first_s = time.perf_counter() - start
        steady_s = _seconds(call) + _seconds(call)
        result = tensors(call())
        del model
        error, largest, rms = compare(self.work.reference, result, precision)
        state.preparing_mib = _peak_mib()
        _forget_peak()
        return Ready(error, import_s, max(0.0, first_s - steady_s), largest, rms)


def compare(
    reference: Path, result: list[torch.Tensor], precision: str = peers.FLOAT32
) -> tuple[str, float, float | None]:
    """What is wrong with the result, or ""; how far it is from eager: `max_error` and `rms_error` of `Ready`.

    In float32 the result must be eager's but for rounding, in another precision only closer to it than zeros are.
    """
    values = torch.load(reference)
    expected, exact = values["expected"], values["exact"]
    if [value.shape for value in expected] != [value.shape for value in result]:
        return f"wrong answer: shapes {_shapes(result)}, eager's are {_shapes(expected)}", float("nan"), None
    pairs = zip(expected, result, strict=True)
    largest = max((a.double() - b.double()).abs().max().item() if a.numel() else 0.0 for a, b in pairs)
    rms, error = relative_error(expected, result), ""
    if precision != peers.FLOAT32:
        if rms is not None and rms >= _WORST_RMS_ERROR:
            error = f"wrong answer: off by {rms:.2g} times eager's root mean square"
    elif not same(expected, result, exact):
        error = f"wrong answer: up to {largest:.2g} from eager's"
    return error, largest, rms


def _shapes(values: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


@dataclass(frozen=True, slots=True)
class Round:
    """Time calls for `budget_s` seconds. Answer: nanoseconds of each call."""

    budget_s: float

    def answer(self, state: State) -> list[int]:
        return sample([state.prepared.call], self.budget_s, min_rounds=1, max_rounds=1000)[0]


@dataclass(frozen=True, slots=True)
class Account:
    """Answer: the peer's report, and the process's peak resident memory until it was checked and since, in MiB."""

    def answer(self, state: State) -> dict[str, object]:
        return {
            **state.prepared.report(),
            "preparing_mib": round(state.preparing_mib, 1),
            "running_mib": round(_peak_mib(), 1),
        }


def _peak_mib() -> float:
    """Highest resident memory of this process (nothing of what it was forked from), since the last `_forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / _MIB
    return 0.0


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer where there is none: the first line of what was raised."""

    why: str


def environment(threads: int, cache: Path) -> dict[str, str]:
    """What a worker's environment must hold before torch is imported."""
    return {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
        "HYBRID_CACHE_DIR": str(cache / "hybrid"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def main(descriptor: int) -> None:
    """Answer messages until the pipe is closed."""
    connection = Connection(descriptor)
    state = State()
    with torch.no_grad():
        while True:
            try:
                message: Message = connection.recv()
            except EOFError:
                return
            try:
                answer = message.answer(state)
            except Exception as error:  # a peer that cannot run a model is a result, not a failure of the benchmark
                traceback.print_exc()
                answer = Failed(f"{type(error).__name__}: {error}".strip().splitlines()[0])
            connection.send(answer)
