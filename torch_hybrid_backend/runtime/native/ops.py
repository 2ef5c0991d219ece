"""The C++ runtime (csrc/) as Python objects: plans, guards and bindings that free themselves.

Enters: numbers, tensors and paths of kernel libraries. Leaves: `Plan.run`, the hot path. Every object here owns one handle
of the C++ side and frees it when it is collected. The library `_runtime.so` is opened on first use, never on import.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import platform
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_hybrid_backend.errors import (
    REFUSED_VALUES,
    STICKY,
    ArtifactError,
    DeviceError,
    HybridError,
    RefusedValuesError,
    failures,
)
from torch_hybrid_backend.machine import unsupported
from torch_hybrid_backend.runtime.native.libraries import OpenLibrary, use_library
from torch_hybrid_backend.runtime.native.module import native_module
from torch_hybrid_backend.torch_private import profiler_enabled

if TYPE_CHECKING:
    from torch_hybrid_backend.runtime.native.description import Expression, PlanDescription

log = logging.getLogger(__name__)

Callback = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# Whether torch.profiler (or a profiler of its kind) watches this thread.
_profiler_enabled = profiler_enabled

_LIBRARY = Path(__file__).resolve().parents[2] / "_runtime.so"
_NAMESPACE = "torch_hybrid_backend"

# After so many calls a guard has compared every byte where the kernel does not say what was written to (Guard::kCallsPerRound).
CALLS_PER_ROUND = 256

# Of Ed25519.
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64

_FREE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_CLOSE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class GuardKind(IntEnum):
    """Bytes that a guard compares when it is asked; the numbers are those of csrc/torch/guard.h."""

    EVERY_BYTE = 0
    LIVE = 1  # the pages that the kernel says were written to; where it cannot say, as the next
    LIVE_UNWATCHED = 2  # some, others each time: all within `CALLS_PER_ROUND` calls


class RunStatus(IntEnum):
    """End of a run; the numbers are those of csrc/include/plan.h."""

    DONE = 0
    STALE_BINDING = 1
    CALLBACK_RAISED = 2


class _Raised(threading.local):
    """The exception that this thread's last failing callback raised, on its way around the C++ frames."""

    error: BaseException | None = None


_raised = _Raised()
_callbacks: dict[int, tuple[Callback, ...]] = {}  # by plan handle; entries go with their plan


