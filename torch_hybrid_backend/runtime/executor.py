"""The fast path: a partitioned graph as one C++ plan, called with the un-hoisted graph's inputs.

Enters: a `PartitionedGraph` and what each segment compiled to. Leaves: `Executor`; where sizes are known only at run time, one for each set of
them, by `GraphPlans`. It is a callable from a list of inputs
(tensors, and numbers that no segment reads) to the list of the graph's outputs. Per call Python checks the addresses and
versions of the constants and makes one call into C++; only callbacks (eager segments) come back to Python.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.lazy_bits import copied
from torch_hybrid_backend.core.limits import ADDRESS_ALIGNMENT
from torch_hybrid_backend.core.program import Callback as CallbackStep
from torch_hybrid_backend.core.program import Copy, KernelCall, LaunchGraph, OperatorCall, Packing, Step
from torch_hybrid_backend.core.region import PartitionedGraph
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime.constant_pool import shared, shared_meanwhile
from torch_hybrid_backend.runtime.constants import (
    Fold,
    LiveConstants,
    ViewOfInput,
    resolve,
    run_fold,
    without_owning,
)
from torch_hybrid_backend.runtime.native.description import PlanDescription
from torch_hybrid_backend.runtime.native.ops import Binding, Callback, Guard, Plan, PlanTemplate
from torch_hybrid_backend.runtime.offload import OffloadedWeights, offload
from torch_hybrid_backend.runtime.operator_program import OperatorRegion
from torch_hybrid_backend.runtime.plan_layout import (
    AtSizes,
    ConstantSlot,
    Piece,
    PlanLayout,
    StaticLayoutError,
    StepOrigin,
    lay_out,
    same_memory,
)
from torch_hybrid_backend.sizes.size import Dim, Size, evaluate, symbols
from torch_hybrid_backend.torch_private import mkldnn_layout

log = logging.getLogger(__name__)

# A region an engine compiled, or any function from the list of a segment's inputs to its outputs (`Region.eager`).
CompiledSegment = CompiledRegion | Callable[[Sequence[Any]], Sequence[Any]]

# Another thread may change the parameters between a repack and the run; that cannot go on for ever.
_MAX_REBINDS = 16
_KEEP_CHANGING = "the parameters of this graph keep changing while it runs: stop writing to them during the call"


def build_executor(
    graph: PartitionedGraph,
    segments: Sequence[CompiledSegment],
    hoisted: HoistedInputs | None = None,
    fold: Fold | None = None,
    titles: Sequence[str] = (),
    *,
    graphs: bool = False,
) -> Executor:
    """The C++ plan of a whole graph. `segments[i]` is what `graph.segments[i]` compiled to.

    hoisted, fold, graphs: see `GraphPlans`; without them the call's inputs are the graph's. titles: what profilers show for each
    segment.
    Raises StaticLayoutError where sizes are known only at run time (use SymbolicExecutor), HybridError where the
    runtime or a kernel library cannot be loaded or a program contradicts its region.
    """
    pieces = [
        Piece(
            segment.inputs,
            tuple(region_input.spec for region_input in segment.region.inputs),
            segment.outputs,
            segment.region.outputs,
            getattr(compiled, "program", None),
            title,
            segment.region.name,
            isinstance(compiled, OperatorRegion) and not segment.region.draws,
        )
        for segment, compiled, title in zip(graph.segments, segments, titles or [""] * len(segments), strict=True)
    ]
    plans = GraphPlans(graph.inputs, graph.constants, pieces, segments, graph.outputs, hoisted, fold, graphs=graphs)
    if unknown := plans.layout.symbols:
        names = ", ".join(symbol.name for symbol in unknown)
        raise StaticLayoutError(f"the graph has sizes known only at run time: {names}")
    return plans.at({})


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one step of a plan in one call."""

    origins: tuple[StepOrigin, ...]
    nanoseconds: int


