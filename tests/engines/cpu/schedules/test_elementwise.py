"""Elementwise kernels against eager: odd shapes, every dtype, transposes, blocked layouts, guards; and vector code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.engines.cpu.schedule_runner import HOST, NARROW, run_kernel
from torch_hybrid_backend.engines.cpu.schedules import elementwise
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
from torch_hybrid_backend.engines.cpu.tir.pipeline import build
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, index_of, reshape_index
from torch_hybrid_backend.loops.ir import Buffer, Expr, Load, compute_dtype, scalar_index
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, Store
from torch_hybrid_backend.loops.layout import Blocked, Layout, Strided, contiguous
from torch_hybrid_backend.loops.lowerings.arithmetic import lit
from torch_hybrid_backend.loops.lowerings.indexing import bounded

Value = Callable[[tuple[Index, ...]], Expr]


def kernel_of(
    shape: Sequence[int], inputs: Sequence[Argument], outputs: Sequence[tuple[str, Layout | None, Value]]
) -> MapKernel:
    """out[i] = value(i) for each of `outputs`: (dtype, layout, value)."""
    shape = tuple(shape)
    domain = tuple(LoopVar(f"i{d}", n) for d, n in enumerate(shape))
    index = tuple(index_of(v) for v in domain)
    writes, stores = [], []
    for dtype, layout, value in outputs:
        out = Buffer(shape, dtype, "out")
        writes.append(Argument(out, layout or contiguous(shape)))
        stores.append(Store(out, index, value(index)))
    return MapKernel(tuple(inputs), tuple(writes), domain, tuple(stores))


def tensor(shape: Sequence[int], dtype: str = "float32", layout: Layout | None = None) -> Argument:
    shape = tuple(shape)
    return Argument(Buffer(shape, dtype, "x"), layout or contiguous(shape))


def random(shape: Sequence[int], dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(tuple(shape)) > 0.5
    return torch.randn(tuple(shape)).to(kind) if kind.is_floating_point else torch.randint(0, 50, tuple(shape)).to(kind)


SHAPES = [
    (1,),
    (7,),
    (16,),
    (17,),
    (1009,),
    (3, 5),
    (5, 1, 7),
    (2, 3, 4, 5),
    (1, 1),
    (4, 16),
    (127, 131),
    (2, 1, 33, 1),
]


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(shape: tuple[int, ...], target: Target) -> None:
    """x * sigmoid(x) + y on one long axis, whatever its remainder."""
    x, y = tensor(shape), tensor(shape)

    def value(i: tuple[Index, ...]) -> Expr:
        a = x.buffer.at(i)
        return ops.add(ops.mul(a, ops.call("sigmoid", a)), y.buffer.at(i))

    a, b = torch.randn(shape), torch.randn(shape)
    kernel = kernel_of(shape, [x, y], [("float32", None, value)])
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a, y.buffer: b}, target)[0]
    torch.testing.assert_close(out, a * a.sigmoid() + b)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 40, 1)])
def test_a_scalar_of_no_dimensions(shape: tuple[int, ...]) -> None:
    """A 0-dimensional input is broadcast; a 0-dimensional output is one store."""
    x, s = tensor(shape), tensor(())
    kernel = kernel_of(shape, [x, s], [("float32", None, lambda i: ops.mul(x.buffer.at(i), s.buffer.at(())))])
    a = torch.randn(shape)
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a, s.buffer: torch.tensor(3.0)})[0]
    torch.testing.assert_close(out, a * 3)
    kernel = kernel_of((), [s], [("float32", None, lambda i: ops.call("exp", s.buffer.at(())))])
    torch.testing.assert_close(
        run_kernel(kernel, elementwise.emit, {s.buffer: torch.tensor(3.0)})[0], torch.tensor(3.0).exp()
    )


DTYPES = "float32 float64 bfloat16 float16 int64 int32 int16 int8 uint8 bool".split()


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_casts(source: str, target_dtype: str) -> None:
    """Every dtype converted to every other, loads widened and stores rounded as eager does."""
    x = tensor((3, 37), source)
    kernel = kernel_of(
        (3, 37), [x], [(target_dtype, None, lambda i: ops.cast(x.buffer.at(i), compute_dtype(target_dtype)))]
    )
    a = random((3, 37), source)
    if source.startswith(("float", "bfloat")) and target_dtype == "uint8":
        a = a.abs()
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a})[0]
    assert torch.equal(out, a.to(getattr(torch, target_dtype)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_round_to_even_and_keep_nan(dtype: str) -> None:
    """Stores of float32 round to nearest even; NaN, infinities, overflow and denormals survive."""
    a = torch.cat([torch.randn(3000), torch.randn(3000) * 1e-6])
    a = torch.cat(
        [a, torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 3.4e38, 65520.0, 1e-40, 1e-7])]
    )
    a = torch.cat([a, torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x3F808000, 0x3F818000]).int().view(torch.float32)])
    x = tensor(a.shape)
    kernel = kernel_of(a.shape, [x], [(dtype, None, x.buffer.at)])
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a})[0]
    torch.testing.assert_close(out, a.to(getattr(torch, dtype)), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(33, 47), (1, 5), (128, 64), (200, 3)])
def test_transposes(shape: tuple[int, int], dtype: str) -> None:
    """A transposed read, and a transposed write."""
    a = random(shape, dtype)
    x = tensor(shape, dtype)
    kernel = kernel_of(shape[::-1], [x], [(dtype, None, lambda i: x.buffer.at((i[1], i[0])))])
    assert torch.equal(run_kernel(kernel, elementwise.emit, {x.buffer: a})[0], a.t())
    kernel = kernel_of(shape, [x], [(dtype, Strided((1, shape[0])), x.buffer.at)])
    assert torch.equal(run_kernel(kernel, elementwise.emit, {x.buffer: a})[0], a)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("channels", [3, 16, 20, 40])
@pytest.mark.parametrize("read", [None, 16, 8, "last"])
@pytest.mark.parametrize("write", [None, 16, 8, "last"])
def test_layouts(channels: int, read: int | str | None, write: int | str | None, target: Target) -> None:
    """relu(x + bias) read from and written to plain, blocked and channels-last memory; channels need not fill a block."""
    shape = (2, channels, 5, 7)

    def layout(kind: int | str | None) -> Layout | None:
        if isinstance(kind, int):
            return Blocked(kind)
        return Strided((channels * 35, 1, channels * 7, channels)) if kind else None

    x, bias = tensor(shape, layout=layout(read)), tensor((channels,))

    def value(i: tuple[Index, ...]) -> Expr:
        total = ops.add(x.buffer.at(i), bias.buffer.at((i[1],)))
        return ops.call("max", total, ops.const(0, "float32"))

    kernel = kernel_of(shape, [x, bias], [("float32", layout(write), value)])
    a, b = torch.randn(shape), torch.randn(channels)
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a, bias.buffer: b}, target)[0]
    torch.testing.assert_close(out, (a + b.view(-1, 1, 1)).relu())


@pytest.mark.parametrize("layout", [None, Blocked(16)])
def test_several_stores_share_their_work(layout: Layout | None) -> None:
    """Two results of one domain, of different dtypes and layouts."""
    shape = (2, 19, 6, 5)
    x = tensor(shape)

    def e(i: tuple[Index, ...]) -> Expr:
        return ops.call("exp", x.buffer.at(i))

    kernel = kernel_of(
        shape,
        [x],
        [("float32", layout, e), ("bool", None, lambda i: ops.call("gt", e(i), ops.const(1, "float32")))],
    )
    a = torch.randn(shape)
    first, second = run_kernel(kernel, elementwise.emit, {x.buffer: a})
    torch.testing.assert_close(first, a.exp())
    assert torch.equal(second, a.exp() > 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("before", [1, 16])
def test_padding_reads_nothing_outside(axis: int, before: int) -> None:
    """A guard along any axis: its loads are made only where it holds. Reads outside would show as NaN or crash."""
    inner = (5, 6, 37)
    shape = tuple(n + before + 2 if d == axis else n for d, n in enumerate(inner))
    x = tensor(inner)

    def value(i: tuple[Index, ...]) -> Expr:
        place = tuple(k - before if d == axis else k for d, k in enumerate(i))
        return ops.guard(
            ops.index_in(place[axis], 0, inner[axis]), ops.call("exp", x.buffer.at(place)), ops.const(7, "float32")
        )

    a = torch.randn(inner)
    pads = [0] * 6
    pads[2 * (2 - axis)], pads[2 * (2 - axis) + 1] = before, 2
    expected = torch.nn.functional.pad(a.exp(), pads, value=7.0)
    out = run_kernel(kernel_of(shape, [x], [("float32", None, value)]), elementwise.emit, {x.buffer: a})[0]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_concatenation_is_nested_guards(axis: int) -> None:
    """Three tensors side by side, the pieces' borders inside vectors."""
    parts = [tensor(tuple(n if d == axis else 21 for d in range(2))) for n in (5, 17, 30)]

    def value(i: tuple[Index, ...]) -> Expr:
        def at(k: int, start: int) -> Expr:
            buffer = parts[k].buffer
            load = buffer.at(tuple(j - start if d == axis else j for d, j in enumerate(i)))
            end = start + buffer.shape[axis]
            return load if k == 2 else ops.guard(ops.index_in(i[axis], 0, end), load, at(k + 1, end))

        return at(0, 0)

    shape = tuple(52 if d == axis else 21 for d in range(2))
    data = [torch.randn(p.buffer.shape) for p in parts]
    kernel = kernel_of(shape, parts, [("float32", None, value)])
    inputs = {p.buffer: d for p, d in zip(parts, data, strict=True)}
    assert torch.equal(run_kernel(kernel, elementwise.emit, inputs)[0], torch.cat(data, axis))