def _run_segment(plan: int, segment: int, outputs: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Runs a callback for the C++ plan. Returns `outputs` tensors, or one more where it raised (see csrc/torch/steps/callback.cc)."""
    try:
        results = list(_callbacks[plan][segment](inputs))
        if len(results) != outputs:
            raise HybridError(f"segment {segment} returned {len(results)} values instead of {outputs}")
    except BaseException as error:  # carried to Plan.run, which raises it unchanged
        _raised.error = error
        return [torch.empty(0, device="cpu")] * (outputs + 1)
    return results


def _also_caught_at_its_start(run_segment: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """`run_segment` called from C, which keeps what a signal's handler raises before the first line that Python runs: as kernels take their
    time, most signals are handled there."""
    try:
        runtime = importlib.import_module("torch_hybrid_backend._runtime")
    except ImportError:  # no module of this Python (see `module`)
        return run_segment
    return functools.partial(runtime.run_segment, run_segment, _raised, [torch.empty(0, device="cpu")])


@functools.cache
def _ops() -> Any:
    """The operators of the C++ runtime; loads it. Raises HybridError, with what to do, where it cannot be loaded."""
    if platform.system() != "Linux":  # Linux on yet other processors was never tried, but nothing is known to forbid it
        raise HybridError(f"{unsupported()}: use another backend here, such as torch.compile(model)")
    if not _LIBRARY.exists():
        raise HybridError(
            f"the C++ runtime {_LIBRARY.name} is missing from {_LIBRARY.parent}: build it with `pip install .` in the source"
            " tree (it needs a C++ compiler), or in place with `python setup.py build_ext --inplace`"
        )
    try:
        torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
    except failures(OSError) as error:
        raise HybridError(
            f"the C++ runtime {_LIBRARY} cannot be loaded into torch {torch.__version__} ({error}): build it again with"
            " `pip install .` and a C++ compiler"
        ) from error
    # Kept for the life of the process by the cache of this function's result.
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    # A segment may return views of its inputs. AOTAutograd warns of operators that do and do not say so.
    schema = "run_segment(int plan, int segment, int outputs, Tensor(a)[] inputs) -> Tensor(a)[]"
    library.define(schema)  # type: ignore[no-untyped-call]
    segments = _also_caught_at_its_start(_run_segment)
    library.impl("run_segment", segments, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    library.define("warn(str message) -> ()")  # type: ignore[no-untyped-call]
    library.impl("warn", log.warning, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # PyTorch would hand operators resolved copies of tensors that are lazily conjugated or negated: a segment would read other tensors than it
    # was traced with, and a guard would watch memory that nobody keeps.
    for name in ("run_segment", "plan_run", "plan_time", "guard_new", "binding_new"):
        for bit in ("Conjugate", "Negative"):
            library.impl(name, torch.library.fallthrough_kernel, bit)  # type: ignore[no-untyped-call]
    ops = torch.ops.torch_hybrid_backend
    try:
        operators = _Operators(library, ops)
    except AttributeError as error:
        raise HybridError(
            f"the C++ runtime {_LIBRARY} was built from older sources ({error}): build it again with `pip install .`, or in place"
            " with `python setup.py build_ext --inplace`"
        ) from error
    os.register_at_fork(after_in_child=_run_on_one_thread)
    return operators


def _run_on_one_thread() -> None:
    """In a forked child: OpenMP's threads are not copied, and the first parallel loop would wait for them for ever, eager's included.

    torch's DataLoader workers do the same. Spawned processes use all threads.
    """
    torch.set_num_threads(1)


class _Operators:
    """Operators resolved to their one overload: the lookup by packet costs more than some calls; and what finalizers call.

    Finalizers call C functions by address: the collector runs them at any moment, and while a graph is traced an operator would become
    a node of it.
    """

    def __init__(self, library: torch.library.Library, ops: Any) -> None:
        self._library = library
        self.plan_new = ops.plan_new.default
        self.plan_template_new = ops.plan_template_new.default
        self.plan_template_at = ops.plan_template_at.default
        self.size_table_new = ops.size_table_new.default
        self.size_table_at = ops.size_table_at.default
        self.plan_arena = ops.plan_arena.default
        self.open_library = ops.open_library.default
        self.open_module = ops.open_module.default
        self.use_cuda_driver = ops.use_cuda_driver.default
        self.plan_run = ops.plan_run.default
        self.plan_time = ops.plan_time.default
        self.guard_new = ops.guard_new.default
        self.guard_is_stale = ops.guard_is_stale.default
        self.guard_is_late = ops.guard_is_late.default
        self.watches_writes = ops.watches_writes.default
        self.binding_new = ops.binding_new.default
        self.artifact_open = ops.artifact_open.default
        self.artifact_read = ops.artifact_read.default
        self.artifact_manifest = ops.artifact_manifest.default
        self.artifact_signatures = ops.artifact_signatures.default
        self.artifact_variant = ops.artifact_variant.default
        self.artifact_segment = ops.artifact_segment.default
        self.artifact_constant = ops.artifact_constant.default
        self.artifact_plan = ops.artifact_plan.default
        self.sized_plans_new = ops.sized_plans_new.default
        self.sized_plans_at = ops.sized_plans_at.default
        self.give_back_freed_memory = ops.give_back_freed_memory.default
        self.huffman_encode = ops.huffman_encode.default
        self.huffman_decode = ops.huffman_decode.default
        free_plan, free_guard, free_binding, free_artifact, *others = ops.finalizers.default()
        free_template, free_sizes, free_sized, close_library, close_module = others
        self.free_plan = _FREE(free_plan)
        self.free_guard = _FREE(free_guard)
        self.free_binding = _FREE(free_binding)
        self.free_artifact = _FREE(free_artifact)
        self.free_template = _FREE(free_template)
        self.free_sizes = _FREE(free_sizes)
        self.free_sized = _FREE(free_sized)
        self._close_library = _CLOSE(close_library)
        self._close_module = _CLOSE(close_module)

    def close_library(self, path: str) -> None:
        self._close_library(os.fsencode(path))

    def close_module(self, path: str) -> None:
        self._close_module(os.fsencode(path))


def load() -> None:
    """Loads the C++ runtime now. Raises HybridError, with what to do, where that is impossible."""
    _ops()


class Guard:
    """Notices changes of tensors' contents that bump no version counter: see csrc/torch/guard.h.

    It keeps no tensor alive: ask `is_stale` only while all of them live and have the data pointers they had. Tensors that are not
    on the CPU are not looked at.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kind: GuardKind = GuardKind.LIVE) -> None:
        ops = _ops()
        self.handle: int = ops.guard_new(list(tensors), int(kind))
        weakref.finalize(self, ops.free_guard, self.handle).atexit = False
        self._is_stale = ops.guard_is_stale
        self._is_late = ops.guard_is_late

    def is_stale(self) -> bool:
        return bool(self._is_stale(self.handle))

    def is_late(self) -> bool:
        """True if calls before the one that found the change may have missed it, of up to `CALLS_PER_ROUND`."""
        return bool(self._is_late(self.handle))


