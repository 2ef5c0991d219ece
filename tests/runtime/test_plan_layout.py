"""Programs as the values, steps and arenas of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.program import (
    NULL,
    Callback,
    Check,
    Copy,
    DeviceLaunch,
    ExternalCall,
    KernelCall,
    LaunchGraph,
    OperatorCall,
    Program,
    RandomNumbers,
    ScalarArgument,
    TensorArgument,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.runtime import plan_layout
from torch_hybrid_backend.runtime.native.description import Life, ValueKind
from torch_hybrid_backend.runtime.plan_layout import AtSizes, Piece, PlanLayout, StaticLayoutError, lay_out, same_memory
from torch_hybrid_backend.sizes.size import Dim, symbol

CUDA = Device("cuda", 1)


def _row(elements: int, device: Device = CPU) -> TensorSpec:
    return TensorSpec((elements,), "float32", (1,), device)


def _piece(program: Program) -> Piece:
    """The program as a segment from x, and y where it reads that, to the values named after its outputs."""
    inputs = ("x", "y")[: len(program.inputs)]
    outputs = tuple(f"out{i}" for i in range(len(program.outputs)))
    specs = [tuple(program.buffers[b] for b in buffers) for buffers in (program.inputs, program.outputs)]
    return Piece(inputs, specs[0], outputs, specs[1], program)


def _laid_out(*programs: Program) -> PlanLayout:
    last = _piece(programs[-1])
    return lay_out(frozenset({"x", "y"}), frozenset(), [_piece(program) for program in programs], last.outputs)


def launch(module: str, arguments: Sequence[int], scratch: Sequence[int] = ()) -> DeviceLaunch:
    return DeviceLaunch(module, "kernel", tuple(arguments), 1, (1, 1, 1), 128, scratch=tuple(scratch))


def test_flags_are_looked_at_behind_their_program() -> None:
    """Before the next program runs; they lie in the arena until then, and no time is told of the look."""
    flagged = Program(
        (_row(3), _row(3), _row(1)),
        (0,),
        (1,),
        (),
        (KernelCall("a.so", "double", (0, 1), 1), KernelCall("a.so", "any", (0, 2), 1)),
        flags=(2,),
    )
    layout = _laid_out(flagged, Program((_row(3), _row(3)), (0,), (1,), (), (KernelCall("a.so", "double", (0, 1), 1),)))
    *_, kernel, check, after = (planned.step for planned in layout.steps)
    assert isinstance(kernel, KernelCall)
    assert isinstance(check, Check)
    assert check.flags == kernel.arguments[1:]
    assert isinstance(after, KernelCall)
    assert layout.values[check.flags[0]].kind is ValueKind.ARENA
    assert layout.from_programs == (0, 1, 3)


def _with_sums(may_move: bool) -> list[Piece]:
    """Kernels from x to a, b and c, one after the other, and a segment of eager that sums a and b."""
    kernels = tuple(KernelCall("a.so", "double", pair, 1) for pair in ((0, 1), (1, 2), (2, 3)))
    program = Program(tuple(_row(1024) for _ in range(4)), (0,), (1, 2, 3), (), kernels)
    sums = tuple(
        OperatorCall("aten::amax", (TensorArgument(buffer), (0,), False), (buffer + 2,), "amax") for buffer in (0, 1)
    )
    scalar = TensorSpec((), "float32", (), CPU)
    eager = Program((_row(1024), _row(1024), scalar, scalar), (0, 1), (2, 3), (), sums)
    wide = (_row(1024),) * 3
    return [
        Piece(("x",), wide[:1], ("a", "b", "c"), wide, program, "kernels", "r0"),
        Piece(("a", "b"), wide[:2], ("s", "t"), (scalar, scalar), eager, "eager", "r1", may_move),
    ]


def _names(layout: PlanLayout) -> list[str]:
    return [planned.step.label for planned in layout.steps]


def test_operators_that_free_memory_run_as_early_as_they_can() -> None:
    """Each behind the last step that reads what it does; titles and origins go with the steps. Others stay where they are."""
    inputs = frozenset({"x"})
    before = lay_out(inputs, frozenset(), _with_sums(False), ["c", "s", "t"])
    assert _names(before) == ["double", "double", "double", "aten::amax", "aten::amax"]
    layout = lay_out(inputs, frozenset(), _with_sums(True), ["c", "s", "t"])
    assert _names(layout) == ["double", "double", "aten::amax", "double", "aten::amax"]
    assert [origin.region for (origin,) in layout.origins] == ["r0", "r0", "r1", "r0", "r1"]
    assert [(t.first, t.title) for t in layout.titles] == [
        *((0, "kernels"), (2, "eager"), (3, "kernels")),
        (4, "eager"),
    ]
    # What the plan returns is freed by nobody.
    returned = lay_out(inputs, frozenset(), _with_sums(True), ["a", "b", "c", "s", "t"])
    assert _names(returned) == _names(before)


def _named_kernels(buffers: Sequence[TensorSpec], outputs: Sequence[int], **kernels: tuple[int, ...]) -> PlanLayout:
    """The layout of kernels by name, each of which writes the last of its buffers; buffer 0 is the input."""
    calls = tuple(KernelCall("a.so", name, arguments, 1) for name, arguments in kernels.items())
    return _laid_out(Program(tuple(buffers), (0,), tuple(outputs), (), calls))


def test_kernels_run_as_late_as_they_can() -> None:
    """A chain of layers, computed again from the input: each would be in memory until it is read."""
    kernels = {"layer1": (0, 1), "layer2": (0, 2), "layer3": (0, 3)}
    layout = _named_kernels(
        [_row(1024)] * 7, [6], **kernels, start=(0, 4), use3=(3, 4, 5), use2=(2, 5, 4), use1=(1, 4, 6)
    )
    assert _names(layout) == ["start", "layer3", "use3", "layer2", "use2", "layer1", "use1"]
    assert layout.arenas == {CPU: 3 * 4096}


def test_kernel_that_makes_less_than_it_reads_stays() -> None:
    """The memory that it reads would be kept for it."""
    buffers = [_row(1024), _row(1024), _row(8), _row(1024), _row(1024)]
    layout = _named_kernels(buffers, [4], double=(0, 1), small=(1, 2), other=(0, 3), both=(2, 3, 4))
    assert _names(layout) == ["double", "small", "other", "both"]


def test_kernel_runs_before_what_it_reads_is_written_again() -> None:
    buffers = [_row(1024), _row(8), _row(1024), _row(1024), _row(1024)]
    layout = _named_kernels(buffers, [4], fill=(0, 1), early=(1, 2), refill=(0, 1), other=(1, 3), both=(2, 3, 4))
    assert _names(layout) == ["fill", "early", "refill", "other", "both"]


@given(st.data())
def test_kernels_in_another_order_compute_the_same(data: st.DataObject) -> None:
    """All programs, also those that write memory again; and no more memory is taken."""
    buffers = 8
    sizes = data.draw(st.lists(st.sampled_from([8, 64, 1024]), min_size=buffers, max_size=buffers))
    kernels = {}
    written = {0}
    for number in range(data.draw(st.integers(1, 14))):
        reads = data.draw(st.lists(st.sampled_from(sorted(written)), min_size=1, max_size=3, unique=True))
        write = data.draw(st.sampled_from([each for each in range(1, buffers) if each not in reads]))
        kernels[f"k{number}"] = (*reads, write)
        written.add(write)
    out = data.draw(st.sampled_from(sorted(written - {0})))

    def computed(names: Sequence[str]) -> object:
        memory: dict[int, object] = {0: "x"}
        for name in names:
            *reads, write = kernels[name]
            memory[write] = hash((name, *(memory[read] for read in reads)))
        return memory[out]

    with pytest.MonkeyPatch.context() as patch:
        layout = _named_kernels([_row(size) for size in sizes], [out], **kernels)
        patch.setattr(plan_layout._Builder, "_delay_kernels", lambda builder: None)
        as_given = _named_kernels([_row(size) for size in sizes], [out], **kernels)
    assert sorted(_names(layout)) == sorted(kernels)
    assert computed(_names(layout)) == computed(list(kernels))
    assert peak_bytes(layout) <= peak_bytes(as_given)


def peak_bytes(layout: PlanLayout) -> int:
    lives = layout.lives.get(CPU, ())
    return max(
        (
            sum(layout.values[life.value].spec.size_bytes for life in lives if life.first <= step <= life.last)
            for step in range(len(layout.steps))
        ),
        default=0,
    )


def test_no_operator_passes_what_python_runs() -> None:
    """A callback may depend on anything, and write to inputs."""
    kernels, eager = _with_sums(True)
    callback = Piece(("c",), (_row(1024),), ("d",), (_row(1024),), None, "python", "r2")
    layout = lay_out(frozenset({"x"}), frozenset(), [kernels, callback, eager], ["d", "s", "t"])
    assert _names(layout) == ["double", "double", "double", "Callback", "aten::amax", "aten::amax"]


def test_each_device_has_an_arena_of_its_own() -> None:
    """Offsets on a GPU are multiples of 256, on the host of 64; a step runs on its program's device."""
    host = Program(
        (_row(3), _row(3), _row(3), _row(3)),
        (0,),
        (3,),
        (),
        tuple(KernelCall("a.so", "double", pair, 1) for pair in ((0, 1), (1, 2), (2, 3))),
    )
    gpu = Program(
        tuple(_row(3, CUDA) for _ in range(4)),
        (0,),
        (3,),
        (),
        tuple(launch("a.cubin", pair) for pair in ((0, 1), (1, 2), (2, 3))),
        device=CUDA,
    )
    first = _piece(host)
    second = replace(_piece(gpu), inputs=("y",), outputs=("elsewhere",))
    layout = lay_out(frozenset({"x", "y"}), frozenset(), [first, second], ["out0", "elsewhere"])
    assert layout.arenas == {CPU: 128, CUDA: 512}
    places = {(v.spec.device, v.payload) for v in layout.values if v.kind is ValueKind.ARENA}
    assert places == {(CPU, 0), (CPU, 64), (CUDA, 0), (CUDA, 256)}
    assert [step.device for step in layout.steps] == [CPU] * 3 + [CUDA] * 3
    assert layout.from_programs == (0, 1, 2, 3, 4, 5)


