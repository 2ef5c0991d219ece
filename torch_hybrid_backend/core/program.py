"""Program: what an engine's kernels do for one region, as data the runtime can lay out and run without Python.

A program is a list of steps over numbered buffers. The runtime decides where buffers live (graph inputs, packed constants, the arena,
fresh outputs); the program only says how large they are and who reads and writes them.

This is the only place that lists the kinds of steps. A whole graph's plan has the same ones, over the plan's values in place of buffers
(`Step.over`), and four more, which the runtime adds: `Callback`, `Copy`, `Check` and `LaunchGraph`. Each is a class of the same name in
`csrc/src/steps/`, which reads what `Step.describe` returns. See docs/adr/0020-plan-steps.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.limits import MAX_ELEMENTS
from torch_hybrid_backend.core.operator_schema import described_arguments, is_native
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import REFUSED_VALUES
from torch_hybrid_backend.sizes.size import Dim, Size, evaluate, symbols

# In place of a buffer: a null pointer.
NULL = -1


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A buffer as an operator takes or returns it: with the sizes and strides of `spec`, or where that is None as the buffer itself has them.
    `offset`: elements of the buffer before the first one."""

    buffer: int
    spec: TensorSpec | None = None
    offset: Dim = 0

    def at(self, values: Mapping[str, int]) -> TensorArgument:
        """The argument for values of the size symbols, by name."""
        if self.spec is None:
            return self
        return replace(self, spec=self.spec.at(values), offset=evaluate(self.offset, values))


class Step(ABC):
    """An action of a program or plan. Steps run in order; a program's run on its device."""

    __slots__ = ()

    @property
    def label(self) -> str:
        """Name of the step in reports."""
        return type(self).__name__

    @property
    def memory(self) -> tuple[int, ...]:
        """Buffers whose address it is given."""
        return ()

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """Buffers that it takes as tensors, in order; one may be there more than once."""
        return ()

    @property
    def returned(self) -> tuple[int, ...]:
        """Buffers that it fills with a new tensor in each call; nothing else writes them."""
        return ()

    @property
    def forms(self) -> Mapping[int, TensorSpec]:
        """The sizes and strides with which it returns some of these, where they are not the buffer's own: the memory is shared."""
        return {}

    @property
    def runs_in_python(self) -> bool:
        """True if the C++ plan cannot run it: Python does, from its `tensors` to the tensors that it `returned`."""
        return False

    def at(self, values: Mapping[str, int]) -> Step:
        """The step for values of the size symbols, by name; KeyError for one that is missing."""
        return self

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        """Sizes known only at run time that it takes as numbers."""
        return ()

    @abstractmethod
    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> Step:
        """The step over other numbers: `memory` and `tensor` map buffers, used in these two ways, to values of a plan."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Description that csrc/src/steps/ makes the step of, as JSON has it; "kind" says which. Its sizes must be numbers."""