def watches_writes() -> bool:
    """True if the kernel tells which pages were written to, so that guards see every write (Linux 6.7 and later, unless it is forbidden)."""
    return bool(_ops().watches_writes())


def use_cuda_driver(path: str) -> None:
    """Kernels are launched on GPUs by the driver library of that path, or of that name where the loader looks.

    Raises HybridError where another one is in use already: a process has one.
    """
    _building(_ops().use_cuda_driver, path)


def give_back_freed_memory() -> None:
    """Returns memory that the C library keeps after it was freed to the operating system; glibc only, elsewhere nothing happens.

    glibc maps blocks of their own only above a threshold that rises to 32 MiB as such blocks are freed; what is below stays with the
    process, however large the sum: BERT-base kept 840 MiB after its first call.
    """
    _ops().give_back_freed_memory()


def arena_offsets(ranges: list[int], alignment: int) -> list[int]:
    """The offsets of buffers in an arena, and last its bytes; see csrc/include/arena.h. `ranges`: of each buffer in turn its bytes, the first
    and the last step at which it is alive."""
    offsets: list[int] = _building(_ops().plan_arena, ranges, alignment)
    return offsets


class SizeTable:
    """Sizes known only at run time, to be computed together: see csrc/include/size_table.h. Threads may use it at once."""

    def __init__(self, symbols: Sequence[str], sizes: Sequence[Expression]) -> None:
        # Here, as it imports much that `load` needs no other part of.
        from torch_hybrid_backend.runtime.native.description import size_table

        self._ops = ops = _ops()
        self.handle: int = _building(ops.size_table_new, size_table(symbols, sizes))
        weakref.finalize(self, ops.free_sizes, self.handle).atexit = False

    def at(self, values: Sequence[int]) -> list[int]:
        """The sizes at these values of the symbols. Raises HybridError where one does not fit in 64 bits."""
        sizes: list[int] = _building(self._ops.size_table_at, self.handle, values)
        return sizes


def huffman_encode(symbols: torch.Tensor, lengths: torch.Tensor, coded: torch.Tensor) -> None:
    """Writes the words of `symbols` to `coded`; see csrc/include/huffman.h.

    All are contiguous uint8 on the CPU; `lengths` has 256: the bits of each symbol's word, or 0. `coded` has the bytes that the words need.
    Raises HybridError for lengths that are no complete prefix code, a symbol without a word, and another size of `coded`.
    """
    _building(_ops().huffman_encode, symbols, lengths, coded)