def test_scratch_lives_as_long_as_its_launch() -> None:
    """A scratch buffer is part of the arena that later launches use again; a null pointer stays one."""
    program = Program(
        tuple(_row(n, CUDA) for n in (8, 64, 8, 64, 8)),
        (0,),
        (4,),
        (),
        (launch("a.cubin", (0, 2), (1, NULL)), launch("a.cubin", (2, 4), (NULL, 3))),
        device=CUDA,
    )
    layout = _laid_out(program)
    assert layout.arenas == {CUDA: 512}
    first, second = (planned.step for planned in layout.steps)
    assert isinstance(first, DeviceLaunch)
    assert isinstance(second, DeviceLaunch)
    assert first.scratch[1] == second.scratch[0] == NULL
    assert layout.values[first.scratch[0]].payload == layout.values[second.scratch[1]].payload


def test_launches_that_follow_one_another_are_graphs() -> None:
    """Across segments, and where there are enough that launch anything; memory is planned, and segments are shown, as without graphs."""

    def segment(first: int, launches: int, grid: tuple[int, int, int] = (1, 1, 1)) -> Piece:
        """A segment of so many launches in a row, from value `v<first>` on."""
        steps = tuple(replace(launch("a.cubin", (i, i + 1)), grid=grid) for i in range(launches))
        rows = tuple(_row(8, CUDA) for _ in range(launches + 1))
        piece = _piece(Program(rows, (0,), (launches,), (), steps, device=CUDA))
        return replace(piece, inputs=(f"v{first}",), outputs=(f"v{first + 1}",), title=f"segment {first}")

    def callback(first: int) -> Piece:
        row = _row(8, CUDA)
        return Piece((f"v{first}",), (row,), (f"v{first + 1}",), (row,), None, f"segment {first}")

    pieces = [
        *(segment(0, 2), segment(1, 2), callback(2)),
        *(segment(3, 2), callback(4)),
        *(segment(5, 2), segment(6, 1, (0, 1, 1)), callback(7)),
        *(segment(8, 3), callback(9)),
    ]
    last = [f"v{len(pieces)}"]
    plain = lay_out(frozenset({"v0"}), frozenset(), pieces, last)
    layout = lay_out(frozenset({"v0"}), frozenset(), pieces, last, graphs=True)
    kinds = [type(planned.step) for planned in layout.steps]
    assert kinds == [
        *(LaunchGraph, Callback),
        *(DeviceLaunch, DeviceLaunch, Callback),
        *(DeviceLaunch, DeviceLaunch, DeviceLaunch, Callback),
        *(LaunchGraph, Callback),
    ]
    assert [len(p.step.launches) for p in layout.steps if isinstance(p.step, LaunchGraph)] == [4, 3]
    assert {p.device for p in layout.steps if not isinstance(p.step, Callback)} == {CUDA}
    assert (layout.values, layout.arenas) == (plain.values, plain.arenas)
    assert layout.from_programs == (0, 2, 3, 5, 6, 7, 9)
    assert [title.first for title in layout.titles] == [0, 1, 1, 2, 4, 5, 7, 8, 9, 10]
    assert [title.title for title in layout.titles] == [title.title for title in plain.titles]