def test_embedding_reads_through_an_index() -> None:
    """A scalar read from a tensor is an index."""
    table, ids = tensor((50, 33)), tensor((4, 6), "int64")

    def value(i: tuple[Index, ...]) -> Expr:
        row = scalar_index(ids.buffer.at(i[:2]), 0, 49)
        return ops.add(table.buffer.at((row, i[2])), ops.const(1, "float32"))

    weights, rows = torch.randn(50, 33), torch.randint(0, 50, (4, 6))
    kernel = kernel_of((4, 6, 33), [table, ids], [("float32", None, value)])
    out = run_kernel(kernel, elementwise.emit, {table.buffer: weights, ids.buffer: rows})[0]
    torch.testing.assert_close(out, weights[rows] + 1)


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("sizes", [(10_007, 9_000, 5), (1, 1, 1), (64, 1, 31), (3,) * 20])
@pytest.mark.parametrize("rows", [1, 3])
def test_concatenation_along_the_vector_axis(rows: int, sizes: tuple[int, ...], target: Target) -> None:
    """Pieces of whole chunks, of single elements, and more of them than are cut."""
    parts = [tensor((rows, n)) for n in sizes]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def value(i: tuple[Index, ...]) -> Expr:
        found = parts[0].buffer.at(i)
        for part, start in zip(parts[1:], starts[1:], strict=True):
            inside = ops.index_in(i[1], start, start + part.buffer.shape[1])
            found = ops.guard(inside, part.buffer.at((i[0], i[1] - start)), found)
        first = ops.call("lt", ops.from_index(i[1]), ops.from_index(sizes[0]))
        return ops.where(first, ops.mul(found, ops.const(2, "float32")), found)

    data = [torch.randn(rows, n) for n in sizes]
    inputs = {p.buffer: d for p, d in zip(parts, data, strict=True)}
    out = run_kernel(kernel_of((rows, sum(sizes)), parts, [("float32", None, value)]), elementwise.emit, inputs, target)
    assert torch.equal(out[0], torch.cat([data[0] * 2, *data[1:]], 1))