def huffman_decode(coded: torch.Tensor, lengths: torch.Tensor, symbols: torch.Tensor) -> None:
    """Fills `symbols` from what `huffman_encode` wrote. Raises HybridError for lengths and bytes that it cannot have written."""
    _building(_ops().huffman_decode, coded, lengths, symbols)


class Artifact:
    """An opened `.hybrid` file: see csrc/include/artifact.h. Every check of docs/hybrid_format.md has passed but for signatures.

    share: other processes that open the file share its memory. False copies it, for files that others may write to. threads: how many
    compare checksums and decode. verify: is called with the manifest's text, as bytes, and the signatures before anything else of the file is
    read; what it raises is raised. runs: choose the variant for this machine, and refuse a file that has none; of a file with several, only
    what that one uses is checked, and can be asked for. False: all is checked, and plans cannot be made.

    Addresses hold for as long as this object lives, or a plan of it. Raises ArtifactError for a file that cannot be used, with what to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        share: bool = True,
        threads: int = 1,
        runs: bool = True,
        verify: Callable[[bytes, Sequence[tuple[bytes, bytes]]], object] | None = None,
    ) -> None:
        self._ops = ops = _ops()
        self.handle: int = _opening(ops.artifact_open, os.fspath(path), share)
        weakref.finalize(self, ops.free_artifact, self.handle).atexit = False
        if verify is not None:
            verify(_bytes_at(*ops.artifact_manifest(self.handle)), self.signatures)
        _opening(ops.artifact_read, self.handle, threads, runs)

    @functools.cached_property
    def manifest(self) -> str:
        """The JSON text of the manifest, as its signatures sign it."""
        return _bytes_at(*self._ops.artifact_manifest(self.handle)).decode()

    @property
    def signatures(self) -> list[tuple[bytes, bytes]]:
        """Public keys and signatures (Ed25519) of the manifest. None is verified."""
        pairs = _bytes_at(*self._ops.artifact_signatures(self.handle))
        begins = range(0, len(pairs), _KEY_BYTES + _SIGNATURE_BYTES)
        return [(pairs[b : b + _KEY_BYTES], pairs[b + _KEY_BYTES :][:_SIGNATURE_BYTES]) for b in begins]

    @property
    def variant(self) -> int:
        """The number of the variant that was chosen; without `runs` that of the last."""
        return int(self._ops.artifact_variant(self.handle))

    def segment(self, name: str) -> tuple[int, int]:
        """The address and the size in bytes of a segment."""
        address, size = _opening(self._ops.artifact_segment, self.handle, name)
        return address, size

    def content(self, name: str) -> bytes:
        """A copy of a segment."""
        return _bytes_at(*self.segment(name))

    def constant_address(self, number: int) -> int:
        """The address of a constant's first element. The memory may be written to, which does not change the file."""
        return int(_opening(self._ops.artifact_constant, self.handle, number))


class _Libraries:
    """The libraries and modules of a plan, open as long as this object lives."""

    def __init__(self, ops: _Operators) -> None:
        self._ops = ops
        self._open: set[OpenLibrary] = set()
        self._paths: dict[str, str] = {}  # by the name that C++ knows

    def open(self, member: str, path: str) -> str:
        """Opens a library or module for C++, and returns the name that it is open under."""
        ops = self._ops
        use, close = {
            "library": (ops.open_library, ops.close_library),
            "module": (ops.open_module, ops.close_module),
        }[member]
        name, opened = use_library(path, lambda name: _building(use, name), close)
        if opened is not None:
            self._open.add(opened)
        self._paths[name] = path
        return name

    def building(self, operator: Callable[..., Any], *arguments: object) -> Any:
        """Make a plan. Raises HybridError for what could never run; libraries have in it the paths that they were opened by."""
        try:
            return _called(operator, *arguments)
        except failures(RuntimeError) as error:
            said = str(error)
            for name, path in self._paths.items():
                said = said.replace(f"library {name} ", f"library {path} ")
            raise _as_hybrid_error(said) from error