def test_a_graph_is_of_one_device() -> None:
    """Launches on another one are a graph of their own."""
    pieces = []
    for number, device in enumerate((CUDA, Device("cuda", 0))):
        steps = tuple(launch("a.cubin", (i, i + 1)) for i in range(3))
        program = Program(tuple(_row(8, device) for _ in range(4)), (0,), (3,), (), steps, device=device)
        pieces.append(replace(_piece(program), inputs=(f"x{number}",), outputs=(f"out{number}",)))
    layout = lay_out(frozenset({"x0", "x1"}), frozenset(), pieces, ["out0", "out1"], graphs=True)
    assert [(type(p.step), p.device) for p in layout.steps] == [
        (LaunchGraph, CUDA),
        (LaunchGraph, Device("cuda", 0)),
    ]


def test_numbers_on_the_host_enter_a_launch_by_value() -> None:
    """A tensor of no dimensions on the CPU is an argument of a launch like others; it needs no memory on the device."""
    number = TensorSpec((), "float32", (), CPU)
    program = Program(
        (_row(8, CUDA), number, _row(8, CUDA)), (0, 1), (2,), (), (launch("a.cubin", (0, 1, 2)),), device=CUDA
    )
    layout = _laid_out(program)
    assert not layout.arenas
    assert [v.kind for v in layout.values] == [ValueKind.INPUT, ValueKind.INPUT, ValueKind.FRESH]