def test_padded_rows_are_copied_by_vectors() -> None:
    """Margins on both sides of both dimensions: between them whole vectors, neither gathered nor masked."""
    x = tensor((6, 56, 56))

    def value(i: tuple[Index, ...]) -> Expr:
        place = (i[0], i[1] - 1, i[2] - 1)
        inside = ops.logical_and(ops.index_in(place[1], 0, 56), ops.index_in(place[2], 0, 56))
        return ops.guard(inside, x.buffer.at(place), ops.const(0, "float32"))

    kernel = kernel_of((6, 58, 58), [x], [("float32", None, value)])
    assert "Select" not in str(emit_kernel(kernel, "k", HOST).script())
    a = torch.randn(6, 56, 56)
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a})[0]
    assert torch.equal(out, torch.nn.functional.pad(a, (1, 1, 1, 1)))


@pytest.mark.parametrize("target", [HOST, NARROW], ids=["host", "narrow"])
@pytest.mark.parametrize("shape", [(4, 6, 33), (1, 1, 1), (3, 1, 16), (2, 7, 131)])
def test_row_number_read_once_for_all_lanes(shape: tuple[int, ...], target: Target) -> None:
    """A row's number, wrapped and clamped: also used as a value and in a comparison, in and out of a guard; nothing outside is read."""
    batch, length, width = shape
    table, ids = tensor((50, width)), tensor((batch, length), "int64")

    def value(i: tuple[Index, ...]) -> Expr:
        number = ids.buffer.at(i[:2])
        row = table.buffer.at((bounded(number, 50, wrap=True), i[2]))
        marked = ops.where(ops.call("eq", number, lit(number, 3)), ops.const(0, "float32"), row)
        # Before the first position the index itself would be read outside its tensor.
        before = ids.buffer.at((i[0], i[1] - 1))
        shifted = table.buffer.at((bounded(before, 50, wrap=True), i[2]))
        has_one = ops.call("ge", ops.from_index(i[1]), ops.from_index(1))
        return ops.add(
            ops.mul(marked, ops.cast(number, "float32")), ops.guard(has_one, shifted, ops.const(1, "float32"))
        )

    weights, rows = torch.randn(50, width), torch.randint(-60, 60, (batch, length))
    rows[0, 0] = 3
    kernel = kernel_of(shape, [table, ids], [("float32", None, value)])
    out = run_kernel(kernel, elementwise.emit, {table.buffer: weights, ids.buffer: rows}, target)[0]
    found = weights[torch.where(rows < 0, rows + 50, rows).clamp(0, 49)]
    want = torch.where(rows[..., None] == 3, 0, found) * rows[..., None]
    want[:, 0] += 1
    want[:, 1:] += found[:, :-1]
    torch.testing.assert_close(out, want)