@dataclass(frozen=True, slots=True)
class KernelCall(Step):
    """A call of a kernel on the host. `arguments` are buffer numbers: those the kernel reads first, then those it writes."""

    library: str  # path of the kernel library (.so)
    symbol: str  # the kernel's name in it, without the prefix of csrc/include/kernel_abi.h
    arguments: tuple[int, ...]
    writes: int  # how many of the last arguments are written
    sizes: tuple[Dim, ...] = ()  # further arguments, after the buffers: sizes known only at run time

    @property
    def label(self) -> str:
        return self.symbol

    @property
    def memory(self) -> tuple[int, ...]:
        return self.arguments

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        return self.sizes

    def at(self, values: Mapping[str, int]) -> KernelCall:
        return replace(self, sizes=_at(self.sizes, values)) if self.sizes else self

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> KernelCall:
        return replace(self, arguments=tuple(map(memory, self.arguments)))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "kernel",
            "library": self.library,
            "symbol": self.symbol,
            "arguments": self.arguments,
            "sizes": self.sizes,
        }


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A number that a kernel takes by value. `dtype`: "int32", "int64", "float32" or "float64"."""

    dtype: str
    value: Dim | float


@dataclass(frozen=True, slots=True)
class DeviceLaunch(Step):
    """A launch of a kernel on a GPU, on the caller's current stream. It has not run on one yet.

    The kernel's parameters: the addresses of `arguments` (buffers, those it reads first; a buffer on the CPU, of no dimensions, is passed by
    value), then `scalars`, then the addresses of `scratch` (buffers, or NULL). A GPU is given addresses that can be divided by
    `limits.ADDRESS_ALIGNMENT`. A grid with a 0 launches nothing. The module is loaded when the plan is made.
    """

    module: str  # path of the compiled module: a cubin, a fat binary or PTX
    symbol: str
    arguments: tuple[int, ...]
    writes: int  # how many of the last arguments are written
    grid: tuple[Dim, Dim, Dim]  # blocks
    threads: int  # of a block
    scalars: tuple[ScalarArgument, ...] = ()
    shared_bytes: int = 0  # of dynamic shared memory
    scratch: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return self.symbol

    @property
    def memory(self) -> tuple[int, ...]:
        return (*self.arguments, *(buffer for buffer in self.scratch if buffer != NULL))

    @property
    def written(self) -> tuple[int, ...]:
        """Buffers that it writes, or may: scratch memory too."""
        return self.memory[len(self.arguments) - self.writes :]

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        return (*self.grid, *(s.value for s in self.scalars if not isinstance(s.value, float)))

    def at(self, values: Mapping[str, int]) -> DeviceLaunch:
        x, y, z = _at(self.grid, values)
        scalars = tuple(
            replace(s, value=s.value if isinstance(s.value, float) else evaluate(s.value, values)) for s in self.scalars
        )
        return replace(self, grid=(x, y, z), scalars=scalars)

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> DeviceLaunch:
        scratch = tuple(NULL if buffer == NULL else memory(buffer) for buffer in self.scratch)
        return replace(self, arguments=tuple(map(memory, self.arguments)), scratch=scratch)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "launch",
            "module": self.module,
            "symbol": self.symbol,
            "arguments": self.arguments,
            "scalars": [(scalar.dtype, scalar.value) for scalar in self.scalars],
            "grid": self.grid,
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "scratch": self.scratch,
        }


# An argument of an operator, by what its schema asks for. Lists are tuples; a number may be a size known only at run time.
OperatorArgument = (
    TensorArgument
    | Dim
    | float
    | bool
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | None
    | tuple["OperatorArgument", ...]
)

# A result of an operator: a buffer, with the form in which the operator returns it where the buffer has another; None where nobody reads it; or
# a tuple of buffers where the schema returns a list.
OperatorResult = int | TensorArgument | None | tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OperatorCall(Step):
    """An operator of PyTorch's where else kernels would be. Its results are new tensors in each call.

    `name`: "namespace::operator". `title`: what it stands for, for people. Where the C interface of PyTorch's dispatcher lacks a type of the
    schema (numbers that may be whole or not, for one), the call goes through Python.
    """

    name: str
    arguments: tuple[OperatorArgument, ...]  # of the whole schema, in its order
    results: tuple[OperatorResult, ...]  # of the whole schema, in its order
    title: str
    overload: str = ""

    @property
    def label(self) -> str:
        return self.name

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        """The tensors among its arguments, in order; those in lists too."""
        return tuple(_tensors(self.arguments))

    @property
    def returned(self) -> tuple[int, ...]:
        return tuple(r for result in self.results for r in _flat(result) if r is not None)

    @property
    def forms(self) -> Mapping[int, TensorSpec]:
        """In which form results are returned, by buffer, where it is not the buffer's."""
        return {r.buffer: r.spec for r in self.results if isinstance(r, TensorArgument) and r.spec is not None}

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        of_tensors = ((*t.spec.shape, *t.spec.strides, t.offset) for t in self.tensors if t.spec is not None)
        return (*_sizes(self.arguments), *(size for sizes in of_tensors for size in sizes))

    def at(self, values: Mapping[str, int]) -> OperatorCall:
        def argument(item: OperatorArgument) -> OperatorArgument:
            if isinstance(item, TensorArgument):
                return item.at(values)
            if isinstance(item, Size):
                return evaluate(item, values)
            return tuple(map(argument, item)) if isinstance(item, tuple) else item

        results = tuple(r.at(values) if isinstance(r, TensorArgument) else r for r in self.results)
        return replace(self, arguments=tuple(map(argument, self.arguments)), results=results)

    @property
    def runs_in_python(self) -> bool:
        return not is_native(self.name, self.overload, self.arguments, self.results)

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> OperatorCall:
        def argument(item: OperatorArgument) -> OperatorArgument:
            if isinstance(item, TensorArgument):
                return TensorArgument(tensor(item))
            return tuple(map(argument, item)) if isinstance(item, tuple) else item

        def result(item: OperatorResult) -> OperatorResult:
            if isinstance(item, tuple):
                return tuple(None if buffer is None else memory(buffer) for buffer in item)
            if isinstance(item, TensorArgument):
                return memory(item.buffer)
            return None if item is None else memory(item)

        return replace(self, arguments=tuple(map(argument, self.arguments)), results=tuple(map(result, self.results)))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "operator",
            "name": self.name,
            "overload": self.overload,
            "arguments": described_arguments(self.name, self.overload, self.arguments),
            "results": self.results,
        }


