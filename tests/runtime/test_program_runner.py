"""Programs of every kind of step that runs on the host, through real plans, against PyTorch."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.program import (
    ExternalCall,
    KernelCall,
    OperatorCall,
    OperatorResult,
    PackedConstant,
    Program,
    Step,
    TensorArgument,
)
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.runtime import program_runner
from torch_hybrid_backend.runtime.executor import Executor, GraphPlans
from torch_hybrid_backend.runtime.plan_layout import Piece
from torch_hybrid_backend.runtime.program_runner import ProgramRunner
from torch_hybrid_backend.runtime.steps_in_python import call_operator
from torch_hybrid_backend.sizes.size import symbol

T = TensorArgument
FLAT = TensorSpec((4096,), "float32", (1,), CPU)  # as in conftest.py


@dataclass(frozen=True)
class Case:
    """An operator, its inputs and arguments (tensors by their numbers), and what the program keeps of its results (None: nothing)."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    arguments: tuple[Any, ...]
    kept: tuple[Any, ...] = (True,)
    native: bool = True

    @property
    def id(self) -> str:
        return self.name


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y = _randn(4, 6), _randn(4, 6, seed=1)
WEIGHT, BIAS = _randn(6, seed=2), _randn(6, seed=3)
ROWS = torch.tensor([2, 0, 3])

CASES = [
    # Several results, some or all of them read.
    Case("aten::topk", (X,), (T(0), 2, -1, True, True), (True, True)),
    Case("aten::topk", (X,), (T(0), 2, -1, False, True), (None, True)),
    Case("aten::max.dim", (X,), (T(0), 1, True), (True, True)),
    Case("aten::split.Tensor", (X,), (T(0), 3, 1), ((True, True),)),
    Case("aten::split.Tensor", (X,), (T(0), 4, 1), ((None, True),)),
    Case("aten::unbind.int", (X,), (T(0), 0), ((True, None, True, True),)),
    Case(
        "aten::native_layer_norm_backward",
        (X, Y, X.mean(1, True), X.var(1, keepdim=True).rsqrt(), WEIGHT),
        (T(0), T(1), (6,), T(2), T(3), T(4), None, (True, True, False)),
        (True, True, None),
    ),
    # Optional tensors, there and not; lists of tensors, also of optional ones, and of one tensor twice.
    Case("aten::native_layer_norm", (X, WEIGHT, BIAS), (T(0), (6,), T(1), T(2), 1e-5), (True, True, True)),
    Case("aten::native_layer_norm", (X,), (T(0), (6,), None, None, 1e-5), (True, None, None)),
    Case("aten::cat", (X, Y), ((T(0), T(1), T(0)), 1)),
    Case("aten::index.Tensor", (X, ROWS), (T(0), (T(1),))),
    Case("aten::index.Tensor", (X, ROWS), (T(0), (None, T(1)))),
    # Numbers, lists of them, and strings.
    Case("aten::gelu", (X,), (T(0), "tanh")),
    Case("aten::div.Tensor_mode", (X, Y), (T(0), T(1), "floor")),
    Case("aten::logit", (X.sigmoid(),), (T(0), 0.25)),
    Case("aten::mean.dim", (X,), (T(0), (1,), False, None)),
    Case("aten::mean.dim", (X,), (T(0), None, True, torch.float64)),
    Case("aten::cumsum", (X,), (T(0), 1, torch.float64)),
    Case("aten::upsample_nearest2d.vec", (_randn(1, 2, 3, 3),), (T(0), None, (2.0, 1.5))),
    Case("aten::var.correction", (X,), (T(0), (0,), None, False)),
    # Dtype, layout, device, memory format.
    Case("aten::zeros", (), ((2, 3), torch.int64, torch.strided, torch.device("cpu"), False)),
    Case("aten::zeros_like", (X,), (T(0), None, None, torch.device("cpu", 0), None, torch.preserve_format)),
    Case("aten::clone", (_randn(2, 3, 4, 5),), (T(0), torch.channels_last)),
    Case("aten::to.dtype", (X,), (T(0), torch.bfloat16, False, True, None)),
    # What the dispatcher's C interface cannot do: numbers that may be whole or not, in lists too; results of mixed types.
    Case("aten::add.Tensor", (X, Y), (T(0), T(1), 2), native=False),
    Case("aten::addmm", (BIAS, X, _randn(6, 6)), (T(0), T(1), T(2), 0.5, 1), native=False),
    Case("aten::clamp", (X,), (T(0), None, 0.5), native=False),
    Case("aten::masked_fill.Scalar", (X, X > 0), (T(0), T(1), -math.inf), native=False),
    Case("aten::constant_pad_nd", (X,), (T(0), (1, 2), 1.5), native=False),
]