def test_sizes_enter_grids_and_scalars() -> None:
    """A launch's grid and numbers follow the sizes of a call, and the layout says which."""
    n = symbol("n", 8)
    step = DeviceLaunch(
        "a.cubin", "kernel", (0, 1), 1, (n, 2, 1), 128, (ScalarArgument("int32", 4 * n), ScalarArgument("float32", 0.5))
    )
    program = Program((_row(8, CUDA), _row(8, CUDA)), (0,), (1,), (), (step,), device=CUDA)
    assert [symbol.name for symbol in _laid_out(program).symbols] == ["n"]
    described = _laid_out(program.at({"n": 6})).steps[0].step.describe()
    assert (described["grid"], described["scalars"]) == ((6, 2, 1), [("int32", 24), ("float32", 0.5)])


def test_what_only_python_runs_is_a_callback_of_its_own() -> None:
    """Operators that C++ cannot call, and runners without a C function, come after the segments' callbacks; they read tensors."""

    class Runner:
        native = None

        def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
            tensors[1].copy_(tensors[0])

    program = Program(
        (_row(3), _row(3), _row(3), _row(3)),
        (0,),
        (3,),
        (),
        (
            KernelCall("a.so", "double", (0, 1), 1),
            OperatorCall("aten::add", (TensorArgument(1), TensorArgument(1), 2), (2,), "", "Tensor"),
            ExternalCall(Runner(), (2, 3), 1, "copy"),
        ),
    )
    layout = _laid_out(program, program)
    steps = [planned.step for planned in layout.steps]
    assert [step.function for step in steps if isinstance(step, Callback)] == [2, 3, 4, 5]
    assert len(layout.functions) == 4
    assert layout.from_programs == tuple(range(6))
    assert not layout.arenas
    x = torch.ones(3)
    [added] = layout.functions[0]([x, x])
    assert added.tolist() == [3.0] * 3