class ExternalRunner(Protocol):
    """Part of an engine that runs a whole region, on one call's tensors or their addresses. Threads may use it at once."""

    @property
    def native(self) -> tuple[int, int] | None:
        """The addresses of a C function and of its context, valid as long as this object lives: see csrc/torch/steps/external_call.cc.

        None where there is none: then the plan calls this object.
        """

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: what it reads, then what it writes, which it fills."""


@dataclass(frozen=True, slots=True)
class ExternalCall(Step):
    """An engine's own runner on whole tensors: an opaque step, on the caller's current stream where the program's device has streams.

    `arguments` are buffer numbers: those it reads first, then those it writes; working memory is a buffer that it writes.
    """

    runner: ExternalRunner
    arguments: tuple[int, ...]
    writes: int  # how many of the last arguments are written
    title: str  # for people

    @property
    def label(self) -> str:
        return self.title

    @property
    def memory(self) -> tuple[int, ...]:
        return () if self.runner.native is None else self.arguments

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(map(TensorArgument, self.arguments)) if self.runner.native is None else ()

    @property
    def runs_in_python(self) -> bool:
        return self.runner.native is None

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> ExternalCall:
        return replace(self, arguments=tuple(map(memory, self.arguments)))

    def describe(self) -> dict[str, Any]:
        assert self.runner.native is not None, "a plan calls it"
        function, context = self.runner.native
        return {
            "kind": "external",
            "function": function,
            "context": context,
            "title": self.title,
            "arguments": self.arguments,
        }


@dataclass(frozen=True, slots=True)
class Callback(Step):
    """A function of Python's in a plan: an eager segment, or a step that C++ cannot run. `function` is its number among the plan's."""

    function: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return tuple(map(TensorArgument, self.inputs))

    @property
    def returned(self) -> tuple[int, ...]:
        return self.outputs

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> Callback:
        inputs = tuple(tensor(TensorArgument(number)) for number in self.inputs)
        return replace(self, inputs=inputs, outputs=tuple(map(memory, self.outputs)))

    def describe(self) -> dict[str, Any]:
        return {"kind": "callback", "function": self.function, "inputs": self.inputs, "outputs": self.outputs}


@dataclass(frozen=True, slots=True)
class Copy(Step):
    """Same shape, other strides."""

    source: int
    destination: int

    @property
    def tensors(self) -> tuple[TensorArgument, ...]:
        return (TensorArgument(self.source), TensorArgument(self.destination))

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> Copy:
        return Copy(tensor(TensorArgument(self.source)), tensor(TensorArgument(self.destination)))

    def describe(self) -> dict[str, Any]:
        return {"kind": "copy", "source": self.source, "destination": self.destination}


@dataclass(frozen=True, slots=True)
class Check(Step):
    """Ends the call with `errors.RefusedValuesError` unless every byte of the flags is 0."""

    flags: tuple[int, ...]

    @property
    def memory(self) -> tuple[int, ...]:
        return self.flags

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> Check:
        return Check(tuple(map(memory, self.flags)))

    def describe(self) -> dict[str, Any]:
        return {"kind": "check", "flags": self.flags, "title": REFUSED_VALUES}


@dataclass(frozen=True, slots=True)
class LaunchGraph(Step):
    """Launches of one device that follow one another, handed to its driver together as a CUDA graph. See docs/adr/0026-cuda-graphs.md."""

    launches: tuple[DeviceLaunch, ...]

    @property
    def memory(self) -> tuple[int, ...]:
        return tuple(buffer for launch in self.launches for buffer in launch.memory)

    def at(self, values: Mapping[str, int]) -> LaunchGraph:
        return LaunchGraph(tuple(launch.at(values) for launch in self.launches))

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        return tuple(size for launch in self.launches for size in launch.sizes_used)

    def over(self, memory: Callable[[int], int], tensor: Callable[[TensorArgument], int]) -> LaunchGraph:
        return LaunchGraph(tuple(launch.over(memory, tensor) for launch in self.launches))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "graph",
            "launches": [launch.describe() for launch in self.launches],
            "writes": [launch.written for launch in self.launches],
        }


@dataclass(frozen=True, slots=True)
class Packing:
    """A `PackedConstant.pack` that only computes. Equal ones make equal tensors of equal ones, whatever graph they are of: plans share them.

    how: all that decides what it makes, but for the tensors.
    """

    how: tuple[object, ...]
    make: Callable[..., torch.Tensor] = field(compare=False)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.make(*tensors)


@dataclass(frozen=True, slots=True)
class PackedConstant:
    """A buffer computed from constant region inputs whenever they change, outside the hot path.

    `pack` takes the tensors of `sources` (region input positions) and returns a contiguous tensor for the buffer, or for one that only
    operators read oneDNN's own.
    """

    buffer: int
    sources: tuple[int, ...]
    pack: Callable[..., torch.Tensor] = field(compare=False)


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """Numbers that a program takes of its device's random generator in each call, before its steps: the generator then stands where eager's
    operators would have left it.

    It counts groups of four 32-bit numbers. `taken`: how many each of its operators takes, in program order. `seed`: the buffer of the
    generator's seed; `counters`: those of the generator's position before each operator. They are int64, of no dimensions, on the CPU.
    """

    seed: int
    counters: tuple[int, ...]
    taken: tuple[Dim, ...]

    def at(self, values: Mapping[str, int]) -> RandomNumbers:
        """The same for values of the size symbols, by name."""
        return replace(self, taken=_at(self.taken, values))


@dataclass(frozen=True, slots=True)
class Program:
    """Steps over buffers.

    `buffers[i]` is the physical form of buffer i: kernels see it as a 1-D array of `span` elements of its dtype.
    `inputs[k]` is the buffer of the region's k-th input (its spec has the strides the kernels were built for), or -1
    where no kernel reads it directly; `outputs[k]` is the buffer of the k-th output. An output may be an input's
    buffer, and two outputs may share one. `device`: where its steps run. `ranges`: the least and the most value of a size symbol, by name,
    where its steps do not serve every one. `counts`: how far its steps count in 32 bits, in sizes known only at run time. `flags`: buffers on
    the host that its steps leave at 0, or the values it was called with are refused: the call ends with `errors.RefusedValuesError`.
    `relied_on`: sizes that are not negative where all that its steps read lies in its tensor. `origins`: of each step the names of the region's
    nodes that it computes (of values that stay in it, not all); empty where its engine does not tell.
    """

    buffers: tuple[TensorSpec, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[PackedConstant, ...]
    steps: tuple[Step, ...]
    # Of a program with sizes known only at run time: what they are read from, the region's inputs as tensors or sizes.
    signature: tuple[TensorSpec | Dim | None, ...] = ()
    device: Device = CPU
    random: RandomNumbers | None = None
    ranges: tuple[tuple[str, int, int], ...] = ()
    counts: tuple[Dim, ...] = ()
    flags: tuple[int, ...] = ()
    relied_on: tuple[Dim, ...] = ()
    origins: tuple[frozenset[str], ...] = field(default=(), compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The size symbols that it depends on."""
        return tuple(dict.fromkeys(name for name, *_ in self._ranges()))

    def serves(self, values: Mapping[str, int]) -> bool:
        """True if its steps serve these values of the size symbols, by name."""
        return not self.unserved(values)

    def unserved(self, values: Mapping[str, int]) -> str:
        """The values of size symbols, by name, that its steps do not serve, in words; "" if they serve all."""
        outside = [
            f"{values[name]} outside of {least} to {most}"
            for name, least, most in self._ranges()
            if not least <= values[name] <= most
        ]
        spans = (spec.at(values).span for spec in self.buffers)
        if not outside and (most := max([*spans, *_at(self.counts, values)], default=0)) > MAX_ELEMENTS:
            return f"{most} elements, more than kernels count ({MAX_ELEMENTS})"
        if not outside and min(_at(self.relied_on, values), default=0) < 0:
            return "a position outside of its tensor"
        return ", ".join(outside)

    def _ranges(self) -> Iterator[tuple[str, int, int]]:
        yield from self.ranges
        yield from ((symbol.name, symbol.low, symbol.high) for symbol in symbols(self.sizes_used))

    def at(self, values: Mapping[str, int]) -> Program:
        """The program for values of the size symbols, by name; KeyError for one that is missing."""
        buffers = tuple(buffer.at(values) for buffer in self.buffers)
        random = None if self.random is None else self.random.at(values)
        return replace(self, buffers=buffers, steps=tuple(step.at(values) for step in self.steps), random=random)

    @property
    def sizes_used(self) -> tuple[Dim, ...]:
        """The sizes of its buffers, and those that its steps take."""
        of_buffers = (size for spec in self.buffers for size in (*spec.shape, *spec.strides))
        taken = () if self.random is None else self.random.taken
        return (
            *(size for step in self.steps for size in step.sizes_used),
            *of_buffers,
            *taken,
            *self.counts,
            *self.relied_on,
        )

    def reading(self, inputs: Sequence[int]) -> Program:
        """The program with only those of the region's inputs, by position; the others are read by no kernel and no packing."""
        new = {old: position for position, old in enumerate(inputs)}
        constants = tuple(replace(c, sources=tuple(new[source] for source in c.sources)) for c in self.constants)
        signature = tuple(self.signature[old] for old in inputs) if self.signature else ()
        return replace(self, inputs=tuple(self.inputs[old] for old in inputs), constants=constants, signature=signature)


def _at(sizes: Sequence[Dim], values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, values) for size in sizes)


def _tensors(arguments: Sequence[OperatorArgument]) -> Sequence[TensorArgument]:
    found: list[TensorArgument] = []
    for argument in arguments:
        if isinstance(argument, TensorArgument):
            found.append(argument)
        elif isinstance(argument, tuple):
            found.extend(_tensors(argument))
    return found


def _sizes(arguments: Sequence[OperatorArgument]) -> Iterator[Size]:
    for argument in arguments:
        if isinstance(argument, Size):
            yield argument
        elif isinstance(argument, tuple):
            yield from _sizes(argument)


def _flat(result: OperatorResult) -> tuple[int | None, ...]:
    if isinstance(result, tuple):
        return result
    return (result.buffer if isinstance(result, TensorArgument) else result,)