def _operator(case: Case) -> Callable[..., Any]:
    namespace, _, name = case.name.partition("::")
    name, _, overload = name.partition(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    return operator


def _expected(case: Case) -> list[Any]:
    """The operator's results as PyTorch computes them: tensors and lists of tensors."""

    def value(argument: Any) -> Any:
        if isinstance(argument, TensorArgument):
            return case.inputs[argument.buffer]
        return [value(item) for item in argument] if isinstance(argument, tuple) else argument

    operator: Any = _operator(case)
    known = operator._schema.arguments
    given = [value(argument) for argument in case.arguments]
    results = operator(
        *(v for v, a in zip(given, known, strict=True) if not a.kwarg_only),
        **{a.name: v for v, a in zip(given, known, strict=True) if a.kwarg_only},
    )
    return list(results) if len(case.kept) > 1 else [results]


def _call(case: Case) -> tuple[OperatorCall, list[torch.Tensor]]:
    """The operator call over buffers numbered behind the inputs, and the results that it keeps, in order."""
    kept: list[torch.Tensor] = []

    def number(wanted: Any, result: torch.Tensor) -> int | None:
        if wanted is None:
            return None
        kept.append(result)
        return len(case.inputs) + len(kept) - 1

    results: list[OperatorResult] = []
    for wanted, result in zip(case.kept, _expected(case), strict=True):
        if isinstance(wanted, tuple):
            results.append(tuple(number(w, r) for w, r in zip(wanted, result, strict=True)))
        else:
            results.append(number(wanted, result))
    name, _, overload = case.name.partition(".")
    return OperatorCall(name, case.arguments, tuple(results), "", overload), kept


def _run(step: Step, inputs: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The step as a program of its own, from its inputs to results of the form of `kept`."""
    specs = tuple(map(TensorSpec.of, (*inputs, *kept)))
    numbers = range(len(specs))
    program = Program(specs, tuple(numbers[: len(inputs)]), tuple(numbers[len(inputs) :]), (), (step,))
    runner = ProgramRunner(program)
    first, second = runner(inputs), runner(inputs)
    torch.testing.assert_close(first, second, equal_nan=True)
    assert len(runner.kernel_us(inputs)) == 1
    return second


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_operators_do_what_pytorch_does(case: Case) -> None:
    """Values, dtypes and strides, from C++ where that can call it, else from Python; and the Python way gives the same for all."""
    step, kept = _call(case)
    assert step.runs_in_python == (not case.native)
    results = _run(step, case.inputs, kept)
    assert [r.stride() for r in results] == [r.stride() for r in kept]
    from_python = call_operator(step, [case.inputs[t.buffer] for t in step.tensors])
    torch.testing.assert_close(results, kept)
    torch.testing.assert_close(from_python, kept)


def test_operators_stand_between_kernels(kernels: str) -> None:
    """An operator reads what a kernel wrote, through another shape, and kernels read each of its results."""
    square = TensorSpec((64, 64), "float32", (64, 1), CPU)
    numbers = TensorSpec((64, 64), "int64", (64, 1), CPU)
    steps = (
        KernelCall(kernels, "double", (0, 1), 1),
        OperatorCall("aten::sort", (T(1, square), -1, True), (2, 3), ""),
        KernelCall(kernels, "add", (2, 1, 4), 1),
    )
    program = Program((FLAT, FLAT, square, numbers, FLAT), (0,), (4, 3), (), steps)
    x = _randn(4096)
    out, order = ProgramRunner(program)([x])
    expected, expected_order = (2 * x).view(64, 64).sort(-1, descending=True)
    torch.testing.assert_close(out, expected.flatten() + 2 * x)
    assert torch.equal(order, expected_order)


def test_operators_read_parameters_as_they_are() -> None:
    """An operator takes a constant where it lies, whole or a part: no copy of it is kept, a changed one is seen, and so is one elsewhere."""
    weight = torch.nn.Parameter(_randn(3, 6), requires_grad=False)
    row = TensorSpec((1, 6), "float32", (6, 1), CPU)
    for argument, rows in (
        (T(1), slice(None)),
        (T(1, TensorSpec.of(weight)), slice(None)),
        (T(1, row, 12), slice(2, 3)),
    ):
        specs = (TensorSpec.of(X), TensorSpec.of(weight), TensorSpec.of(X @ weight[rows].t()))
        program = Program(specs, (0, 1), (2,), (), (OperatorCall("aten::linear", (T(0), argument, None), (2,), ""),))
        piece = Piece(("x", "w"), specs[:2], ("out",), specs[2:], program)
        executor = GraphPlans(("x", "w"), {"w"}, [piece], [lambda inputs: inputs], ("out",)).at({})
        assert [slot.pack for slot in executor.layout.slots] == [None]
        for other in (weight, weight, torch.nn.Parameter(_randn(3, 6), requires_grad=False)):
            torch.testing.assert_close(executor([X, other])[0], X @ other[rows].t())
            other.data.mul_(2)
            torch.testing.assert_close(executor([X, other])[0], X @ other[rows].t())


def test_operators_take_parts_and_return_other_forms() -> None:
    """An operator may read a part of a buffer that begins anywhere, and what it returns is a buffer of another shape."""
    halves = [T(0, TensorSpec((4, 3), "float32", (6, 1), CPU), offset) for offset in (0, 3)]
    form = TensorSpec((4, 4), "float32", (4, 1), CPU)
    product = OperatorCall("aten::linear", (*halves, None), (T(1, form),), "")
    program = Program((TensorSpec.of(X), TensorSpec((2, 8), "float32", (8, 1), CPU)), (0,), (1,), (), (product,))
    torch.testing.assert_close(ProgramRunner(program)([X])[0], (X[:, :3] @ X[:, 3:].t()).view(2, 8))


def test_operators_in_python_read_packed_constants() -> None:
    """Constants that are packed once for an operator are there for one that only Python can call, too."""
    pack = PackedConstant(1, (1,), lambda y: 3 * y)
    program = Program(
        tuple(map(TensorSpec.of, (X, Y, X))),
        (0, -1),
        (2,),
        (pack,),
        (OperatorCall("aten::add", (T(0), T(1), 2), (2,), "", "Tensor"),),
    )
    torch.testing.assert_close(ProgramRunner(program)([X, Y])[0], X + 6 * Y)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            OperatorCall("aten::no_such", (T(0),), (1,), ""),
            "torch has no operator aten::no_such with the overload 'default'",
        ),
        (OperatorCall("aten::topk", (T(0), 2), (1, None), ""), r"aten::topk.* takes 5 arguments, not 2"),
        (
            OperatorCall("aten::topk", (T(0), 2.5, -1, True, True), (1, None), ""),
            r"2\.5 is no int among the arguments of",
        ),
        (OperatorCall("aten::topk", (T(0), True, -1, True, True), (1, None), ""), "True is no int"),
        (OperatorCall("aten::topk", (T(0), 2, -1, 1, True), (1, None), ""), "1 is no bool"),
        (OperatorCall("aten::cat", (T(0), 0), (1,), ""), "is no tuple"),
        (OperatorCall("aten::abs", (3,), (1,), ""), "3 is no tensor"),
        (
            OperatorCall("aten::topk", (T(0), 2, -1, True, True), (1,), ""),
            "does not return what the program takes from it",
        ),
        (
            OperatorCall("aten::split", (T(0), 2, 0), (1,), "", "Tensor"),
            "does not return what the program takes from it",
        ),
        (
            OperatorCall("aten::split", (T(0), 2, 0), ((1,),), "", "Tensor"),
            "a result of aten::split.Tensor has 2 tensors instead of 1",
        ),
        (
            OperatorCall("aten::abs", (T(0),), (1,), ""),
            r"the result of aten::abs is float32\(4, 6\).* instead of float32\(2\)",
        ),
        (
            OperatorCall("aten::topk", (T(0), 99, -1, True, True), (1, None), ""),
            "selected index k out of range|API call failed",
        ),
        (OperatorCall("aten::add", (T(0), T(0)), (1,), "", "Tensor"), "aten::add.* takes 3 arguments, not 2"),
        (OperatorCall("aten::add", (T(0), T(0), 1), ((1,),), "", "Tensor"), "does not return what the program takes"),
    ],
)
def test_operators_that_cannot_be_called_say_so(call: OperatorCall, match: str) -> None:
    """Other arguments or results than the schema's are refused when the plan is built; what the operator raises comes through."""
    program = Program((TensorSpec.of(X), TensorSpec((2,), "float32", (1,), CPU)), (0,), (1,), (), (call,))
    with pytest.raises(HybridError, match=match):
        ProgramRunner(program)([X])


class Runner:
    """b = 3 a and c = the sum of a, as an engine's runner: in Python, or as a C function with a context of its own."""

    _FUNCTION = ctypes.CFUNCTYPE(
        ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int32, ctypes.c_void_p
    )

    def __init__(self, is_native: bool) -> None:
        self.calls = 0
        self.status = 0
        self._context = ctypes.c_int64(4096)
        self._function = self._FUNCTION(self._run)
        self._is_native = is_native

    @property
    def native(self) -> tuple[int, int] | None:
        if not self._is_native:
            return None
        return ctypes.cast(self._function, ctypes.c_void_p).value or 0, ctypes.addressof(self._context)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.calls += 1
        if self.status:
            raise ArithmeticError("the engine's own error")
        a, b, c = tensors
        b.copy_(3 * a)
        c.copy_(a.sum())

    def _run(self, context: int, arguments: Any, count: int, stream: int | None) -> int:
        self.calls += 1
        elements = ctypes.c_int64.from_address(context).value
        floats = [ctypes.cast(arguments[i], ctypes.POINTER(ctypes.c_float)) for i in range(count)]
        a, b, c = (
            torch.frombuffer((ctypes.c_float * n).from_address(ctypes.addressof(p.contents)), dtype=torch.float32)
            for p, n in zip(floats, (elements, elements, 1), strict=True)
        )
        b.copy_(3 * a)
        c.copy_(a.sum())
        return self.status if stream is None else 99


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "python"])
def test_external_calls_stand_between_kernels(kernels: str, is_native: bool) -> None:
    """An engine's runner reads and writes what kernels do: by address, in the arena, from C++; as tensors from Python."""
    runner = Runner(is_native)
    one = TensorSpec((), "float32", (), CPU)
    steps = (
        KernelCall(kernels, "double", (0, 1), 1),
        ExternalCall(runner, (1, 2, 3), 2, "triple"),
        KernelCall(kernels, "add", (1, 2, 4), 1),
    )
    program = Program((FLAT, FLAT, FLAT, one, FLAT), (0,), (4, 3), (), steps)
    run = ProgramRunner(program)
    for seed in range(3):
        x = _randn(4096, seed=seed)
        out, total = run([x])
        torch.testing.assert_close(out, 8 * x)
        torch.testing.assert_close(total, 2 * x.sum())
    assert runner.calls == 3
    assert len(run.kernel_us([x])) == 3
    runner.status = 5
    expected = "the external call triple failed with status 5" if is_native else "the engine's own error"
    with pytest.raises(HybridError if is_native else ArithmeticError, match=expected):
        run([x])


