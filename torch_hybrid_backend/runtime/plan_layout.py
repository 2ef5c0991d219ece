"""Layout of a graph as values and steps: the programs of all segments merged, every buffer given a place.

Enters: pieces in execution order, each a program (kernel calls over buffers) or a callback, wired by names. Leaves: a
`PlanLayout`, which the executor hands to the C++ plan one to one. Values that a callback or operator reads or the graph returns
are tensors of their own in each call (a view of one may outlive the call); all else that kernels write lies in the
arena.

Sizes may be known only at run time. The layout is then right at every size: where two forms of a value agree at some sizes only, it is as if
they never did. Offsets in arenas are left to the C++ plan of each set of sizes (csrc/include/plan_template.h). Illegal: a missing spec
(`StaticLayoutError`); the Python executor runs such graphs.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.program import (
    Callback,
    Check,
    Copy,
    DeviceLaunch,
    KernelCall,
    LaunchGraph,
    OperatorCall,
    PackedConstant,
    Program,
    RandomNumbers,
    Step,
    TensorArgument,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.runtime.memory import LiveRange, alignment_on, plan_arena
from torch_hybrid_backend.runtime.native.description import (
    Life,
    PlanDescription,
    PlanStep,
    PlanValue,
    TitledSteps,
    ValueKind,
)
from torch_hybrid_backend.runtime.steps_in_python import InPython, in_python
from torch_hybrid_backend.sizes.size import Dim, Symbol, evaluate, product, symbols

# Fewer launches are no graph. A launch takes the host 1.3 us (H100; meta-pytorch/tritonbench, pull request 1016), a graph of any number in a
# row 2.5 us (Ampere; NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024). Neither was measured here.
FEWEST_LAUNCHES = 3
# Behind all that is put before a step.
_ITSELF = sys.maxsize
# Of steps that each move to where the one behind moved; their places are as long as the chain.
_LONGEST_CHAIN = 64


class StaticLayoutError(HybridError):
    """The graph cannot be laid out ahead of its calls; the message says what is only known at run time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment: `program` is None if it is a callback. Names are values of the graph. `title`: what profilers show. `region`: the
    name of the region. `may_move`: its operators may run before other pieces' steps that they do not depend on."""

    inputs: tuple[str, ...]
    input_specs: tuple[TensorSpec | None, ...]
    outputs: tuple[str, ...]
    output_specs: tuple[TensorSpec | None, ...]
    program: Program | None
    title: str = ""
    region: str = ""
    may_move: bool = False


@dataclass(frozen=True, slots=True)
class StepOrigin:
    """The region that a step of a plan is made for, by its name. `label`, `nodes`: of the step of its program, as there; "" and empty for what
    is no such step: a callback, a copy between regions."""

    region: str
    label: str = ""
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ConstantSlot:
    """A slot of a binding. `sources` are constant graph inputs by name; `pack` makes the slot's tensor of them.

    Where `pack` is None the slot is the only source itself, or where `is_copy` a copy of it with the strides of `spec`.
    """

    sources: tuple[str, ...]
    pack: Callable[..., torch.Tensor] | None
    spec: TensorSpec
    is_copy: bool = False

    def at(self, values: Mapping[str, int]) -> ConstantSlot:
        """The slot for values of the size symbols, by name."""
        return self if self.spec.is_static else replace(self, spec=self.spec.at(values))


class AtSizes(ABC):
    """Function of a plan that depends on sizes known only at run time."""

    __slots__ = ()

    @abstractmethod
    def at(self, values: Mapping[str, int]) -> InPython:
        """The function for values of the size symbols, by name."""