def test_what_an_operator_takes_as_it_is_keeps_its_form() -> None:
    """A kernel's result that an operator reads in its own strides is not turned into the output's: the output is a view of it."""
    square, flat = TensorSpec((2, 2), "float32", (2, 1), CPU), _row(4)
    program = Program(
        (flat, flat, flat),
        (0,),
        (1, 2),
        (),
        (KernelCall("a.so", "double", (0, 1), 1), OperatorCall("aten::abs", (TensorArgument(1),), (2,), "")),
    )
    piece = Piece(("x",), (flat,), ("a", "b"), (square, flat), program)
    layout = lay_out(frozenset({"x"}), frozenset(), [piece], ["a", "b"])
    [read] = layout.steps[1].step.tensors
    assert layout.values[read.buffer].spec == flat
    assert layout.values[layout.outputs[0]].kind is ValueKind.ALIAS


def test_an_output_that_nothing_writes_is_refused() -> None:
    """The program contradicts itself."""
    with pytest.raises(HybridError, match="no kernel writes out0"):
        _laid_out(Program((_row(3), _row(3)), (0,), (1,), (), ()))


SQUARE = TensorSpec((8, 8), "float32", (8, 1), CPU)
TRANSPOSED = TensorSpec((8, 8), "float32", (1, 8), CPU)


def _callback(inputs: str, outputs: str, spec: TensorSpec | None = SQUARE) -> Piece:
    """A segment that reads and writes values of one spec; names are separated by spaces."""
    reads, writes = tuple(inputs.split()), tuple(outputs.split())
    return Piece(reads, (spec,) * len(reads), writes, (spec,) * len(writes), None)


def _lay_out(pieces: Sequence[Piece], outputs: str, inputs: str = "x y w", constants: str = "w") -> PlanLayout:
    return lay_out(frozenset(inputs.split()), frozenset(constants.split()), pieces, outputs.split())


def test_only_inputs_that_are_read_are_passed() -> None:
    """Each once, in the order of first use, constants that callbacks read among them; what nobody reads is no part of a call."""
    layout = _lay_out([_callback("w x", "a"), _callback("x a", "b")], "b")
    assert layout.inputs == ("w", "x")
    assert layout.slots == ()
    assert len(layout.steps) == 2


def test_values_that_callbacks_make_take_no_planned_memory() -> None:
    """Values that callbacks make are tensors of their own in each call: nothing lies in the arena, and one value has one place for all its
    readers."""
    layout = _lay_out([_callback("x", "a b"), _callback("a", "c"), _callback("a b c", "d")], "d a d")
    assert layout.arena_bytes == 0
    assert len(layout.values) == 5  # x, a, b, c and d
    d, a, again = layout.outputs
    assert d == again != a
    assert [layout.values[number].spec for number in (d, a)] == [SQUARE, SQUARE]


