"""Whole graphs through the C++ plan, against the Python executor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.fx
from torch.multiprocessing.reductions import StorageWeakRef

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.hoisted_inputs import CallInput, FoldedValue, HoistedInputs
from torch_hybrid_backend.core.program import KernelCall, OperatorCall, PackedConstant, Program, TensorArgument
from torch_hybrid_backend.core.region import PartitionedGraph, Region, RegionInput, Segment
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.runtime import executor as module
from torch_hybrid_backend.runtime.executor import Executor, build_executor, can_address
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.plan_layout import StaticLayoutError
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.runtime.python_executor import PythonExecutor
from torch_hybrid_backend.sizes.size import symbol

SQUARE = TensorSpec((64, 64), "float32", (64, 1), CPU)
TRANSPOSED = TensorSpec((64, 64), "float32", (1, 64), CPU)
FLAT = TensorSpec((4096,), "float32", (1,), CPU)


@dataclass(frozen=True)
class Compiled:
    """A compiled region as an engine would return it."""

    program: Program | None
    runner: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.runner(inputs)


def compiled(program: Program, segment: Segment) -> Compiled:
    specs = [region_input.spec for region_input in segment.region.inputs]
    return Compiled(program, ProgramRunner(program, specs, segment.region.outputs))


def segment(
    function: Callable[..., Any],
    inputs: dict[str, TensorSpec | None],
    outputs: dict[str, TensorSpec | None],
) -> Segment:
    graph_module = torch.fx.symbolic_trace(function)
    region_inputs = tuple(RegionInput(name, spec) for name, spec in inputs.items())
    region = Region(
        "region", graph_module, EagerGraph(graph_module), region_inputs, tuple(outputs.values()), (), "", CPU
    )
    return Segment(region, tuple(inputs), tuple(outputs), "eager")


def linear_chain(kernels: str) -> tuple[PartitionedGraph, list[Any]]:
    """y = 2 (2 x + w + w) by kernels, z = sin(y) by eager, out = 2 z + w by kernels; w is packed once as w + w."""
    first = segment(lambda x, w: (2 * (2 * x + 2 * w),), {"x": SQUARE, "w": SQUARE}, {"y": SQUARE})
    eager = segment(lambda y: (y.sin(),), {"y": SQUARE}, {"z": SQUARE})
    last = segment(lambda z, w: (2 * z + w,), {"z": SQUARE, "w": SQUARE}, {"out": SQUARE})
    first_program = Program(
        buffers=(SQUARE, FLAT, FLAT, SQUARE, SQUARE),
        inputs=(0, -1),
        outputs=(4,),
        constants=(PackedConstant(1, (1,), lambda w: (w + w).flatten()),),
        steps=(
            KernelCall(kernels, "double", (0, 2), 1),
            KernelCall(kernels, "add", (2, 1, 3), 1),
            KernelCall(kernels, "double", (3, 4), 1),
        ),
    )
    last_program = Program(
        buffers=(SQUARE, SQUARE, FLAT, SQUARE),
        inputs=(0, 1),
        outputs=(3,),
        constants=(),
        steps=(KernelCall(kernels, "double", (0, 2), 1), KernelCall(kernels, "add", (2, 1, 3), 1)),
    )
    graph = PartitionedGraph(("x", "w"), frozenset({"w"}), (first, eager, last), ("out", "y"))
    segments = [compiled(first_program, first), eager.region.eager, compiled(last_program, last)]
    return graph, segments


def reference(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = 4 * x + 4 * w
    return [2 * y.sin() + w, y]


@pytest.mark.usefixtures("threads")
def test_kernels_and_eager_segments_agree_with_the_python_executor(kernels: str) -> None:
    """Both executors run kernels, packed and direct constants and callbacks to the same results."""
    graph, segments = linear_chain(kernels)
    executor, python = build_executor(graph, segments), PythonExecutor(graph, segments)
    w = torch.nn.Parameter(torch.randn(64, 64))
    for _ in range(3):
        x = torch.randn(64, 64)
        results, expected = executor([x, w]), python([x, w])
        torch.testing.assert_close(results, reference(x, w.detach()))
        torch.testing.assert_close(results, expected)
        assert not any(result.requires_grad for result in results)


@pytest.mark.usefixtures("threads")
def test_a_timed_call_returns_what_a_call_returns(kernels: str) -> None:
    """And tells the time of every kernel and segment, with what the program says that it computes."""
    graph, segments = linear_chain(kernels)
    named = replace(segments[0].program, origins=(frozenset({"a"}), frozenset({"a", "b"}), frozenset()))
    segments[0] = replace(segments[0], program=named)
    executor, python = build_executor(graph, segments), PythonExecutor(graph, segments)
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    outputs, times = executor.timed([x, w])
    torch.testing.assert_close(outputs, executor([x, w]))
    assert [(origin.label, sorted(origin.nodes)) for time in times for origin in time.origins] == [
        ("double", ["a"]), ("add", ["a", "b"]), ("double", []), ("", []), ("double", []), ("add", [])
    ]  # fmt: skip
    assert {origin.region for time in times for origin in time.origins} == {"region"}
    assert all(time.nanoseconds > 0 for time in times)
    outputs, times = python.timed([x, w])
    torch.testing.assert_close(outputs, executor([x, w]))
    assert [origin.label for time in times for origin in time.origins] == ["", "", ""]


def test_a_timed_call_raises_what_a_segment_raises() -> None:
    """Unchanged, as a call does."""

    def fails(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise KeyError("mine")

    graph = PartitionedGraph(("x",), frozenset(), (segment(lambda x: (x,), {"x": FLAT}, {"y": FLAT}),), ("y",))
    with pytest.raises(KeyError, match="mine"):
        build_executor(graph, [fails]).timed([torch.randn(4096)])


def test_only_what_escapes_leaves_the_arena(kernels: str) -> None:
    """Values between kernels lie in the arena; what callbacks read and the graph returns are tensors."""
    executor = build_executor(*linear_chain(kernels))
    kinds = [value.kind for value in executor.layout.values]
    assert kinds.count(ValueKind.ARENA) == 3
    assert kinds.count(ValueKind.FRESH) == 2
    assert executor.layout.arena_bytes == 2 * FLAT.size_bytes


def test_inputs_are_freed_behind_the_last_step_that_reads_them(kernels: str) -> None:
    """Inputs end so in calls that may free them; parameters live on. What another library or Python runs may have to be run again: then
    nothing is freed."""
    freed: list[bool] = []

    def look(y: torch.Tensor) -> torch.Tensor:
        freed.append(storage.expired())
        return y + 1

    with (
        torch.library._scoped_library("hybrid_tests", "FRAGMENT") as library,
        torch.library._scoped_library("aten", "IMPL") as of_aten,
    ):
        library.define("look(Tensor y) -> Tensor")
        library.impl("look", look, "CPU")
        of_aten.impl("sinc", look, "CPU")
        double = segment(lambda x, w: (2 * x + w,), {"x": SQUARE, "w": SQUARE}, {"y": SQUARE})
        graph = PartitionedGraph(("x", "w"), frozenset({"w"}), (double,), ("y",))
        for operator, frees, is_freed in (
            ("aten::sinc", True, True),
            ("aten::sinc", False, False),
            ("hybrid_tests::look", True, False),
        ):
            steps = (
                KernelCall(kernels, "double", (0, 2), 1),
                KernelCall(kernels, "add", (2, 1, 3), 1),
                OperatorCall(operator, (TensorArgument(3),), (4,), "look"),
            )
            program = Program((SQUARE,) * 5, (0, 1), (4,), (), steps)
            executor = build_executor(graph, [Compiled(program, list)])
            x, w = torch.randn(64, 64), torch.randn(64, 64)
            expected, storage = 2 * x + w + 1, StorageWeakRef(x.untyped_storage())
            inputs = [x, w]
            del x
            call = executor.run_freeing if frees else executor
            assert torch.equal(call(inputs)[0], expected)
            assert len(inputs) == (0 if is_freed else 2)
            assert freed.pop() == is_freed
    with_python = build_executor(*linear_chain(kernels))
    inputs = [torch.randn(64, 64), torch.randn(64, 64)]
    torch.testing.assert_close(with_python.run_freeing(inputs), reference(*inputs))


def test_results_outlive_later_calls(kernels: str) -> None:
    """A result is never overwritten by the next call."""
    executor = build_executor(*linear_chain(kernels))
    w = torch.randn(64, 64)
    x = torch.randn(64, 64)
    first = executor([x, w])
    executor([x + 1, w])
    torch.testing.assert_close(first, reference(x, w))


def test_constants_that_a_device_cannot_be_given_are_copied(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a GPU take addresses of whole 16 bytes: of a parameter that begins elsewhere they read a copy, which follows it."""
    flat = torch.randn(4097)
    askew, straight = flat[1:].view(64, 64), torch.randn(64, 64)
    gpu = Device("cuda", 0)
    assert [can_address(device, w) for device in (gpu, CPU) for w in (askew, straight)] == [False, True, True, True]
    monkeypatch.setattr(module, "can_address", lambda _, tensor: can_address(gpu, tensor))  # as if the CPU were one
    last = segment(lambda x, w: (x + w,), {"x": SQUARE, "w": SQUARE}, {"out": SQUARE})
    program = Program((SQUARE, SQUARE, SQUARE), (0, 1), (2,), (), (KernelCall(kernels, "add", (0, 1, 2), 1),))
    graph = PartitionedGraph(("x", "w"), frozenset({"w"}), (last,), ("out",))
    executor = build_executor(graph, [compiled(program, last)])
    x = torch.randn(64, 64)
    for w in (askew, straight, askew):
        for _ in range(2):
            torch.testing.assert_close(executor([x, w]), [x + w])
            w.mul_(3)
        bound = executor._constants.get([x, w])
        addresses = [*bound.borrowed.values(), *(tensor.data_ptr() for tensor in bound.owned.values())]
        assert [address == w.data_ptr() for address in addresses] == [w is straight]
        assert addresses[0] % 16 == 0


