"""Worker processes: each prepares one model on one peer, checks its results, then times calls on demand.

Each peer has a process of its own, so that its caches, thread pools and allocators neither help nor hurt another peer. The parent
(`bench.process`) sends messages: `Prepare` once, then `Round`s, `Account` last. The worker calls `answer(state)` of each message and sends
back the value that this returns.
"""

from __future__ import annotations

import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from torch_hybrid_backend.bench import peers
from torch_hybrid_backend.bench.calls import Inputs, as_tensors_only, tensors
from torch_hybrid_backend.bench.peers import EAGER, FLOAT32, Peer, Prepared, Setting
from torch_hybrid_backend.errors import HybridError, failures, ignored
from torch_hybrid_backend.measuring.measure import sample
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.partition.deviation import relative_error
from torch_hybrid_backend.processes import inside
from torch_hybrid_backend.torch_private import same

_MIB = 1 << 20
# A result that is off by as much is no nearer to eager's than zeros are.
_WORST_RMS_ERROR = 1.0
_REASON_CHARACTERS = 300


class Message(Protocol):
    def answer(self, state: State) -> Any:
        """Handle the message. The result is sent back."""


@dataclass(slots=True)
class State:
    """State of a worker between messages."""

    prepared: Prepared = field(default_factory=lambda: Prepared(lambda: None))
    preparing_mib: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict)  # values of messages that are defined elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A model at one batch size, in one precision. `folder`: for temporary files.

    `precision_tolerance`: hybrid's setting of this name; None: its default. `training`: True to time a training step (forward, backward, SGD)
    instead of inference.
    """

    threads: int
    folder: Path
    batch: int | None = None
    precision: str = FLOAT32
    precision_tolerance: float | None = None
    training: bool = False

    @property
    def key(self) -> str:
        """The name of this work in caches that outlive a run. The precision is not part of the name."""
        raise NotImplementedError

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model and its inputs, equal in every process."""
        raise NotImplementedError

    def calibration(self, inputs: Inputs) -> list[Inputs]:
        """Inputs that calibrate the ranges of activations, the same for every peer."""
        raise NotImplementedError

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the model needs in its workers."""
        return {}

    @property
    def reference(self) -> Path:
        """The path of the file that `Reference` writes."""
        return self.folder / "reference.pt"


def _built(work: Work) -> tuple[nn.Module, Inputs]:
    torch.set_num_threads(work.threads)
    return work.build()


@dataclass(frozen=True, slots=True)
class Reference:
    """Message: run the model in eager, as written and in float64, and write both results to a file. Answer: `Facts`."""

    work: Work

    def answer(self, state: State) -> Facts:
        model, inputs = _built(self.work)
        facts = Facts(0, inputs.batch, model.training)
        made = _sums(model, inputs)
        setting = Setting(self.work.threads, self.work.folder, training=self.work.training)
        eager = peers.by_name()[EAGER].load()
        prepared = eager(model, inputs, setting)
        expected, flops = _checked(prepared), _flops(prepared)
        is_random = not _is_same(expected, _checked(prepared, seed=1), None)
        exact = None
        with ignored(Exception):  # a model for one dtype only: results are then compared by fixed tolerances
            exact = _checked(eager(model.double(), inputs.floats(torch.float64), setting))
        torch.save({"expected": expected, "exact": exact, "is_random": is_random, "made": made}, self.work.reference)
        return dataclasses.replace(facts, flops=flops, is_random=is_random)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a model, found before it is timed.

    flops: floating-point operations of one call. batch: the batch size; None if the inputs have none. was_training: True if the factory
    returned the model in training mode. is_random: True if results depend on random numbers, so that they cannot be compared.
    """

    flops: int
    batch: int | None
    was_training: bool
    is_random: bool = False


def _flops(prepared: Prepared) -> int:
    """Floating-point operations of a call; 0 where PyTorch's counter fails, as it does for a module whose input is a view of a parameter."""
    from torch.utils.flop_counter import FlopCounterMode

    with ignored(Exception), FlopCounterMode(display=False) as counter:
        _checked(prepared)
        return int(counter.get_total_flops())
    return 0


def _checked(prepared: Prepared, seed: int = 0) -> list[torch.Tensor]:
    """Copies of the output tensors of a call from the initial state of the model, with the same random numbers each time."""
    prepared.reset()
    torch.manual_seed(seed)
    return [value.detach().clone() for value in tensors(prepared.call())]


def _sums(model: nn.Module, inputs: Inputs) -> list[float]:
    """Sums of the tensors of a model and its inputs, which show if two processes made the same model."""
    made = [*model.state_dict().values(), *inputs.tensors()]
    plain = [value for value in made if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided]
    # PyTorch sums neither quantized tensors nor 8-bit floats.
    summed = [v for v in plain if not (v.is_quantized or v.is_complex() or (v.is_floating_point() and v.itemsize == 1))]
    return [float(value.sum(dtype=torch.float64)) for value in summed]