def test_rows_are_copied_by_vectors() -> None:
    """The row's number is read before the vector loop, and the row with whole-vector loads: no gather."""
    table, ids = tensor((50, 768)), tensor((4, 128), "int64")
    kernel = kernel_of(
        (4, 128, 768),
        [table, ids],
        [("float32", None, lambda i: table.buffer.at((bounded(ids.buffer.at(i[:2]), 50, wrap=False), i[2])))],
    )
    script = str(emit_kernel(kernel, "k", HOST).script())
    before, _, vectors = script.partition("vectorized")
    assert "arg1[" in before
    assert "arg1[" not in vectors
    assembly = build("k", emit_kernel(kernel, "k", HOST), tvm_target(HOST)).inspect_source("asm")
    assert "gather" not in assembly


def test_gather_along_the_vector_axis() -> None:
    """An index that differs from lane to lane."""
    table, ids = tensor((9, 50)), tensor((9, 35), "int32")
    kernel = kernel_of(
        (9, 35),
        [table, ids],
        [("float32", None, lambda i: table.buffer.at((i[0], scalar_index(ids.buffer.at(i), 0, 49))))],
    )
    values, places = torch.randn(9, 50), torch.randint(0, 50, (9, 35), dtype=torch.int32)
    out = run_kernel(kernel, elementwise.emit, {table.buffer: values, ids.buffer: places})[0]
    assert torch.equal(out, values.gather(1, places.long()))


def test_views_divide_only_where_they_must() -> None:
    """A reshape that splits and merges dimensions, read in place."""
    x = tensor((6, 35))
    kernel = kernel_of((7, 30), [x], [("float32", None, lambda i: x.buffer.at(reshape_index(i, (6, 35), (7, 30))))])
    a = torch.randn(6, 35)
    assert torch.equal(run_kernel(kernel, elementwise.emit, {x.buffer: a})[0], a.reshape(7, 30))


