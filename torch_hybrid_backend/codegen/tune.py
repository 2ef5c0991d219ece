"""Tuning: every variant of every kernel, one after the other, each against the best so far (`placement=tune`).

A round compiles the next variant of each kernel together, and times them in one search. Times are kept on disk after each round: tuning can be
stopped (Ctrl-C: the best variants so far are used), and the next process goes on from there. A `Tuner` shares the variants out among
several processes, as `hybrid tune` does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch

from torch_hybrid_backend.codegen.assemble import RegionKernels
from torch_hybrid_backend.codegen.kernel_cache import Artifact, JobCompiler
from torch_hybrid_backend.codegen.search import (
    ALONE,
    CompiledVariant,
    KernelOptions,
    compiled_variant,
    search,
)
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import RunProgram
from torch_hybrid_backend.errors import tells_of_later
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.measuring.other_load import OtherLoad
from torch_hybrid_backend.progress import Progress

_ROUNDS = 5

Compile = Callable[[Sequence[Kernel]], Sequence[Artifact | Exception]]


class Tuner:
    """Policy for tuning in a thread: the variants to try, and the compiler to use. The base class tries all variants, with this process's
    compiler; others derive from it (`tuned_by`)."""

    def claim(self, device: Device, options: Sequence[KernelOptions]) -> Mapping[str, str]:
        """The variants that the next round tries: kernel key -> name of an untried variant. Empty if there is nothing left to try here.

        options: the kernels of a region that have untried variants, one of each key.
        """
        return {option.key: option.untried[0].name for option in options}

    def report(self, device: Device, options: Sequence[KernelOptions], is_disturbed: bool) -> None:
        """Take the times of a round for the kernels that were claimed. A claimed variant without a time stays unknown, for a later process to
        try. is_disturbed: other load was felt."""

    def stop(self) -> None:
        """End tuning after Ctrl-C. The base class does nothing: `tune` has ended its region."""

    def compiler(self, own: JobCompiler) -> JobCompiler:
        """The compiler to use in place of this process's `own`."""
        return own


_tuner: ContextVar[Tuner] = ContextVar("tuner", default=Tuner())  # noqa: B039 - a Tuner has no state


def tuner() -> Tuner:
    """The tuner of this thread."""
    return _tuner.get()


@contextlib.contextmanager
def tuned_by(other: Tuner) -> Iterator[None]:
    """Let graphs that this thread compiles within the context be tuned by another tuner."""
    token = _tuner.set(other)
    try:
        yield
    finally:
        _tuner.reset(token)


def tune(
    kernels: RegionKernels,
    options: Sequence[KernelOptions],
    compile_kernels: Compile,
    run_program: RunProgram,
    inputs: Sequence[torch.Tensor],
    keep_times: Callable[[str, Mapping[str, float], bool], None],
    start_progress: Callable[[str, int], Progress],
) -> list[KernelOptions]:
    """The options with the fastest variants chosen; none is left `untried` unless Ctrl-C stopped tuning, or other processes have claimed it.

    keep_times: a callback, called after each round with each kernel's key and times, and True if other load was felt. start_progress: starts
    the display of progress and gain.
    """
    found = list(options)
    device = kernels.backend.device
    load = OtherLoad()

    def compile_quietly(wanted: Sequence[Kernel]) -> Sequence[Artifact | Exception]:
        nonlocal load
        made = compile_kernels(wanted)
        load = OtherLoad()  # what compiled here is none
        return made

    total = len({(option.key, variant.name) for option in options for variant in option.untried})
    with start_progress(f"tuning {kernels.region.name}", total) as progress:
        try:
            while claimed := tuner().claim(device, _distinct(option for option in found if option.untried)):
                trials = [_only(option, claimed.get(option.key)) for option in found]
                tried = try_next_variant(kernels, trials, compile_quietly, run_program, inputs)
                is_disturbed = load.is_felt()
                found = [
                    replace(new, untried=tuple(v for v in old.untried if v.name != claimed.get(old.key)))
                    for old, new in zip(found, tried, strict=True)
                ]
                after = _distinct(option for option in found if option.key in claimed)
                for option in after:
                    keep_times(option.key, option.times, is_disturbed)
                    progress.step(_gain(options, found))
                tuner().report(device, after, is_disturbed)
        except KeyboardInterrupt:
            tuner().stop()
            progress.say("stopped: the best kernels so far are used; a later process goes on from here")
        progress.say(f"tuned {kernels.region.name}: {_gain(options, found)}")
    return found


def _distinct(options: Iterable[KernelOptions]) -> list[KernelOptions]:
    return list({option.key: option for option in options}.values())


def _only(option: KernelOptions, name: str | None) -> KernelOptions:
    """The option with one untried variant, or none."""
    return replace(option, untried=tuple(variant for variant in option.untried if variant.name == name))


def try_next_variant(
    kernels: RegionKernels,
    options: Sequence[KernelOptions],
    compile_kernels: Compile,
    run_program: RunProgram,
    inputs: Sequence[torch.Tensor],
) -> list[KernelOptions]:
    """The next untried variant of each kernel against its best so far."""
    untried = [option.untried[:1] for option in options]
    made = iter(compile_kernels([kernel for one in untried for variant in one for kernel in variant.kernels]))
    compiled = [[compiled_variant(v, [next(made) for _ in v.kernels]) for v in one] for one in untried]
    trials = [
        replace(option, compiled=(option.chosen, new[0]), best=0, is_open=True)
        if new and isinstance(new[0], CompiledVariant)
        else option
        for option, new in zip(options, compiled, strict=True)
    ]
    found = search(kernels, trials, run_program, inputs, 0.0, least_rounds=_ROUNDS)
    return [_decided(option, new, found.get(option.key, {})) for option, new in zip(options, compiled, strict=True)]


def _decided(
    option: KernelOptions, new: Sequence[CompiledVariant | Exception], now: Mapping[str, float]
) -> KernelOptions:
    """The option after a round in which the times `now` were taken."""
    if not new:
        return option
    name, chosen = option.untried[0].name, option.chosen.variant.name
    times, left = dict(option.times), option.untried[1:]
    if isinstance(new[0], Exception) and not tells_of_later(new[0]):
        # Nothing was found out. Without the operator's time alone a later process takes it for new, and tries again.
        times.pop(name + ALONE, None)
        return replace(option, times=times, untried=left)
    if not isinstance(new[0], CompiledVariant) or name not in now or chosen not in now:
        return replace(option, times={**times, name: math.inf}, untried=left)  # it does not exist, or cannot run
    # Times of different rounds are compared through the best's: the machine may be slower now.
    times.setdefault(chosen, now[chosen])
    times[name] = now[name] * times[chosen] / now[chosen]
    return replace(option, compiled=(*option.compiled, new[0]), untried=left).decided(times)


def _gain(before: Sequence[KernelOptions], after: Sequence[KernelOptions]) -> str:
    """Text for the time that changed choices save, over all kernels that have a choice."""
    pairs = [
        (a.times.get(b.chosen.variant.name), a.times.get(a.chosen.variant.name), a is b or a.chosen is b.chosen)
        for b, a in zip(before, after, strict=True)
    ]
    known = [(old, new, same) for old, new, same in pairs if old is not None and new is not None]
    old_us, new_us = sum(old for old, _, _ in known), sum(new for _, new, _ in known)
    if not known or not old_us:
        return "no kernel has another variant"
    faster = sum(not same and new < old for old, new, same in known)
    return f"{faster} of {len(known)} kernels faster, {old_us / 1e3:.2f} ms to {new_us / 1e3:.2f} ms ({1 - new_us / old_us:.1%} less)"