@dataclass(frozen=True, slots=True, eq=False)
class BoundConstants:
    """Tensors made of one set of parameters: the slots' tensors and addresses, and `extra`, the folded values by number that each
    call hands over. `bindings`: one, from the first call on; plans of all sizes have the same slots."""

    guard: Guard
    owned: Mapping[int, torch.Tensor]
    borrowed: Mapping[int, int]
    extra: Mapping[int, torch.Tensor | ViewOfInput]
    bindings: list[Binding] = field(default_factory=list)

    def binding(self, plan: Plan) -> Binding:
        """The constants as plans read them."""
        if not self.bindings:
            self.bindings.append(Binding(plan, self.guard, dict(self.owned), dict(self.borrowed)))
        return self.bindings[0]


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """An output of the graph that the plan computes: the plan's output of that number."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class SavedPlan:
    """A plan with all that its calls need, as data. Its sizes may be known only at run time; `outputs` may then be sizes as well.

    `functions`: what its callbacks call, by number, and `regions`: the names of the regions that these are for. `inputs`: of the plan, each an
    input of the call or a tensor that stays the same. `slots`: the constants, by slot. `outputs`: of the graph; what is none of these types is
    returned as it is.
    """

    description: PlanDescription
    functions: Mapping[int, Callback | AtSizes]
    regions: Mapping[int, str]
    inputs: tuple[CallInput | torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    outputs: tuple[PlanOutput | CallInput | torch.Tensor | object, ...]


class GraphPlans:
    """A graph laid out, and its executors: one, or where sizes are known only at run time one for each set of sizes.

    inputs: the main graph's inputs by name; constants: those of them that rarely change. callbacks: one for each piece
    (of pieces with a program they are not called). outputs: names of values, or literals and sizes.
    hoisted: where the main inputs come from in a call's inputs; fold: maps the raw constants at `hoisted.fold` to the
    folded values. Folding and packing run under no_grad, on the first call and whenever a parameter changed, once for all sizes that the
    constants do not depend on.
    graphs: launches that follow one another are CUDA graphs.
    Raises StaticLayoutError where the graph cannot be laid out, HybridError where the runtime cannot be loaded or a program contradicts its
    region.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        constants: AbstractSet[str],
        pieces: Sequence[Piece],
        callbacks: Sequence[Callback | AtSizes],
        outputs: Sequence[object],
        hoisted: HoistedInputs | None = None,
        fold: Fold | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        hoisted = hoisted if hoisted is not None else HoistedInputs.identity(len(inputs))
        if len(hoisted.main) != len(inputs):
            raise HybridError(f"the main graph has {len(inputs)} inputs, but {len(hoisted.main)} sources of them")
        sources = dict(zip(inputs, hoisted.main, strict=True))
        folded = {name for name, source in sources.items() if isinstance(source, FoldedValue)}
        computed = list(dict.fromkeys(o for o in outputs if isinstance(o, str) and o not in sources))
        self.layout = layout = lay_out(frozenset(inputs), constants | folded, pieces, computed, graphs=graphs)
        self.functions = (*callbacks, *layout.functions)
        self._template = PlanTemplate(layout.description) if layout.symbols else None
        self.plan_sources = tuple(sources[name] for name in layout.inputs)
        self.outputs = tuple(_output(output, sources, computed) for output in outputs)
        self.returns_plan_outputs = list(outputs) == computed
        returned = [sources[output] for output in outputs if isinstance(output, str) and output in sources]
        # Folded values that callbacks read or the graph returns: each call needs them as tensors.
        extra = {source.index for source in (*self.plan_sources, *returned) if isinstance(source, FoldedValue)}
        self._binder = _Binder(layout.slots, sources, hoisted, fold, frozenset(extra))
        self._slot_sizes = symbols(size for slot in layout.slots for size in (*slot.spec.shape, *slot.spec.strides))
        # By their sizes, as long as an executor has them.
        self._constants: WeakValueDictionary[tuple[int, ...], _Constants] = WeakValueDictionary()
        if graphs_of := cuda_graphs(layout):
            log.info("kernels in each CUDA graph of this plan: %s", ", ".join(str(len(g)) for g in graphs_of))

    def at(self, values: Mapping[str, int]) -> Executor:
        """The executor for values of the size symbols, by name; of a graph without any, for none.

        Raises HybridError where a kernel library cannot be loaded, and for sizes that contradict one another or do not fit in 64 bits.
        """
        callbacks = tuple(each.at(values) if isinstance(each, AtSizes) else each for each in self.functions)
        outputs = tuple(evaluate(each, values) if isinstance(each, Size) else each for each in self.outputs)
        if self._template is None:
            plan, arena_bytes = Plan(self.layout.description, callbacks), self.layout.arena_bytes
        else:
            numbers = [values[symbol.name] for symbol in self.layout.symbols]
            plan, arena_bytes = self._template.at(numbers, callbacks)
        return Executor(self, plan, outputs, arena_bytes, self._constants_at(values))

    def _constants_at(self, values: Mapping[str, int]) -> _Constants:
        sizes = tuple(values[symbol.name] for symbol in self._slot_sizes)
        found = self._constants.get(sizes)
        if found is None:
            slots = tuple(slot.at(values) for slot in self.layout.slots)
            found = self._constants[sizes] = _Constants(replace(self._binder, slots=slots))
        return found