def test_an_input_read_in_two_forms_is_two_values_of_one_input() -> None:
    """Segments may have been built for other strides of the same input: it is passed once."""
    layout = _lay_out([_callback("x", "a"), _callback("x", "b", TRANSPOSED)], "a b")
    assert layout.inputs == ("x",)
    assert [layout.values[number].spec for number in layout.outputs] == [SQUARE, TRANSPOSED]
    assert len(layout.values) == 4


@pytest.mark.parametrize("place", ["input", "output"])
def test_what_is_no_tensor_is_named(place: str) -> None:
    """A value without a spec cannot be laid out ahead of the call."""
    inputs, outputs = ((None,), (SQUARE,)) if place == "input" else ((SQUARE,), (None,))
    with pytest.raises(StaticLayoutError, match=f"^{'x' if place == 'input' else 'a'} is no tensor"):
        _lay_out([Piece(("x",), inputs, ("a",), outputs, None)], "a")


SIZE, OTHER = symbol("s0"), symbol("s1")


def _matrix(rows: Dim, columns: Dim, row: Dim, column: Dim = 1) -> TensorSpec:
    return TensorSpec((rows, columns), "float32", (row, column), CPU)


def _of_kernels(given: TensorSpec, made: TensorSpec, inner: TensorSpec, number: int = 0) -> Piece:
    """A segment of two kernels, with a buffer of the form `inner` between them, and its input and output as given."""
    steps = (KernelCall("a.so", "double", (0, 1), 1, (SIZE,)), KernelCall("a.so", "double", (1, 2), 1))
    program = Program((given, inner, made), (0,), (2,), (), steps)
    return Piece((f"v{number}",), (given,), (f"v{number + 1}",), (made,), program)


def test_sizes_known_only_at_run_time_stay_in_the_layout() -> None:
    """In values, steps and lives; offsets in the arena and its bytes are left to each set of sizes."""
    matrix = _matrix(SIZE, 4, 4)
    layout = lay_out(frozenset({"v0"}), frozenset(), [_of_kernels(matrix, matrix, _row(12))], ["v1"])
    assert [s.name for s in layout.symbols] == ["s0"]
    assert [value.kind for value in layout.values] == [ValueKind.INPUT, ValueKind.ARENA, ValueKind.FRESH]
    assert layout.lives == {CPU: (Life(1, 0, 1),)}
    assert layout.arenas == {CPU: 0}
    assert layout.description.symbols == ("s0",)


@pytest.mark.parametrize(
    ("made", "wanted", "copies"),
    [
        (_matrix(SIZE, 4, 4), _matrix(SIZE, 4, 4), False),
        (_matrix(SIZE, 4, 4), _matrix(SIZE, 4, SIZE), True),  # alike at 4
        (_matrix(SIZE, 4, 4), _matrix(SIZE, 4, 1, SIZE), True),  # alike at 1 in each of the two dimensions
        (_matrix(1, SIZE, SIZE), _matrix(1, SIZE, 7), False),  # one row
    ],
)
def test_what_agrees_at_some_sizes_only_is_copied(made: TensorSpec, wanted: TensorSpec, copies: bool) -> None:
    """Between segments, so that the layout is right at every size."""
    pieces = [_of_kernels(made, made, made), _of_kernels(wanted, made, made, 1)]
    pieces[1] = replace(pieces[1], input_specs=(made,))
    layout = lay_out(frozenset({"v0"}), frozenset(), pieces, ["v2"])
    assert [isinstance(planned.step, Copy) for planned in layout.steps].count(True) == copies