@pytest.mark.parametrize("dtype", ["int64", "int32", "int8", "uint8"])
@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "mod", "fmod"])
def test_integer_division_never_traps(op: str, dtype: str) -> None:
    """Rounding as eager's; a divisor of 0, and the smallest number over -1, leave the process alive."""
    info = torch.iinfo(getattr(torch, dtype))
    values = torch.tensor([info.min, -7 if info.min else 7, -1 if info.min else 1, 0, 1, 2, 7, info.max])
    a, b = (v.flatten().to(getattr(torch, dtype)) for v in torch.meshgrid(values, values, indexing="ij"))
    x, y = tensor(a.shape, dtype), tensor(a.shape, dtype)
    kernel = kernel_of(a.shape, [x, y], [(dtype, None, lambda i: ops.call(op, x.buffer.at(i), y.buffer.at(i)))])
    out = run_kernel(kernel, elementwise.emit, {x.buffer: a, y.buffer: b})[0]
    safe = (b != 0) & ~((b == -1) & (a == info.min)) if info.min else b != 0
    divisor = torch.where(safe, b, torch.ones_like(b))
    expected = {
        "floordiv": lambda: torch.div(a, divisor, rounding_mode="floor"),
        "truncdiv": lambda: torch.div(a, divisor, rounding_mode="trunc"),
        "mod": lambda: torch.remainder(a, divisor),
        "fmod": lambda: torch.fmod(a, divisor),
    }[op]()
    assert torch.equal(out[safe], expected[safe])


def test_floats_are_not_reals() -> None:
    """x - x is NaN for infinity, x * 0 too, x != x finds NaN: nothing is simplified away."""
    x = tensor((16,))

    def const(v: float) -> Expr:
        return ops.const(v, "float32")

    def at(i: tuple[Index, ...]) -> Load:
        load = x.buffer.at(i)
        assert isinstance(load, Load)
        return load

    kernel = kernel_of(
        (16,),
        [x],
        [
            ("float32", None, lambda i: ops.sub(at(i), at(i))),
            ("float32", None, lambda i: ops.mul(at(i), const(0))),
            ("bool", None, lambda i: ops.call("ne", at(i), at(i))),
            ("bool", None, lambda i: ops.call("not", ops.call("lt", at(i), const(1)))),
            ("float32", None, lambda i: ops.sub(ops.add(at(i), const(1e8)), const(1e8))),
        ],
    )
    a = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0, 1e30] * 2)
    outs = run_kernel(kernel, elementwise.emit, {x.buffer: a})
    for out, expected in zip(outs, [a - a, a * 0, a.isnan(), ~(a < 1), a + 1e8 - 1e8], strict=True):
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_large_kernels_run_in_parallel_tasks() -> None:
    """Sizes around the borders of tasks: nothing is left out or done twice."""
    for n in (16_384, 3 * 4_096 + 5, 50_021):
        x = tensor((n,))
        kernel = kernel_of((n,), [x], [("float32", None, lambda i, x=x: ops.call("exp", x.buffer.at(i)))])
        a = torch.randn(n)
        torch.testing.assert_close(run_kernel(kernel, elementwise.emit, {x.buffer: a})[0], a.exp())


def test_code_of_exp_is_vector_code_in_registers() -> None:
    """The assembly of exp(x): wide vectors, no call of expf, no memory allocation."""
    x = tensor((64, 1000))
    kernel = kernel_of((64, 1000), [x], [("float32", None, lambda i: ops.call("exp", x.buffer.at(i)))])
    built = build("k", emit_kernel(kernel, "k", HOST), tvm_target(HOST))
    assembly, ir = built.inspect_source("asm"), built.inspect_source("ll")
    if HOST.lanes >= 8:
        assert ("zmm" if HOST.lanes == 16 else "ymm") in assembly
    assert "expf" not in assembly
    assert "TVMBackendAllocWorkspace" not in ir