class SizedPlans:
    """The plans of an entry of a file for many sizes: see csrc/include/artifact_plan.h. Threads may use it at once."""

    def __init__(self, artifact: Artifact, entry: int) -> None:
        self._ops = ops = _ops()
        self.handle: int = _opening(ops.sized_plans_new, artifact.handle, entry)
        weakref.finalize(self, ops.free_sized, self.handle).atexit = False

    def at(self, values: Sequence[int], callbacks: Sequence[Callback] = ()) -> Plan:
        """The plan at these values of the entry's symbols. Raises ArtifactError for sizes that the entry is not for."""
        return Plan.of_handle(_opening(self._ops.sized_plans_at, self.handle, values), callbacks)


class PlanTemplate:
    """A plan with sizes known only at run time: see csrc/include/plan_template.h. Threads may use it at once."""

    def __init__(self, description: PlanDescription) -> None:
        self._ops = ops = _ops()
        self._libraries = _Libraries(ops)
        text = description.text(functools.cache(self._libraries.open))
        self.handle: int = self._libraries.building(ops.plan_template_new, text)
        weakref.finalize(self, ops.free_template, self.handle).atexit = False

    def at(self, values: Sequence[int], callbacks: Sequence[Callback] = ()) -> tuple[Plan, int]:
        """The plan at these values of the symbols, and the bytes of its arenas. Raises HybridError as `Plan` does."""
        handle, arena_bytes = self._libraries.building(self._ops.plan_template_at, self.handle, values)
        return Plan.of_handle(handle, callbacks, self._libraries), arena_bytes


class Plan:
    """The C++ plan: see csrc/include/plan.h. Making it raises HybridError for what could never run, with the reason.

    Raises HybridError too where a library or module is named as an entry of the cache and is not what was put there.
    """

    def __init__(self, description: PlanDescription, callbacks: Sequence[Callback] = ()) -> None:
        self._ops = ops = _ops()
        self._lives_on: object = (libraries := _Libraries(ops))
        text = description.text(functools.cache(libraries.open))
        self._own(libraries.building(ops.plan_new, text), callbacks)

    @classmethod
    def of_artifact(cls, artifact: Artifact, segment: str, callbacks: Sequence[Callback] = ()) -> Plan:
        """Make the plan in a segment of a `.hybrid` file; from the first one on, code of the file runs.

        The plan keeps the file's memory. Raises ArtifactError for what could never run.
        """
        return cls.of_handle(_opening(_ops().artifact_plan, artifact.handle, segment), callbacks)

    @classmethod
    def of_handle(cls, handle: int, callbacks: Sequence[Callback] = (), lives_on: object = None) -> Plan:
        """Take over a plan of the C++ side. `lives_on`: what must live as long as it."""
        plan = cls.__new__(cls)
        plan._ops = _ops()
        plan._lives_on = lives_on
        plan._own(handle, callbacks)
        return plan

    def _own(self, handle: int, callbacks: Sequence[Callback]) -> None:
        """Take over a plan of the C++ side."""
        self.handle = handle
        self._run = self._ops.plan_run
        module = native_module()
        self._run_directly = module.run if module is not None else _not_implemented
        _callbacks[handle] = tuple(callbacks)
        weakref.finalize(self, _free_plan, self._ops, handle).atexit = False

    def run(
        self, binding: Binding, inputs: list[torch.Tensor], arguments: list[Any] | None = None
    ) -> list[torch.Tensor] | None:
        """The outputs, or None where the binding is stale: bind again and run again.

        arguments: the list that `inputs` were taken from. Both lists are emptied once the run has taken its inputs, each of which is freed
        behind the last step that reads it, if nobody else holds it then; not where the run is profiled.
        Raises HybridError for inputs that do not fit and for a kernel that fails, by its name, RefusedValuesError for values that PyTorch
        refuses; what a callback raised is raised as it was.
        """
        profiled = _profiler_enabled()  # it shows the dispatcher's call
        try:
            given = (inputs,) if arguments is None else (inputs, arguments)
            results = NotImplemented if profiled else self._run_directly(self.handle, binding.handle, *given)
            if type(results) is list:
                return results
            if results is NotImplemented:
                outputs, status = self._run(self.handle, binding.handle, inputs, profiled)
            else:
                outputs, status = [], results
        except failures(RuntimeError) as error:
            raise _as_hybrid_error(str(error)) from error
        return outputs if _is_done(status) else None

    def time(
        self, binding: Binding, inputs: list[torch.Tensor], *, in_teams: bool
    ) -> tuple[list[torch.Tensor], list[int]] | None:
        """Run as `run` does, and return the outputs and the nanoseconds of each step, or None where the binding is stale.

        in_teams: kernels share parallel regions, as in `run`; otherwise each starts its own, which counts as its time.
        """
        outputs, status, times = _building(self._ops.plan_time, self.handle, binding.handle, inputs, in_teams)
        return (outputs, times) if _is_done(status) else None


