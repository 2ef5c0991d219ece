"""Devices' default random generators: what programs take of them in a call, and runs repeated with the same numbers.

with own_generator(torch.get_rng_state()), apart():     # in a thread that tries what nobody shall notice
    torch.rand(3)                                       # the default generator stays as it is
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.torch_private import HigherOrderOperator, OpOverload, TorchDispatchMode

_T = TypeVar("_T")
# Two calls shall not take the same numbers. PyTorch's own lock of a generator cannot be held from Python: an operator that draws in another
# thread at this very moment can take numbers that a call takes as well.
_taking = threading.Lock()
_GROUP = 4  # the offset of a generator counts numbers, which kernels draw by so many


def default_generator(device: Device) -> torch.Generator:
    """The generator that operators on the device draw from where none is given. Raises HybridError where this package knows of none."""
    if device.is_host:
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    raise HybridError(f"random numbers are drawn on the CPU and on CUDA, not on {device}")


def is_captured(device: Device) -> bool:
    """True if the caller captures the device's current stream into a CUDA graph. The state of a generator is then on the device, where only
    PyTorch's operators advance it with each replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, slots=True)
class Taken:
    """Takes numbers of a device's generator, of the Philox family: a callback of a plan.

    `groups`: how many groups of four numbers each operator takes. A call returns the seed, and for each operator how many groups were taken
    before it: int64, without dimensions, on the CPU. Raises HybridError during the capture of a CUDA graph, which would have the same numbers
    in each replay.
    """

    device: Device
    groups: tuple[int, ...]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if is_captured(self.device):
            raise HybridError(
                "kernels draw no random numbers while a CUDA graph is captured: eager has to run the call"
            )
        generator = default_generator(self.device)
        with _taking:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + _GROUP * sum(self.groups))
        counters = itertools.accumulate(self.groups[:-1], initial=offset // _GROUP)
        # As int64: a seed may have all 64 bits.
        signed = seed - (1 << 64) if seed >> 63 else seed
        return [torch.tensor(number, dtype=torch.int64, device="cpu") for number in (signed, *counters)]


_own: ContextVar[torch.Generator | None] = ContextVar("own generator", default=None)


@contextlib.contextmanager
def own_generator(state: torch.Tensor) -> Iterator[None]:
    """Keep what this thread tries inside from the host's default generator: the thread draws from one of its own, beginning with `state`. That
    holds for `Replay`, and for operators within `apart`."""
    own = torch.Generator()
    own.set_state(state)
    token = _own.set(own)
    try:
        yield
    finally:
        _own.reset(token)


def draws_apart() -> bool:
    """True if this thread has a generator of its own."""
    return _own.get() is not None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """PyTorch's operators, called by this thread inside, draw from its own generator, where it has one. Each takes some microseconds longer."""
    own = _own.get()
    with contextlib.nullcontext() if own is None else _Apart(own):
        yield


def can_draw_apart(target: object) -> bool:
    """True if an operator that draws random numbers, a node's target, draws them from another generator within `apart`, on the CPU."""
    return _taking_generator(target) is not None


class _Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a generator to all operators that take one. Bodies of control flow are run within it too."""

    supports_higher_order_operators = True

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*(self._within(a) if isinstance(a, torch.nn.Module) else a for a in args), **kwargs)
        run = _taking_generator(func)
        if run is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return run(*args, **{**kwargs, "generator": self._generator})

    def _within(self, body: torch.nn.Module) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            with self:
                return body(*operands)

        return run


# An overload -> the one of the same operator that takes a generator too.
_OVERLOADS = {
    "default": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}


@functools.cache
def _taking_generator(target: object) -> Callable[..., Any] | None:
    """The function of an operator's arguments, and of the keyword `generator`, that computes what the operator does; None where the operator
    draws nothing, or from the default generator alone."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return None
    if any(argument.name == "generator" for argument in target._schema.arguments):
        return target
    if target is torch.ops.aten.native_dropout.default:
        return _dropout
    packet, other = target.overloadpacket, _OVERLOADS.get(target._overloadname, "")
    return getattr(packet, other) if other in packet.overloads() else None


def _dropout(
    x: torch.Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of `aten.native_dropout` on the CPU: the result, and which elements were kept."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p, generator=generator)
    return x.mul(kept).mul_(0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept


class Replay:
    """Several runs of one piece of work on a device, which draw the same numbers, and after which the generator is as one run leaves it.

    `draws`: whether it draws any; where it does not, and during a capture, which allows none of this, nothing is done. Not for threads: others
    that draw meanwhile draw these numbers too.
    """

    def __init__(self, device: Device, *, draws: bool) -> None:
        own = _own.get() if device.is_host else None
        self._generator = (own or default_generator(device)) if draws and not is_captured(device) else None
        self._before = self._state()
        self._left: list[torch.Tensor] = []  # by each whole run

    def run(self, call: Callable[[], _T]) -> _T:
        """Return what a whole run returns."""
        self.rewind()
        result = call()
        self._left += self._state()
        return result

    @property
    def agrees(self) -> bool:
        """True if the last whole run left the generator as the first one did."""
        return not self._left or torch.equal(self._left[0], self._left[-1])

    def rewind(self) -> None:
        """The generator as it was before the runs."""
        self._put(self._before)

    def finish(self) -> None:
        """The generator as the first whole run left it, or as it was where there was none."""
        self._put(self._left or self._before)

    def _state(self) -> list[torch.Tensor]:
        return [] if self._generator is None else [self._generator.get_state()]

    def _put(self, states: Sequence[torch.Tensor]) -> None:
        if self._generator is not None:
            self._generator.set_state(states[0])