def cuda_graphs(layout: PlanLayout) -> tuple[tuple[str, ...], ...]:
    """The names of the kernels that each CUDA graph of the plan launches; kernels that a grid known only at run time may leave out too."""
    graphs = [step.step for step in layout.steps if isinstance(step.step, LaunchGraph)]
    return tuple(tuple(launch.symbol for launch in graph.launches if 0 not in launch.grid) for graph in graphs)


def _runs_once(step: Step) -> bool:
    """True if eager would not run a graph again because of this step: kernels and ATen's operators fail for want of memory alone."""
    return isinstance(step, KernelCall | Copy) or (isinstance(step, OperatorCall) and step.name.startswith("aten::"))


class Executor:
    """Runs one graph at known sizes. Threads may call it at once.

    graph: that of the plan. outputs: where the graph's come from. arena_bytes: of all devices. constants: what
    fills its slots.
    """

    def __init__(
        self,
        graph: GraphPlans,
        plan: Plan,
        outputs: Sequence[PlanOutput | CallInput | FoldedValue | object],
        arena_bytes: int,
        constants: _Constants,
    ) -> None:
        self._layout = graph.layout
        self._plan = plan
        self._functions_of_any = graph.functions
        self._outputs_of_any = graph.outputs
        self.arena_bytes = arena_bytes
        self._plan_sources = graph.plan_sources
        self._returns = tuple(map(_return, outputs))
        self._returns_plan_outputs = graph.returns_plan_outputs
        self._constants_of_sizes = constants
        self._binder = constants.binder
        self._constants = constants.live
        self._constant_positions = self._binder.positions()[0]
        # Where a step may refuse a call for its values the graph is run again, from its inputs. Outputs that are inputs are taken last.
        self._may_free = not any(isinstance(output, CallInput | FoldedValue) for output in outputs) and all(
            _runs_once(planned.step) for planned in graph.layout.steps
        )

    @property
    def layout(self) -> PlanLayout:
        """The layout that the plan was built from; that of plans at other sizes too."""
        return self._layout

    @property
    def cuda_graphs(self) -> tuple[tuple[str, ...], ...]:
        """See `cuda_graphs`."""
        return cuda_graphs(self._layout)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs, with exactly the dtypes, sizes and strides of their specs.

        Raises HybridError for inputs that do not fit and for failing kernels (by name); what an eager segment raises
        comes through unchanged.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():  # eager segments must not record: autograd is the capturing stage's concern
                return self._call(inputs)
        return self._call(inputs)

    def run_freeing(self, inputs: list[Any]) -> list[Any]:
        """Call that empties the list of its inputs once it runs: each is freed behind the last step that reads it, if nobody else holds it.

        Nothing is freed before the call ends where the graph returns an input, where Python or another library's operator runs a part of it, or
        where values are checked.
        """
        with torch.no_grad():
            return self._call(inputs, inputs if self._may_free else None)

    def bind(self, inputs: Sequence[Any]) -> None:
        """Folds and packs the constants among a call's inputs now, not in that call. Raises as a call does."""
        with torch.no_grad():
            self._constants.get(inputs).binding(self._plan)

    def offload(self, inputs: Sequence[Any], folder: Path) -> OffloadedWeights:
        """Move the constants of a call that its plan reads in packed or folded form alone to a file in `folder`: see `offload.offload`."""
        with torch.no_grad():
            bound = self._constants.get(inputs)
            moved = offload(self._replaced(bound, inputs), folder, lambda: not bound.guard.is_stale())
            if moved.is_new:
                self._constants.watch_anew(inputs, lambda made, guard: replace(made, guard=guard, bindings=[]))
            moved.page_out()  # this graph's guard has read all
        return moved

    def _replaced(self, bound: BoundConstants, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """The constants that calls do not read, as something that was made of them stands in their place."""
        sources = (*self._plan_sources, *self._outputs_of_any)
        read = {source.position for source in sources if isinstance(source, CallInput)}
        read |= {view.position for view in bound.extra.values() if isinstance(view, ViewOfInput)}
        _, guarded = self._binder.positions()
        storages = [
            (inputs[position], inputs[position].untyped_storage()) for position in guarded if position not in read
        ]
        in_place = sorted(bound.borrowed.values())
        return [
            tensor
            for tensor, storage in storages
            if bisect_left(in_place, storage.data_ptr()) == bisect_left(in_place, storage.data_ptr() + storage.nbytes())
        ]

    def _call(self, inputs: Sequence[Any], freed: list[Any] | None = None) -> list[Any]:
        bound = self._constants.get(inputs)
        # Kernels read these where they lie, and only the caller may hold them.
        kept = [inputs[position] for position in self._constant_positions] if freed is not None else ()
        for _ in range(_MAX_REBINDS):
            outputs = self._plan.run(bound.binding(self._plan), self._plan_inputs(bound, inputs), freed)
            if outputs is not None:
                return (
                    outputs if self._returns_plan_outputs else [take(inputs, outputs, bound) for take in self._returns]
                )
            bound = self._constants.refresh(inputs)
        del kept
        raise HybridError(_KEEP_CHANGING)

    def saved(self, inputs: Sequence[Any]) -> SavedPlan:
        """The plan as data, with the constants of a call's inputs. Raises as a call does."""
        with torch.no_grad():
            folded = run_fold(self._binder.hoisted, self._binder.fold, inputs)
            slots = self._binder.slot_tensors(inputs, folded)

        def source(of: object) -> object:
            return folded[of.index] if isinstance(of, FoldedValue) else of

        called = {
            step.step.function: origins[0].region
            for step, origins in zip(self._layout.steps, self._layout.origins, strict=True)
            if isinstance(step.step, CallbackStep)
        }
        return SavedPlan(
            self._layout.description,
            {number: self._functions_of_any[number] for number in sorted(called)},
            called,
            tuple(map(source, self._plan_sources)),  # type: ignore[arg-type]
            tuple(slots),
            tuple(map(source, self._outputs_of_any)),
        )

    def kernel_us(self, inputs: Sequence[Any]) -> list[float]:
        """The microseconds that each step of the pieces' programs takes in one call, in their order, each in a parallel region of its own.

        Empty where the call came to no end, as its parameters changed. Raises as a call does.
        """
        with torch.no_grad():
            bound = self._constants.get(inputs)
            timed = self._plan.time(bound.binding(self._plan), self._plan_inputs(bound, inputs), in_teams=False)
        return [timed[1][step] / 1e3 for step in self._layout.from_programs] if timed else []

    def timed(self, inputs: Sequence[Any]) -> tuple[list[Any], list[StepTime]]:
        """Return a call's outputs, and what each step of the plan took of it. Raises as a call does."""
        with torch.no_grad():
            bound = self._constants.get(inputs)
            for _ in range(_MAX_REBINDS):
                plan_inputs = self._plan_inputs(bound, inputs)
                timed = self._plan.time(bound.binding(self._plan), plan_inputs, in_teams=True)
                if timed is not None:
                    outputs, nanoseconds = timed
                    times = [StepTime(*each) for each in zip(self._layout.origins, nanoseconds, strict=True)]
                    return [take(inputs, outputs, bound) for take in self._returns], times
                bound = self._constants.refresh(inputs)
        raise HybridError(_KEEP_CHANGING)

    def _plan_inputs(self, bound: BoundConstants, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [
            inputs[source.position] if isinstance(source, CallInput) else resolve(bound.extra[source.index], inputs)
            for source in self._plan_sources
        ]


def _output(
    output: object, sources: Mapping[str, CallInput | FoldedValue], computed: Sequence[str]
) -> PlanOutput | CallInput | FoldedValue | object:
    """The origin of one of the graph's outputs; a literal as it is."""
    if not isinstance(output, str):
        return output
    return sources[output] if output in sources else PlanOutput(computed.index(output))


def _return(
    output: PlanOutput | CallInput | FoldedValue | object,
) -> Callable[[Sequence[Any], Sequence[torch.Tensor], BoundConstants], Any]:
    """Function that takes one of the graph's outputs from the call's inputs, the plan's outputs and the constants."""
    match output:
        case CallInput(position):
            return lambda inputs, outputs, bound: inputs[position]
        case FoldedValue(index):
            # A copy, as eager would have computed it: the caller may write to it.
            return lambda inputs, outputs, bound: copied(resolve(bound.extra[index], inputs))
        case PlanOutput(number):
            return lambda inputs, outputs, bound: outputs[number]
    return lambda inputs, outputs, bound: output


@dataclass(frozen=True, slots=True, eq=False)
class _Binder:
    """Folds and packs. Apart from the executor, so that its cache of bindings makes no reference cycle with it."""

    slots: tuple[ConstantSlot, ...]
    sources: Mapping[str, CallInput | FoldedValue]
    hoisted: HoistedInputs
    fold: Fold | None
    extra: frozenset[int]

    def positions(self) -> tuple[list[int], list[int]]:
        """Positions of all raw constants that bindings depend on, and of those whose contents matter."""
        guarded = set(self.hoisted.fold)
        borrowed: set[int] = set()
        for slot in self.slots:
            for source in (self.sources[name] for name in slot.sources):
                if isinstance(source, CallInput):
                    (guarded if slot.pack or slot.is_copy else borrowed).add(source.position)
        return sorted(guarded | borrowed), sorted(guarded)

    def copied(self, inputs: Sequence[Any]) -> list[int]:
        """Positions of raw constants whose address kernels of their device cannot take: they read a copy."""
        direct = ((self.sources[slot.sources[0]], slot.spec.device) for slot in self.slots if slot.pack is None)
        return [
            source.position
            for source, device in direct
            if isinstance(source, CallInput) and not can_address(device, inputs[source.position])
        ]

    def __call__(self, inputs: Sequence[Any], guard: Guard) -> BoundConstants:
        folded = run_fold(self.hoisted, self.fold, inputs)
        kept = without_owning(folded, self.hoisted, inputs)
        owned: dict[int, torch.Tensor] = {}
        borrowed: dict[int, int] = {}
        for number, slot in enumerate(self.slots):
            source = self.sources[slot.sources[0]]
            first, tensor = self._slot_tensor(slot, inputs, folded)
            is_parameter = isinstance(source, CallInput) or isinstance(kept[source.index], ViewOfInput)
            if tensor is first and is_parameter:
                borrowed[number] = tensor.data_ptr()
            else:
                owned[number] = tensor
        return BoundConstants(guard, owned, borrowed, {index: kept[index] for index in self.extra})

    def slot_tensors(self, inputs: Sequence[Any], folded: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that fill the slots."""
        return [self._slot_tensor(slot, inputs, folded)[1] for slot in self.slots]

    def _slot_tensor(
        self, slot: ConstantSlot, inputs: Sequence[Any], folded: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tensor that a slot is made of, and the one that fills it."""
        tensors = [
            inputs[source.position].detach() if isinstance(source, CallInput) else folded[source.index]
            for source in (self.sources[name] for name in slot.sources)
        ]
        return tensors[0], _slot_tensor(slot, tensors)


class _Constants:
    """Constants of plans whose slots have the same sizes."""

    def __init__(self, binder: _Binder) -> None:
        self.binder = binder
        self.live: LiveConstants[BoundConstants] = LiveConstants(*binder.positions(), make=binder, copied=binder.copied)


def can_address(device: Device, tensor: torch.Tensor) -> bool:
    """True if kernels of the device can be given the tensor's address: a view into a larger one may begin anywhere."""
    return device.is_host or tensor.data_ptr() % ADDRESS_ALIGNMENT == 0


def _slot_tensor(slot: ConstantSlot, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor that fills `slot`: packed, or the only source itself where it lies in memory as kernels expect it."""
    spec = slot.spec
    if slot.pack is not None:
        pack = slot.pack
        share = shared if isinstance(pack, Packing) else shared_meanwhile
        [packed] = share(pack, tensors, lambda: [pack(*tensors)])
        if packed.layout is mkldnn_layout:
            return packed  # only operators read it, and only they know how it lies
        form = (packed.numel(), packed.dtype, TensorSpec.of(packed).device)
        if form != (spec.span, spec.torch_dtype, spec.device) or not packed.is_contiguous():
            raise HybridError(
                f"packing {', '.join(slot.sources)} gave {packed.dtype} {tuple(packed.shape)} with strides {packed.stride()}"
                f" on {packed.device}; expected {spec.span} contiguous elements of {spec.dtype} on {spec.device}"
            )
        return packed if can_address(spec.device, packed) else packed.clone()
    tensor = tensors[0]
    given = TensorSpec.of(tensor)
    is_same = given.device == spec.device and same_memory(given, spec)
    if is_same and can_address(spec.device, tensor):
        return tensor
    described = (given.shape, given.dtype, given.device)
    if described != (spec.shape, spec.dtype, spec.device) or not (slot.is_copy or is_same):
        raise HybridError(f"constant {slot.sources[0]} is {given}; the graph was compiled for {spec}")
    sizes, strides = static_dims(spec.shape), static_dims(spec.strides)
    empty = functools.partial(torch.empty_strided, sizes, strides, dtype=tensor.dtype, device=tensor.device)
    [copy] = shared(("copy", *sizes, *strides), tensors, lambda: [empty().copy_(tensor)])
    return copy


def static_dims(dims: Sequence[Dim]) -> list[int]:
    return [int(dim) for dim in dims]