def test_sizes_that_alternate_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set of sizes has its plan, and all share what is packed; when they are let go of, the next call makes its own anew."""
    rows = symbol("s0", 4)
    spec = TensorSpec((rows, 6), "float32", (6, 1), CPU)
    row = TensorSpec((6,), "float32", (1,), CPU)
    packed: list[torch.Tensor] = []
    plans: list[Executor] = []

    def pack(y: torch.Tensor) -> torch.Tensor:
        packed.append(y)
        return 3 * y

    class Counted(GraphPlans):
        def at(self, values: Mapping[str, int]) -> Executor:
            plans.append(super().at(values))
            return plans[-1]

    monkeypatch.setattr(program_runner, "GraphPlans", Counted)
    program = Program(
        (spec, row, spec),
        (0, -1),
        (2,),
        (PackedConstant(1, (1,), pack),),
        (OperatorCall("aten::add", (T(0), T(1), 2), (2,), "", "Tensor"),),
        signature=(spec, row),
    )
    run = ProgramRunner(program)
    y = torch.rand(6)
    for count in (4, 5, 4, 5, 7, 4):
        x = torch.rand(count, 6)
        torch.testing.assert_close(run([x, y])[0], x + 6 * y)
    assert (len(plans), len(packed)) == (3, 1)
    run.release()
    torch.testing.assert_close(run([x, y])[0], x + 6 * y)
    assert (len(plans), len(packed)) == (4, 2)
    dropped = weakref.ref(run)
    gc.disable()
    try:
        del run
        assert dropped() is None  # memory of a graph that is dropped waits for no collection
    finally:
        gc.enable()