@dataclass(frozen=True, slots=True)
class NumbersTaken(AtSizes):
    """Takes random numbers, as `Taken`."""

    device: Device
    groups: tuple[Dim, ...]

    def at(self, values: Mapping[str, int]) -> InPython:
        return Taken(self.device, tuple(evaluate(size, values) for size in self.groups))


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """`inputs` names the graph inputs that each call passes to the plan; `outputs` are value numbers.

    `arenas`: bytes by device, where any; 0 where there are `symbols`, which the sizes of values and steps depend on, and offsets in arenas are
    planned for each set of sizes by `lives`. `functions`: what callbacks call beside the pieces' own, numbered after these. `origins`: where
    each step comes from; a graph of launches comes from several.
    """

    values: tuple[PlanValue, ...]
    steps: tuple[PlanStep, ...]
    inputs: tuple[str, ...]
    slots: tuple[ConstantSlot, ...]
    outputs: tuple[int, ...]
    arenas: Mapping[Device, int]
    titles: tuple[TitledSteps, ...]
    functions: tuple[InPython | AtSizes, ...]
    origins: tuple[tuple[StepOrigin, ...], ...]
    lives: Mapping[Device, tuple[Life, ...]]
    symbols: tuple[Symbol, ...]

    @property
    def from_programs(self) -> tuple[int, ...]:
        """Positions of the steps that are a program's, or graphs of these; the others are segments run by callbacks, and copies."""
        return tuple(position for position, (first, *_) in enumerate(self.origins) if first.label)

    @property
    def arena_bytes(self) -> int:
        """Total arena bytes over all devices."""
        return sum(self.arenas.values())

    @property
    def description(self) -> PlanDescription:
        """Description that the C++ plan is made of, or its template."""
        return PlanDescription(
            self.values,
            self.steps,
            len(self.inputs),
            len(self.slots),
            self.outputs,
            self.arenas,
            self.titles,
            self.lives,
            tuple(symbol.name for symbol in self.symbols),
        )


def lay_out(
    inputs: AbstractSet[str],
    constants: AbstractSet[str],
    pieces: Sequence[Piece],
    outputs: Sequence[str],
    *,
    graphs: bool = False,
) -> PlanLayout:
    """Merges `pieces`. `inputs` are all graph inputs, `constants` those of them that rarely change.

    `outputs` names values that pieces compute (graph inputs that are returned need no plan). `graphs`: launches that follow one another
    become a `LaunchGraph`.
    Raises StaticLayoutError where a spec is no tensor, HybridError where a program contradicts its specs.
    """
    builder = _Builder(inputs, constants, len(pieces))
    for number, piece in enumerate(pieces):
        builder.add(number, piece)
    return builder.finish(outputs, graphs=graphs)


@dataclass(slots=True)
class _Draft:
    """A value while its kind may still be open: None means written by kernels, in the arena unless it escapes."""

    kind: ValueKind | None
    payload: int
    spec: TensorSpec
    root: int
    escapes: bool = False
    named: bool = False  # it is a value of the graph: its spec stays
    offset: Dim = 0  # elements before its first one, of an alias or a constant