@dataclass(frozen=True, slots=True)
class Ready:
    """The answer to `Prepare`. `error`: the reason why the peer cannot be timed; empty if it can.

    `import_s`: seconds to import the peer's packages. `first_call_s`: seconds from the built model to its first result. `compile_s`: seconds to
    its second result, less two steady calls. Errors are against eager as written, and None if they are not known. `max_error`: the largest
    absolute difference over all outputs. `rms_error`: the root mean square of the difference, divided by that of eager's output; of several
    floating-point outputs, the largest.
    """

    error: str
    import_s: float
    compile_s: float
    max_error: float | None
    rms_error: float | None
    first_call_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepare:
    """Message: convert or compile the model for the peer, and check its results. Answer: `Ready`."""

    work: Work
    peer: Peer
    scratch: Path

    def answer(self, state: State) -> Ready:
        work = self.work
        precision = self.peer.precision or work.precision
        if self.peer.needs(precision):
            peers.add_peers_folder()
        model, inputs = _built(work)
        reference = torch.load(work.reference, weights_only=True)
        if not _are_alike(_sums(model, inputs), reference["made"]):
            raise HybridError(
                "two processes made different models or inputs, so results cannot be compared: have the factory seed its random numbers"
            )
        calibration = work.calibration(inputs) if precision in peers.CALIBRATED else []
        if self.peer.tensors_only:
            calibration = [as_tensors_only(model, each)[1] for each in calibration]
            model, inputs = as_tensors_only(model, inputs)
        setting = Setting(
            work.threads, self.scratch, precision, calibration, work.precision_tolerance, training=work.training
        )
        self.scratch.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        prepare = self.peer.load()
        import_s = time.perf_counter() - start
        start = time.perf_counter()
        state.prepared = prepare(model, inputs, setting)
        call = state.prepared.call
        call()
        first_call_s = time.perf_counter() - start
        call()
        second_s = time.perf_counter() - start
        steady_s = _seconds(call) + _seconds(call)
        result = _checked(state.prepared)
        del model
        error, largest, rms = "", None, None
        if not reference["is_random"]:
            error, largest, rms = compare(reference, result, precision, together=work.training)
        state.preparing_mib = _peak_mib()
        _forget_peak()
        return Ready(error, import_s, max(0.0, second_s - steady_s), largest, rms, first_call_s)


def _are_alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(
        x == y or math.isclose(x, y, rel_tol=1e-9) or (math.isnan(x) and math.isnan(y))
        for x, y in zip(a, b, strict=True)
    )


def compare(
    reference: dict[str, Any], result: list[torch.Tensor], precision: str = FLOAT32, *, together: bool = False
) -> tuple[str, float | None, float | None]:
    """Return what is wrong with a result, or "", with the `max_error` and `rms_error` of `Ready`.

    As written, a result must equal eager's up to rounding. In another precision it must only be nearer to eager's than zeros are.
    together: compute `rms_error` over all outputs as one tensor; for gradients, of which some are zero up to rounding.
    """
    expected, exact = reference["expected"], reference["exact"]
    if [value.shape for value in expected] != [value.shape for value in result]:
        return f"wrong answer: shapes {_shapes(result)}, eager's are {_shapes(expected)}", None, None
    pairs = zip(expected, result, strict=True)
    largest = max((_wide(a) - _wide(b)).abs().max().item() if a.numel() else 0.0 for a, b in pairs) if expected else 0.0
    rms, error = (
        relative_error(_joined(expected), _joined(result)) if together else relative_error(expected, result),
        "",
    )
    if precision != FLOAT32:
        if rms is not None and rms >= _WORST_RMS_ERROR:
            error = f"wrong answer: off by {rms:.2g} times eager's root mean square"
    elif not _is_same(expected, result, exact):
        error = f"wrong answer: up to {largest:.2g} from eager's"
    return error, largest, rms


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in values])


def _is_same(expected: list[torch.Tensor], result: list[torch.Tensor], exact: list[torch.Tensor] | None) -> bool:
    return bool(same(expected, result, exact, equal_nan=True))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _shapes(values: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in values]


@dataclass(frozen=True, slots=True)
class Round:
    """Message: time calls for `budget_s` seconds. Answer: `Timed`."""

    budget_s: float

    def answer(self, state: State) -> Timed:
        load = OtherLoad()
        nanoseconds = sample([state.prepared.call], self.budget_s, min_rounds=1, max_rounds=1000)[0]
        return Timed(nanoseconds, load.share)


@dataclass(frozen=True, slots=True)
class Timed:
    """Nanoseconds of each call. `waited`: the share of the time for which threads waited for a core (`OtherLoad.share`)."""

    nanoseconds: list[int]
    waited: float


@dataclass(frozen=True, slots=True)
class Account:
    """Message: report. Answer: the peer's own report, and the peak resident memory of the process in MiB, until the check and since then."""

    def answer(self, state: State) -> dict[str, object]:
        return {
            **state.prepared.report(),
            "preparing_mib": round(state.preparing_mib, 1),
            "running_mib": round(_peak_mib(), 1),
        }


def _peak_mib() -> float:
    """Peak resident memory of this process alone since the last `_forget_peak`, in MiB; 0 if the system does not report it."""
    with ignored(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / _MIB
    return 0.0


def _forget_peak() -> None:
    with ignored(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a message that raised an error. `why`: the error in one line. `is_explained`: True if the error is a `HybridError`, whose
    text is a sentence for the user."""

    why: str
    is_explained: bool


def _in_one_line(error: Exception) -> str:
    """The first line of an error's text, and the next one after each line that ends in a colon."""
    said = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        said = f"{said} {line}".lstrip()
        if not said.endswith(":"):
            break
    said = said if len(said) <= _REASON_CHARACTERS else f"{said[:_REASON_CHARACTERS]} ..."
    return said if isinstance(error, HybridError) else f"{type(error).__name__}: {said}".rstrip(": ")


def environment(threads: int, cache: Path) -> dict[str, str]:
    """Environment variables of a worker, which must be set before torch is imported."""
    return {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
        "HYBRID_CACHE_DIR": str(cache / "hybrid"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def main(lifeline: int, descriptor: int) -> None:
    """Answer messages until the pipe is closed."""
    inside.begin(lifeline)
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
            except failures(Exception) as error:  # a peer that cannot run a model is a result
                traceback.print_exc()
                answer = Failed(_in_one_line(error), isinstance(error, HybridError))
            connection.send(answer)