@pytest.mark.parametrize(
    ("buffer", "spec", "kind"),
    [
        (TensorSpec((4 * SIZE,), "float32", (1,), CPU), _matrix(SIZE, 4, 4), ValueKind.FRESH),
        (TensorSpec((4 * SIZE,), "float32", (1,), CPU), _matrix(4, SIZE, SIZE), ValueKind.FRESH),
        (TensorSpec((4 * SIZE + 4,), "float32", (1,), CPU), _matrix(SIZE, 4, 4), ValueKind.ALIAS),
        # Of the same last element, but empty at other sizes.
        (_matrix(SIZE, OTHER, OTHER), _matrix(SIZE * OTHER, 1, 1), ValueKind.FRESH),
        (_matrix(SIZE, 1, 1), _matrix(1, SIZE, 0), ValueKind.FRESH),
    ],
)
def test_an_output_that_fills_its_buffer_is_the_buffer(buffer: TensorSpec, spec: TensorSpec, kind: ValueKind) -> None:
    """Unless that holds at some sizes only: then the output is a view of the buffer."""
    piece = replace(_of_kernels(_row(3), buffer, _row(3)), output_specs=(spec,))
    layout = lay_out(frozenset({"v0"}), frozenset(), [piece], ["v1"])
    assert layout.values[layout.outputs[0]].kind is kind
    assert layout.values[layout.outputs[0]].spec == spec


def test_constants_may_have_any_sizes() -> None:
    """Their slots then depend on sizes, and the plan with them."""
    spec, wanted = _matrix(SIZE, 4, 4), _matrix(SIZE, 4, OTHER)
    piece = replace(_of_kernels(wanted, _row(12), _row(3)), input_specs=(spec,))
    layout = lay_out(frozenset({"v0"}), frozenset({"v0"}), [piece], ["v1"])
    assert [s.name for s in layout.symbols] == ["s0", "s1"]
    (slot,) = layout.slots
    assert (slot.spec, slot.is_copy) == (wanted, True)
    assert slot.at({"s0": 3, "s1": 8}).spec == _matrix(3, 4, 8)


def test_random_numbers_are_taken_by_sizes() -> None:
    """Numbers are taken for the operators of the call's sizes."""
    number = TensorSpec((), "int64", (), CPU)
    program = Program(
        (_row(3), number, number, _row(3)),
        (0,),
        (3,),
        (),
        (KernelCall("a.so", "double", (0, 1, 2, 3), 1),),
        random=RandomNumbers(1, (2,), (2 * SIZE,)),
    )
    layout = _laid_out(program)
    (taken,) = layout.functions
    assert isinstance(taken, AtSizes)
    assert taken.at({"s0": 5}) == Taken(CPU, (10,))


_forms = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3)


def _elements(spec: TensorSpec) -> list[int]:
    """The storage offsets that a tensor of the spec addresses, in row-major order."""
    return torch.arange(spec.span).as_strided(spec.shape, spec.strides).flatten().tolist()  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(_forms, st.data())
def test_same_memory_is_the_same_elements(form: list[tuple[int, int]], data: st.DataObject) -> None:
    """Two specs of one shape address the same memory exactly where their elements lie at the same places: strides of dimensions of
    size 1 do not count, all others do."""
    shape = tuple(n for n, _ in form)
    first = TensorSpec(shape, "float32", tuple(stride for _, stride in form), CPU)
    others = [data.draw(st.sampled_from([stride, stride + 1, 0])) for _, stride in form]
    second = TensorSpec(shape, "float32", tuple(others), CPU)
    assert same_memory(first, second) == (_elements(first) == _elements(second))


def test_another_form_is_other_memory() -> None:
    """Another dtype or another shape, be it of the same elements, is not the same."""
    assert same_memory(SQUARE, SQUARE)
    assert not same_memory(SQUARE, TRANSPOSED)
    assert not same_memory(SQUARE, TensorSpec((8, 8), "int32", (8, 1), CPU))
    assert not same_memory(SQUARE, TensorSpec((64,), "float32", (1,), CPU))
    assert not same_memory(SQUARE, TensorSpec((8, 8, 1), "float32", (8, 1, 1), CPU))