class Binding:
    """The constants one plan runs with, and the guard of the parameters they were made from.

    `owned` maps slots to tensors, which the binding keeps alive; `borrowed` maps slots to addresses, which the caller
    keeps alive and unmoved during every run. Together they fill every slot.
    """

    def __init__(self, plan: Plan, guard: Guard, owned: dict[int, torch.Tensor], borrowed: dict[int, int]) -> None:
        ops = _ops()
        self.handle: int = _building(
            ops.binding_new,
            plan.handle,
            guard.handle,
            list(owned),
            list(owned.values()),
            list(borrowed),
            list(borrowed.values()),
        )
        weakref.finalize(self, ops.free_binding, self.handle).atexit = False


def _is_done(status: int) -> bool:
    """False if a run had a stale binding. Raises what its callback raised."""
    if status != RunStatus.CALLBACK_RAISED:
        return status == RunStatus.DONE
    raised, _raised.error = _raised.error, None
    assert raised is not None, "a callback that raised leaves its exception"
    raise raised


def _not_implemented(*_: object) -> object:
    return NotImplemented


def _called(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator. Texts become an address and a size: LibTorch's C interface never frees strings that operators are called with (torch
    2.13), and descriptions of plans are long."""
    held = [os.fsencode(argument) if isinstance(argument, str) else argument for argument in arguments]
    flat: list[Any] = []
    for argument in held:
        if isinstance(argument, bytes):
            flat += [ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value, len(argument)]
        else:
            flat.append(argument)
    return operator(*flat)


def _bytes_at(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def _building(operator: Callable[..., Any], *arguments: object) -> Any:
    try:
        return _called(operator, *arguments)
    except failures(RuntimeError) as error:
        raise _as_hybrid_error(str(error)) from error


def _opening(operator: Callable[..., Any], *arguments: object) -> Any:
    try:
        return _called(operator, *arguments)
    except failures(RuntimeError) as error:
        raise ArtifactError(str(error)) from error


# See csrc/torch/cuda_driver.h.
_BY_DRIVER = re.compile(r" failed: CUDA_ERROR_\w+ \((\d+)\)")


def _as_hybrid_error(text: str) -> HybridError:
    """The error that the C++ side threw, as one of this package; what a GPU's driver said is told apart, by its code."""
    if REFUSED_VALUES in text:
        return RefusedValuesError(text)
    found = _BY_DRIVER.search(text)
    if found is None:
        return HybridError(text)
    code = int(found[1])
    if code in STICKY:
        text += (
            ". The GPU cannot be used any more in this process: start it again. What failed may be a kernel that was queued before this one;"
            " with the environment variable CUDA_LAUNCH_BLOCKING=1 it is the one named here"
        )
    return DeviceError(text, code)


def _free_plan(ops: _Operators, handle: int) -> None:
    ops.free_plan(handle)
    _callbacks.pop(handle, None)