class _Builder:
    def __init__(self, inputs: AbstractSet[str], constants: AbstractSet[str], pieces: int) -> None:
        self._graph_inputs = inputs
        self._constants = constants
        self._drafts: list[_Draft] = []
        self._steps: list[PlanStep] = []
        self._pieces = pieces
        self._functions: list[InPython | AtSizes] = []
        self._origins: list[StepOrigin] = []
        self._computed: dict[str, int] = {}  # value of each name that a piece computed
        self._plan_inputs: dict[str, int] = {}  # position among the plan's inputs
        self._input_values: dict[tuple[str, TensorSpec, ValueKind], int] = {}
        self._first_forms: dict[int, int] = {}  # by position of an input
        self._slots: list[ConstantSlot] = []
        self._titles: list[str] = []  # of each step
        self._may_move: set[int] = set()  # positions of steps
        self._direct_slots: dict[tuple[str, TensorSpec], int] = {}

    def add(self, number: int, piece: Piece) -> None:
        output_specs = [_tensor(spec, name) for name, spec in zip(piece.outputs, piece.output_specs, strict=True)]
        first = len(self._steps)
        if piece.program is None:
            reads = [
                self._for_callback(name, _tensor(spec, name))
                for name, spec in zip(piece.inputs, piece.input_specs, strict=True)
            ]
            writes = [self._new(ValueKind.RETURNED, 0, spec) for spec in output_specs]
            self._steps.append(PlanStep(Callback(number, tuple(reads), tuple(writes))))
            self._computed.update(zip(piece.outputs, writes, strict=True))
        else:
            self._add_program(piece, piece.program, output_specs)
        self._end_of(piece)
        added = range(first, len(self._steps))
        self._titles += [piece.title] * len(added)
        if piece.may_move:
            self._may_move.update(k for k in added if isinstance(self._steps[k].step, OperatorCall))

    def _end_of(self, piece: Piece) -> None:
        """Steps that were added since are the piece's, and none of its program."""
        self._origins += [StepOrigin(piece.region)] * (len(self._steps) - len(self._origins))

    def _add_program(self, piece: Piece, program: Program, output_specs: Sequence[TensorSpec]) -> None:
        local: dict[int, int] = {}  # buffer of the program -> value
        # Each call hands these over as they are: a callback gets the very tensor.
        as_tensors = {t.buffer for step in program.steps if step.runs_in_python for t in step.tensors}
        for name, spec, buffer in zip(piece.inputs, piece.input_specs, program.inputs, strict=True):
            if buffer >= 0 and buffer not in local:
                given = buffer in program.outputs or buffer in as_tensors
                local[buffer] = self._for_kernels(name, _tensor(spec, name), program.buffers[buffer], given)
        for constant in program.constants:
            local[constant.buffer] = self._packed(piece, constant, program.buffers[constant.buffer])
        if program.random is not None:
            for buffer in (program.random.seed, *program.random.counters):
                local[buffer] = self._new(ValueKind.RETURNED, 0, program.buffers[buffer])
        for step in program.steps:
            for buffer in step.returned:
                spec = program.buffers[buffer]
                form = step.forms.get(buffer, spec)
                value = self._new(ValueKind.RETURNED, 0, form)
                local[buffer] = value if form == spec else self._alias(value, spec)
        for step in program.steps:
            for buffer in (*step.memory, *(tensor.buffer for tensor in step.tensors)):
                if buffer not in local:
                    local[buffer] = self._new(None, 0, program.buffers[buffer])
        if program.random is not None:
            self._take_numbers(program.random, local, program.device)
        for step, nodes in zip(program.steps, program.origins or [frozenset[str]()] * len(program.steps), strict=True):
            self._end_of(piece)
            self._add_step(step, local, program.device)
            self._origins.append(StepOrigin(piece.region, step.label, nodes))
        if program.flags:
            self._steps.append(PlanStep(Check(tuple(local[flag] for flag in program.flags)), program.device))
        for name, spec, buffer in zip(piece.outputs, output_specs, program.outputs, strict=True):
            if buffer not in local:
                raise HybridError(f"no kernel writes {name}: its program gives it buffer {buffer}, which nothing uses")
            self._computed[name] = self._as_output(local[buffer], spec, name)

    def _take_numbers(self, random: RandomNumbers, local: Mapping[int, int], device: Device) -> None:
        """A callback before the program's own steps: among these it is not timed."""
        number = self._pieces + len(self._functions)
        self._functions.append(NumbersTaken(device, random.taken))
        returned = tuple(local[buffer] for buffer in (random.seed, *random.counters))
        self._steps.append(PlanStep(Callback(number, (), returned)))

    def _add_step(self, step: Step, local: Mapping[int, int], device: Device) -> None:
        def tensor(argument: TensorArgument) -> int:
            value = local[argument.buffer]
            self._escape(value)
            if argument.spec is not None:
                return self._alias(value, argument.spec, argument.offset)
            self._drafts[value].named = True  # what reads it as it is expects its own sizes and strides
            return value

        returned = {buffer: self._drafts[local[buffer]].root for buffer in step.returned}
        if step.runs_in_python:
            reads = tuple(map(tensor, step.tensors))
            number = self._pieces + len(self._functions)
            self._functions.append(in_python(step))
            self._steps.append(PlanStep(Callback(number, reads, tuple(returned[b] for b in step.returned))))
            return
        self._steps.append(PlanStep(step.over({**local, **returned}.__getitem__, tensor), device))

    def finish(self, outputs: Sequence[str], *, graphs: bool) -> PlanLayout:
        numbers = []
        for name in outputs:
            numbers.append(self._computed[name])
            self._escape(self._computed[name])
        for draft in self._drafts:
            if draft.kind is None and draft.escapes:
                draft.kind = ValueKind.FRESH
        specs = [*(draft.spec for draft in self._drafts), *(slot.spec for slot in self._slots)]
        used = [size for spec in specs for size in (*spec.shape, *spec.strides)]
        used += (draft.offset for draft in self._drafts)
        used += (size for planned in self._steps for size in planned.step.sizes_used)
        unknown = tuple(symbols(used))
        if not unknown:
            self._move_operators({self._drafts[number].root for number in numbers})
            self._delay_kernels()
        lives = self._lives()
        arenas = dict.fromkeys(lives, 0) if unknown else {each: self._place(each, lives[each]) for each in lives}
        values = tuple(PlanValue(_placed(draft), draft.payload, draft.spec, draft.offset) for draft in self._drafts)
        # After their memory is planned, launch by launch: a graph is no step that all of it must outlive.
        steps, positions = _with_graphs(self._steps) if graphs else (self._steps, range(len(self._steps) + 1))
        origins: list[list[StepOrigin]] = [[] for _ in steps]
        for position, origin in zip(positions, self._origins, strict=False):  # last, how many steps there are
            origins[position].append(origin)
        return PlanLayout(
            values=values,
            steps=tuple(steps),
            inputs=tuple(self._plan_inputs),
            slots=tuple(self._slots),
            outputs=tuple(numbers),
            arenas=arenas,
            titles=self._titled(positions),
            functions=tuple(self._functions),
            origins=tuple(map(tuple, origins)),
            lives=lives,
            symbols=unknown,
        )

    def _titled(self, positions: Sequence[int]) -> tuple[TitledSteps, ...]:
        """The titles of steps that are at these positions: each where it begins."""
        found: list[TitledSteps] = []
        for step, title in enumerate(self._titles):
            if title and (step == 0 or title != self._titles[step - 1]):
                # What begins within a graph is shown from after it.
                within = step > 0 and positions[step] == positions[step - 1]
                found.append(TitledSteps(positions[step] + within, title))
        return tuple(found)

    def _move_operators(self, returned: AbstractSet[int]) -> None:
        """Have operators that may move run as early as they can, where more memory is used by them for the last time than they make.

        Segments are cut as large as they can be, so that eager's operators stand behind all kernels that do not need their results: the
        gradients of a network's weights behind those of its images, which would all be in memory until then. `returned`: values that the
        plan returns.
        """
        if not self._may_move:
            return
        touched = [self._touched(planned.step) for planned in self._steps]
        last = {value: position for position, values in enumerate(touched) for value in values}
        behind: list[list[int]] = [[] for _ in range(len(self._steps) + 1)]  # each step of now; the first: before all
        latest: dict[int, int] = {}
        least = 0
        for position, (planned, values) in enumerate(zip(self._steps, touched, strict=True)):
            place = position + 1
            ending = {value for value in values - returned if last[value] == position}
            if position in self._may_move and self._frees(planned.step, ending):
                place = max([least, *(latest.get(value, 0) for value in values)])
            elif not isinstance(planned.step, KernelCall | OperatorCall | Copy):
                # What Python does may depend on anything, and no operator may get values that are refused.
                least = place
            behind[place].append(position)
            latest.update((value, max(place, latest.get(value, 0))) for value in values)
        self._reorder([position for positions in behind for position in positions])

    def _delay_kernels(self) -> None:
        """Have kernels run as late as they can, where they make no less memory than would be kept for them, if that takes less memory in all.

        A backward graph begins with all that depends on no operator of eager's: the activations of every layer that are computed again, which
        would all be in memory until its layer comes.
        """
        touched = [self._touched(planned.step) for planned in self._steps]
        first = {value: position for position, values in reversed([*enumerate(touched)]) for value in values}
        # Where each step runs: the order of these tuples. What was put before a step begins as its place does, and was put there in turn.
        places: list[tuple[int, ...]] = [(position, _ITSELF) for position in range(len(self._steps) + 1)]
        put: Counter[tuple[int, ...]] = Counter()
        next_touch: dict[int, tuple[int, ...]] = {}
        next_write: dict[int, tuple[int, ...]] = {}
        last_touch: dict[int, tuple[int, ...]] = {}
        nearest = end = places.pop()
        for position in reversed(range(len(self._steps))):
            step, values, place = self._steps[position].step, touched[position], places[position]
            written = values
            if isinstance(step, KernelCall):
                written = {self._owner(number) for number in step.arguments[len(step.arguments) - step.writes :]}
                read = values - written
                latest = min(
                    [
                        nearest,
                        *(next_touch[value] for value in written & next_touch.keys()),
                        *(next_write[value] for value in read & next_write.keys()),
                    ]
                )
                made = {value for value in written if first[value] == position and value in next_touch}
                kept = {value for value in read if last_touch.get(value, place) < latest and self._is_freed(value)}
                is_next = latest == (position + 1, _ITSELF) and not put[latest]
                may_move = not is_next and latest != end and len(latest) < _LONGEST_CHAIN
                if may_move and 0 < self._bytes(made) >= self._bytes(kept):
                    place = places[position] = (*latest[:-1], put[latest], _ITSELF)
                    put[latest] += 1
            elif not isinstance(step, OperatorCall | Copy):
                nearest = place  # what Python does may depend on anything
            for value in values:
                next_touch[value] = min(place, next_touch.get(value, place))
                last_touch[value] = max(place, last_touch.get(value, place))
            next_write.update((value, min(place, next_write.get(value, place))) for value in written)
        order = sorted(range(len(places)), key=places.__getitem__)
        if self._peak_bytes([touched[position] for position in order]) < self._peak_bytes(touched):
            self._reorder(order)

    def _peak_bytes(self, touched: Sequence[AbstractSet[int]]) -> int:
        """The most memory that the plan's own values take at once, where these steps touch them in turn."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, values in enumerate(touched):
            for value in values:
                if self._drafts[value].kind is None:
                    last[value] = position
                    first.setdefault(value, position)
        changes = [0] * (len(touched) + 1)
        for value, position in first.items():
            changes[position] += self._bytes({value})
            changes[last[value] + 1] -= self._bytes({value})
        return max(itertools.accumulate(changes), default=0)

    def _reorder(self, order: Sequence[int]) -> None:
        self._steps = [self._steps[position] for position in order]
        self._origins = [self._origins[position] for position in order]
        self._titles = [self._titles[position] for position in order]

    def _is_freed(self, value: int) -> bool:
        """True unless the memory stays however long the value is read."""
        return self._drafts[value].kind is not ValueKind.CONSTANT

    def _bytes(self, values: AbstractSet[int]) -> int:
        return sum(self._drafts[value].spec.size_bytes for value in values)

    def _touched(self, step: Step) -> set[int]:
        """Values that own the memory which a step reads or writes; of the forms of one input, the first."""
        return {self._owner(number) for number in (*step.memory, *(t.buffer for t in step.tensors), *step.returned)}

    def _owner(self, number: int) -> int:
        root = self._drafts[number].root
        draft = self._drafts[root]
        return self._first_forms[draft.payload] if draft.kind in (ValueKind.INPUT, ValueKind.RAW_INPUT) else root

    def _frees(self, step: Step, ending: AbstractSet[int]) -> bool:
        """True if the values that end with a step have more bytes than those that it makes."""
        made = set(step.returned)
        owned = (ValueKind.FRESH, ValueKind.RETURNED, None)
        return self._bytes({value for value in ending - made if self._drafts[value].kind in owned}) > self._bytes(made)

    def _lives(self) -> dict[Device, tuple[Life, ...]]:
        """The values that are in the arena of each device, and when."""
        live: dict[int, tuple[int, int]] = {}
        for time, planned in enumerate(self._steps):
            for value in planned.step.memory:
                root = self._drafts[value].root
                live[root] = (live.get(root, (time, time))[0], time)
        by_device: dict[Device, list[Life]] = {}
        for root, (first, last) in live.items():
            if self._drafts[root].kind is None:
                self._drafts[root].kind = ValueKind.ARENA
                by_device.setdefault(self._drafts[root].spec.device, []).append(Life(root, first, last))
        return {device: tuple(lives) for device, lives in by_device.items()}

    def _place(self, device: Device, lives: Sequence[Life]) -> int:
        """Gives each of these values its offset in the arena of the device, whose bytes are returned."""
        ranges = [LiveRange(self._drafts[life.value].spec.size_bytes, life.first, life.last) for life in lives]
        layout = plan_arena(ranges, alignment_on(device))
        for life, offset in zip(lives, layout.offsets, strict=True):
            self._drafts[life.value].payload = offset
        return layout.size_bytes

    def _new(self, kind: ValueKind | None, payload: int, spec: TensorSpec, root: int | None = None) -> int:
        self._drafts.append(_Draft(kind, payload, spec, len(self._drafts) if root is None else root))
        return len(self._drafts) - 1

    def _alias(self, value: int, spec: TensorSpec, offset: Dim = 0) -> int:
        offset = offset + self._drafts[value].offset
        root = self._drafts[value].root
        shared = self._drafts[root].spec
        within = offset - self._drafts[root].offset
        # Of others the C++ plan finds it out, at each set of sizes.
        is_known = spec.is_static and shared.is_static and isinstance(within, int)
        if spec.dtype != shared.dtype or (is_known and within + spec.span > shared.span):
            raise HybridError(f"{spec} cannot share the memory of {shared}, from element {offset} on")
        if self._drafts[root].kind is ValueKind.CONSTANT:  # in each call a tensor of its own over the same memory
            made = self._new(ValueKind.CONSTANT, self._drafts[root].payload, spec)
        else:
            made = self._new(ValueKind.ALIAS, root, spec, root)
        self._drafts[made].offset = offset
        return made

    def _escape(self, value: int) -> None:
        self._drafts[self._drafts[value].root].escapes = True

    def _input(self, name: str, spec: TensorSpec, kind: ValueKind) -> int:
        key = (name, spec, kind)
        if key not in self._input_values:
            position = self._plan_inputs.setdefault(name, len(self._plan_inputs))
            self._input_values[key] = self._new(kind, position, spec)
            self._first_forms.setdefault(position, self._input_values[key])
        return self._input_values[key]

    def _for_callback(self, name: str, spec: TensorSpec) -> int:
        if name in self._graph_inputs:
            # As it is: an eager segment may write to it (an input that the graph mutates).
            return self._input(name, spec, ValueKind.RAW_INPUT)
        self._escape(self._computed[name])
        return self._computed[name]

    def _for_kernels(self, name: str, spec: TensorSpec, buffer: TensorSpec, returned: bool) -> int:
        """The value that kernels built for `buffer` read as graph value `name`, whose spec in the graph is `spec`."""
        same_shape = buffer.shape == spec.shape
        # Kernels that see another shape address the same memory in the graph's own strides.
        wanted = buffer if same_shape else spec
        if name in self._constants and not returned:
            return self._direct_slot(name, wanted, buffer, not same_memory(wanted, spec))
        if name in self._graph_inputs:
            value = self._input(name, wanted, ValueKind.INPUT)
        else:
            value = self._computed[name]
            if not same_memory(self._drafts[value].spec, wanted):
                value = self._copy(value, wanted)
        return value if same_shape else self._alias(value, buffer)

    def _copy(self, source: int, spec: TensorSpec) -> int:
        self._escape(source)
        destination = self._new(ValueKind.FRESH, 0, spec)
        self._steps.append(PlanStep(Copy(source, destination)))
        return destination

    def _direct_slot(self, name: str, spec: TensorSpec, buffer: TensorSpec, is_copy: bool) -> int:
        if (name, spec) not in self._direct_slots:
            self._direct_slots[name, spec] = len(self._slots)
            self._slots.append(ConstantSlot((name,), None, spec, is_copy))
        return self._new(ValueKind.CONSTANT, self._direct_slots[name, spec], buffer)

    def _packed(self, piece: Piece, constant: PackedConstant, spec: TensorSpec) -> int:
        sources = tuple(piece.inputs[source] for source in constant.sources)
        changing = [name for name in sources if name not in self._constants]
        if changing:
            raise HybridError(f"a program packs {', '.join(changing)}, which changes from call to call")
        self._slots.append(ConstantSlot(sources, constant.pack, spec))
        return self._new(ValueKind.CONSTANT, len(self._slots) - 1, spec)

    def _as_output(self, value: int, spec: TensorSpec, name: str) -> int:
        draft = self._drafts[value]
        if self._drafts[draft.root].kind is ValueKind.CONSTANT:
            raise HybridError(
                f"a program returns packed constant {name}: outputs must be written by kernels or be inputs"
            )
        if draft.spec == spec:
            draft.named = True
            return value
        if draft.kind is None and not draft.named and _same_span(draft.spec, spec) and draft.spec.dtype == spec.dtype:
            draft.spec = spec  # the tensor that is made for it is then the output itself, not a view of it
            draft.named = True
            return value
        return self._alias(value, spec)


def _with_graphs(steps: Sequence[PlanStep]) -> tuple[list[PlanStep], list[int]]:
    """The steps with a graph in place of launches on one device that follow one another, and where each then is; last, how many there are."""
    kept: list[PlanStep] = []
    positions: list[int] = []
    for device, run in itertools.groupby(steps, lambda s: s.device if isinstance(s.step, DeviceLaunch) else None):
        members = list(run)
        launches = tuple(member.step for member in members if isinstance(member.step, DeviceLaunch))
        if device is not None and sum(0 not in launch.grid for launch in launches) >= FEWEST_LAUNCHES:
            positions += [len(kept)] * len(members)
            kept.append(PlanStep(LaunchGraph(launches), device))
        else:
            positions += range(len(kept), len(kept) + len(members))
            kept += members
    return kept, [*positions, len(kept)]


def _placed(draft: _Draft) -> ValueKind:
    # No step touches it, so it has no place: an output that no kernel writes was refused before.
    return ValueKind.FRESH if draft.kind is None else draft.kind


def _tensor(spec: TensorSpec | None, name: str) -> TensorSpec:
    if spec is None:
        raise StaticLayoutError(f"{name} is no tensor")
    return spec


def _same_span(a: TensorSpec, b: TensorSpec) -> bool:
    """True if both have the same span, at all sizes."""
    if a.is_static and b.is_static:
        return a.span == b.span
    numbers = [(product(spec.shape), _last(spec)) for spec in (a, b)]  # those of no elements have no last one
    return numbers[0] == numbers[1]


def _last(spec: TensorSpec) -> Dim:
    """The offset of the last element, unless there are none."""
    total: Dim = 0
    for size, stride in zip(spec.shape, spec.strides, strict=True):
        total = total + (size - 1) * stride
    return total


def same_memory(a: TensorSpec, b: TensorSpec) -> bool:
    """True if both address the same elements in the same order, at all sizes; strides of dimensions of size 1 address nothing."""
    strides = zip(a.shape, a.strides, b.strides, strict=True) if a.shape == b.shape else ()
    return (a.shape, a.dtype) == (b.shape, b.dtype) and all(x == y for n, x, y in strides if n != 1)
