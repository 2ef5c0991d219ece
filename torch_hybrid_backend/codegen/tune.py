"""Tuning: every variant of every kernel, one after the other, each against the best so far (`placement=tune`).

A round compiles the next variant of each kernel together, and times them in one search. Times are kept on disk after each round: tuning can be
stopped (Ctrl-C: the best variants so far are used), and the next process goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from torch_hybrid_backend.codegen.assemble import RegionKernels
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.codegen.search import (
    ALONE,
    CompiledVariant,
    KernelOptions,
    compiled_variant,
    search,
)
from torch_hybrid_backend.core.engine import RunProgram
from torch_hybrid_backend.errors import tells_of_later
from torch_hybrid_backend.loops.kernels import Kernel
from torch_hybrid_backend.progress import Progress

_ROUNDS = 5

Compile = Callable[[Sequence[Kernel]], Sequence[Artifact | Exception]]


def tune(
    kernels: RegionKernels,
    options: Sequence[KernelOptions],
    compile_kernels: Compile,
    run_program: RunProgram,
    inputs: Sequence[torch.Tensor],
    keep_times: Callable[[str, Mapping[str, float]], None],
    start_progress: Callable[[str, int], Progress],
) -> list[KernelOptions]:
    """The options with the fastest variants chosen; none is left `untried` unless Ctrl-C stopped tuning.

    keep_times: a callback, called with each kernel's key and times after each round. start_progress: starts the display of progress and gain.
    """
    found = list(options)
    total = len({(option.key, variant.name) for option in options for variant in option.untried})
    with start_progress(f"tuning {kernels.region.name}", total) as progress:
        try:
            while any(option.untried for option in found):
                tried = {option.key for option in found if option.untried}
                found = try_next_variant(kernels, found, compile_kernels, run_program, inputs)
                for option in {option.key: option for option in found if option.key in tried}.values():
                    keep_times(option.key, option.times)
                    progress.step(_gain(options, found))
        except KeyboardInterrupt:
            progress.say("stopped: the best kernels so far are used; a later process goes on from here")
        progress.say(f"tuned {kernels.region.name}: {_gain(options, found)}")
    return found


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
    faster = sum(not same for _, _, same in known)
    return f"{faster} of {len(known)} kernels faster, {old_us / 1e3:.2f} ms to {new_us / 1e3:.2f} ms ({1 - new_us / old_us:.1%} less)"