def test_parameter_updates_are_seen(kernels: str) -> None:
    """Packed and directly read parameters follow in-place updates, also those that bump no version."""
    executor = build_executor(*linear_chain(kernels))
    w = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64)
    executor([x, w])
    updates: list[Callable[[], object]] = [
        lambda: w.data.mul_(2),
        lambda: w.data.copy_(torch.randn(64, 64)),
        lambda: setattr(w, "data", torch.randn(64, 64)),
        lambda: torch.optim.SGD([w], lr=1.0).step(),
    ]
    w.grad = torch.ones_like(w)
    for update in updates:
        update()
        torch.testing.assert_close(executor([x, w]), reference(x, w.detach()))


def test_threads_with_parameters_of_their_own(kernels: str) -> None:
    """Four threads run one executor, each with other parameters that change between calls."""
    executor = build_executor(*linear_chain(kernels))

    def work(seed: int) -> None:
        w = torch.full((64, 64), float(seed))
        for step in range(50):
            x = torch.full((64, 64), step / 10)
            torch.testing.assert_close(executor([x, w]), reference(x, w))
            if step % 10 == 9:
                w.data.add_(1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_parameters_and_executors_can_die(kernels: str) -> None:
    """Neither keeps the other alive."""
    executor = build_executor(*linear_chain(kernels))
    w = torch.nn.Parameter(torch.randn(64, 64))
    executor([torch.randn(64, 64), w])
    storage, plan = weakref.ref(w.untyped_storage()), weakref.ref(executor._plan)
    del w
    gc.collect()
    assert storage() is None
    del executor
    gc.collect()
    assert plan() is None


def hoisted_graph(kernels: str) -> tuple[PartitionedGraph, list[Any], HoistedInputs, Callable[..., list[torch.Tensor]]]:
    """fold(w) = (w + 1, w.t()); main: out = (w + 1) + w.t() by kernels that want w.t() contiguous, s = sin(w.t())."""
    add = segment(lambda a, b: (a + b,), {"a": SQUARE, "b": TRANSPOSED}, {"out": SQUARE})
    sine = segment(lambda b: (b.sin(),), {"b": TRANSPOSED}, {"s": TRANSPOSED})
    program = Program((SQUARE, SQUARE, SQUARE), (0, 1), (2,), (), (KernelCall(kernels, "add", (0, 1, 2), 1),))
    graph = PartitionedGraph(
        ("n", "x", "a", "b"), frozenset({"a", "b"}), (add, sine), ("out", "s", "a", "x", None, 3, "b", "n", "out")
    )
    hoisted = HoistedInputs((CallInput(2), CallInput(0), FoldedValue(0), FoldedValue(1)), (1,))
    return graph, [compiled(program, add), sine.region.eager], hoisted, lambda raw: [raw[0] + 1, raw[0].t()]


@pytest.mark.parametrize("make", [build_executor, PythonExecutor], ids=["C++", "Python"])
def test_folded_values_follow_their_parameters(kernels: str, make: Callable[..., Any]) -> None:
    """Folded values reach kernels in the strides they want, callbacks, and outputs, and follow the parameter."""
    graph, segments, hoisted, fold = hoisted_graph(kernels)
    executor = make(graph, segments, hoisted, fold)
    w = torch.nn.Parameter(torch.randn(64, 64))
    x = torch.randn(3)
    for _ in range(2):
        now = w.detach()
        out, s, a, same_x, nothing, three, b, number, again = executor([x, w, 17])
        torch.testing.assert_close([out, s, a, b], [now + 1 + now.t(), now.t().sin(), now + 1, now.t()])
        assert s.stride() == (1, 64)
        assert same_x is x
        assert (nothing, three, number) == (None, 3, 17)
        assert again is out
        a.zero_()  # the caller may write to what it gets
        b.zero_()
        torch.testing.assert_close(executor([x, w, 17])[2], now + 1)
        w.data.mul_(2)


def test_outputs_may_alias_inputs_and_each_other(kernels: str) -> None:
    """A program may return an input's memory in another shape, or one buffer twice; no copy is made."""
    piece = segment(
        lambda x: (x.view(-1), 2 * x, (2 * x).view(-1)),
        {"x": SQUARE},
        {"flat": FLAT, "double": SQUARE, "double_flat": FLAT},
    )
    program = Program((SQUARE, FLAT), (0,), (0, 1, 1), (), (KernelCall(kernels, "double", (0, 1), 1),))
    graph = PartitionedGraph(("x",), frozenset(), (piece,), ("flat", "double", "double_flat"))
    x = torch.randn(64, 64)
    flat, double, double_flat = build_executor(graph, [compiled(program, piece)])([x])
    assert flat.data_ptr() == x.data_ptr()
    assert double.data_ptr() == double_flat.data_ptr()
    torch.testing.assert_close([flat, double, double_flat], [x.view(-1), 2 * x, 2 * x.view(-1)])


def test_strides_are_changed_between_segments(kernels: str) -> None:
    """Kernels built for other strides than a value has get a copy; so do graph inputs that come strided."""
    transpose = segment(lambda x: (x.t(),), {"x": SQUARE}, {"t": TRANSPOSED})
    double = segment(lambda t: (2 * t,), {"t": TRANSPOSED}, {"out": SQUARE})
    program = Program((SQUARE, SQUARE), (0,), (1,), (), (KernelCall(kernels, "double", (0, 1), 1),))
    graph = PartitionedGraph(("x",), frozenset(), (transpose, double), ("out",))
    executor = build_executor(graph, [transpose.region.eager, compiled(program, double)])
    x = torch.randn(64, 64)
    for given in (x, x.t(), x.expand(64, 64)[:, torch.arange(64)]):
        [result] = executor([given])
        assert result.stride() == (64, 1)
        torch.testing.assert_close(result, 2 * given.t())


def test_an_eager_segment_may_write_to_an_input() -> None:
    """A graph that mutates its input writes to the caller's tensor, whatever its strides."""
    write = segment(lambda x, y: (x.copy_(y),), {"x": SQUARE, "y": SQUARE}, {"written": SQUARE})
    graph = PartitionedGraph(("x", "y"), frozenset(), (write,), ())
    x, y = torch.zeros(64, 64).t(), torch.randn(64, 64)
    build_executor(graph, [write.region.eager])([x, y])
    torch.testing.assert_close(x, y)


def test_eager_views_of_intermediate_values_stay_valid(kernels: str) -> None:
    """An eager segment may return a view of a kernel's result; it outlives the call and later calls."""
    double = segment(lambda x: (2 * x,), {"x": SQUARE}, {"d": SQUARE})
    view = segment(lambda d: (d.t(),), {"d": SQUARE}, {"v": TRANSPOSED})
    program = Program((SQUARE, SQUARE), (0,), (1,), (), (KernelCall(kernels, "double", (0, 1), 1),))
    graph = PartitionedGraph(("x",), frozenset(), (double, view), ("v",))
    executor = build_executor(graph, [compiled(program, double), view.region.eager])
    x = torch.randn(64, 64)
    [result] = executor([x])
    for _ in range(3):
        executor([torch.zeros(64, 64)])
    torch.testing.assert_close(result, 2 * x.t())


def test_dynamic_graphs_are_refused_and_run_in_python() -> None:
    """Sizes known at run time, as numbers or in shapes, are for other executors."""
    dynamic = TensorSpec((symbol("s0"),), "float32", (1,), CPU)
    narrow = segment(lambda x, n: (x[:n], n + 1), {"x": dynamic, "n": None}, {"y": dynamic, "m": None})
    graph = PartitionedGraph(("x", "n"), frozenset(), (narrow,), ("y", "m"))
    with pytest.raises(StaticLayoutError, match="m is no tensor"):
        build_executor(graph, [narrow.region.eager])
    double = segment(lambda x: (2 * x,), {"x": dynamic}, {"y": dynamic})
    with pytest.raises(StaticLayoutError, match="sizes known only at run time: s0"):
        build_executor(PartitionedGraph(("x",), frozenset(), (double,), ("y",)), [double.region.eager])
    x = torch.randn(5)
    y, m = PythonExecutor(graph, [narrow.region.eager])([x, 3])
    torch.testing.assert_close(y, x[:3])
    assert m == 4


def test_programs_that_contradict_themselves_are_refused(kernels: str) -> None:
    """An output nothing writes, a packed input that changes, and a packed constant of the wrong size are errors."""
    piece = segment(lambda x: (2 * x,), {"x": SQUARE}, {"out": SQUARE})
    graph = PartitionedGraph(("x",), frozenset(), (piece,), ("out",))

    def build(program: Program, constants: frozenset[str] = frozenset()) -> Executor:
        with_constants = PartitionedGraph(graph.inputs, constants, graph.segments, graph.outputs)
        return build_executor(with_constants, [compiled(program, piece)])

    with pytest.raises(HybridError, match="no kernel writes out"):
        build(Program((SQUARE, SQUARE), (0,), (1,), (), ()))
    double = KernelCall(kernels, "double", (0, 1), 1)
    pack = PackedConstant(0, (0,), lambda x: x[1:].flatten())
    with pytest.raises(HybridError, match="packs x, which changes"):
        build(Program((SQUARE, SQUARE), (-1,), (1,), (pack,), (double,)))
    executor = build(Program((SQUARE, SQUARE), (-1,), (1,), (pack,), (double,)), frozenset({"x"}))
    with pytest.raises(HybridError, match="packing x gave"):
        executor([torch.randn(64, 64)])


def test_a_program_runs_alone(kernels: str) -> None:
    """ProgramRunner runs one program from Python, packs its constants and frees them on release."""
    _, segments = linear_chain(kernels)
    runner = ProgramRunner(segments[0].program)
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    for _ in range(2):
        torch.testing.assert_close(runner([x, w]), [4 * x + 4 * w])
        w.data.mul_(2)
    runner.release()
    torch.testing.assert_close(runner([x, w]), [4 * x + 4 * w])


def test_wrong_results_of_a_segment_are_named() -> None:
    """Another shape or number of results than the region's is an error in both executors."""
    part = segment(lambda x: (x + 1,), {"x": FLAT}, {"out": FLAT})
    graph = PartitionedGraph(("x",), frozenset(), (part,), ("out",))
    x = torch.zeros(4096)
    for make in (build_executor, PythonExecutor):
        with pytest.raises(HybridError, match="returned 2 values instead of 1"):
            make(graph, [lambda inputs: [inputs[0], inputs[0]]])([x])
        with pytest.raises(HybridError, match=r"4095.* instead of "):
            make(graph, [lambda inputs: [inputs[0][1:]]])([x])
