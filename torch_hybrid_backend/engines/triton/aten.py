"""ATen's operators in place of a kernel around a product, a convolution or attention: cuBLAS, cuBLASLt, cuDNN and the back ends of attention.

Enters: a kernel. Leaves: variants, the one to take where nothing was timed first. Each is one call, a kernel before it for each operand
that does not lie in memory as ATen takes it, and one behind it for what the call cannot compute:

    MapKernel: x * scale, in float16    OperatorKernel: aten::linear(x, weight, bias)    MapKernel: silu, times gate

An operand that is a strided view of a buffer is read there, a parameter included. What a call returns is the kernel's own result where that
lies so.
ATen rounds what it returns to the operands' dtype, as in eager. Sizes may be known only at run time, but for those of convolutions' images.
Nothing here imports Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_hybrid_backend.codegen.operands import Packed, StridedView
from torch_hybrid_backend.codegen.operator_kernel import Operand, OperatorKernel
from torch_hybrid_backend.codegen.variants import Variant
from torch_hybrid_backend.engines.triton.kernels import FlashKernel
from torch_hybrid_backend.engines.triton.schedules.matmul import operand_dtype
from torch_hybrid_backend.engines.triton.target import Target
from torch_hybrid_backend.loops.fusion import replace_loads
from torch_hybrid_backend.loops.index import (
    FloorDiv,
    Index,
    LoopVar,
    Mod,
    as_index,
    contiguous_strides,
    index_of,
    linear,
)
from torch_hybrid_backend.loops.ir import (
    Buffer,
    Call,
    Expr,
    Load,
    buffers_of_expr,
    canonical,
    compute_dtype,
    indices,
    parts,
)
from torch_hybrid_backend.loops.kernels import (
    Argument,
    ConvKernel,
    Kernel,
    MapKernel,
    MatMulKernel,
    Store,
)
from torch_hybrid_backend.loops.layout import Strided, contiguous, offset_of
from torch_hybrid_backend.loops.lowerings import arithmetic as formula
from torch_hybrid_backend.loops.ops import call, is_float, where
from torch_hybrid_backend.sizes.size import Dim, known_at_most, known_int

Anchored = MatMulKernel | ConvKernel | FlashKernel
_HALVES = ("float16", "bfloat16")


def aten_variants(kernel: Kernel, target: Target) -> list[Variant]:
    """The ways of ATen's of computing a kernel, none where it has none. `target`: of an interpreted one the calls are those of the CPU."""
    if any(v.extent == 0 for v in kernel.domain):
        return []
    match kernel:
        case MatMulKernel():
            forms = _products(kernel, target)
        case ConvKernel():
            forms = _convolutions(kernel, target)
        case FlashKernel(scale=float()):
            forms = _attentions(kernel, target)
        case _:
            return []
    return [dataclasses.replace(variant, is_preferred=variant is forms[0]) for variant in forms]


# Operands.


class _Call:
    """A call being put together in place of `kernel`: its operands, and the kernels before it. `dtype`: of all its tensors."""

    def __init__(self, kernel: Anchored, dtype: str) -> None:
        self.kernel = kernel
        self.dtype = dtype
        self._borders: list[Kernel] = []
        self._reads: dict[Buffer, Argument] = {}
        self._packed: list[Packed] = []

    def operand(
        self,
        value: Expr,
        variables: Sequence[LoopVar],
        fits: Callable[[Operand], bool] = lambda _: True,
        order: Sequence[int] = (),
    ) -> Operand:
        """The tensor value[variables]: where it lies, if it `fits` there, else what a kernel before the call writes, without gaps and its
        dimensions in memory in the `order` given."""
        found = self.in_place(value, variables, order)
        if found is not None and fits(found):
            return self.take(found)
        used = _variables_of(value)
        order = order or range(len(variables))
        own = [d for d in order if variables[d] in used or variables[d].extent == 1] or list(order)
        buffer = Buffer(tuple(variables[d].extent for d in own), self.dtype, "operand of ATen")
        steps = dict(zip(own, contiguous_strides(buffer.shape), strict=True))
        argument = Argument(buffer, contiguous(buffer.shape))
        along = tuple(variables[d] for d in own)
        store = Store(buffer, _point(along), value)
        self._borders.append(MapKernel(_arguments(self.kernel, [value]), (argument,), along, (store,)))
        self._reads[buffer] = argument
        shape = tuple(v.extent for v in variables)
        return Operand(buffer, shape, _strides(shape, [steps.get(d, 0) for d in range(len(variables))], order))

    def in_place(self, value: Expr, variables: Sequence[LoopVar], order: Sequence[int] = ()) -> Operand | None:
        """The tensor value[variables] as a strided view of a buffer; None where it is no such. order: see `_strides`."""
        if not isinstance(value, Load) or value.buffer.dtype != self.dtype or value.buffer.by_value:
            return None
        layout = self._layout(value.buffer)
        offset = offset_of(layout, value.buffer.shape, value.index)
        steps = dict(offset.terms)
        if not all(isinstance(atom, LoopVar) and atom in variables for atom in steps):
            return None
        if not all(known_at_most(0, step) for step in (*steps.values(), offset.const)):
            return None  # a flip: torch has no negative strides
        shape = tuple(v.extent for v in variables)
        return Operand(value.buffer, shape, _strides(shape, [steps.get(v, 0) for v in variables], order), offset.const)

    def take(self, operand: Operand) -> Operand:
        """An operand that is in memory."""
        self._reads[operand.buffer] = Argument(operand.buffer, self._layout(operand.buffer))
        return operand

    def packed(self, operand: Operand, packed: Packed) -> Operand:
        """An operand that is made of a constant ahead of calls."""
        self._reads[operand.buffer] = Argument(operand.buffer, contiguous(operand.buffer.shape))
        self._packed.append(packed)
        return operand

    def _layout(self, buffer: Buffer) -> Strided:
        layout = next(argument.layout for argument in self.kernel.reads if argument.buffer is buffer)
        assert isinstance(layout, Strided), "this engine has no other layouts"
        return layout

    def variant(
        self,
        name: str,
        arguments: Sequence[Operand | int | float | bool | tuple[int, ...] | None],
        variables: Sequence[LoopVar],
        epilogue: _Epilogue,
        order: Sequence[int] = (),
        results: int = 1,
    ) -> Variant:
        """The variant. variables: of the call's result, whose dimensions lie in memory in the `order` given. epilogue: what the call computes
        besides, and what is left."""
        kernel = self.kernel
        shape = tuple(v.extent for v in variables)
        strides = dense_strides(shape, order)
        result = self._direct(epilogue, variables, strides)
        is_direct = result is not None
        if result is None:
            result = Argument(Buffer(shape, self.dtype, "result of ATen"), Strided(strides))
        title = f"{name} of {', '.join('x'.join(map(str, a.shape)) for a in arguments if isinstance(a, Operand))}"
        operand = Operand(result.buffer, shape, strides)
        operator = OperatorKernel(
            tuple(self._reads.values()), (result,), (), f"aten::{name}", tuple(arguments), operand, title, results
        )
        kernels = (*self._borders, operator, *(() if is_direct else (self._behind(epilogue, result, variables),)))
        # With an epilogue behind it, a half type is rounded once more than in the kernel.
        is_exact = is_direct or self.dtype == kernel.accumulator.dtype
        return Variant(operator.name + ("" if is_direct else ", then a kernel"), kernels, tuple(self._packed), is_exact)

    def _direct(self, epilogue: _Epilogue, variables: Sequence[LoopVar], strides: Sequence[Dim]) -> Argument | None:
        """The buffer that the kernel writes, where that is the call's result as it lies."""
        store, *others = epilogue.left
        if others or not isinstance(store.value, Load) or store.value.buffer is not epilogue.taken:
            return None
        written = next(a for a in self.kernel.writes if a.buffer is store.buffer)
        assert isinstance(written.layout, Strided), "this engine has no other layouts"
        offset = offset_of(written.layout, store.buffer.shape, store.index)
        steps = {v: stride for v, stride in zip(variables, strides, strict=True) if v.extent != 1}
        lies_so = store.buffer.dtype == self.dtype and offset.const == 0 and dict(offset.terms) == steps
        return written if lies_so else None

    def _behind(self, epilogue: _Epilogue, result: Argument, variables: Sequence[LoopVar]) -> MapKernel:
        """The kernel that computes what is stored from the call's result."""
        loaded = result.buffer.at(_point(variables))

        def load(of: Load) -> Expr | None:
            return loaded if of.buffer is epilogue.taken else None

        stores = tuple(Store(s.buffer, s.index, replace_loads(s.value, load)) for s in epilogue.left)
        reads = (result, *_arguments(self.kernel, [store.value for store in stores]))
        return MapKernel(reads, self.kernel.writes, self.kernel.domain, stores)


def _point(variables: Sequence[LoopVar]) -> tuple[Index, ...]:
    return tuple(as_index(0) if v.extent == 1 else index_of(v) for v in variables)


def dense_strides(shape: Sequence[Dim], order: Sequence[int] = ()) -> tuple[Dim, ...]:
    """The strides of a tensor without gaps whose dimensions lie in memory in this order, the last one innermost."""
    order = order or range(len(shape))
    steps = dict(zip(order, contiguous_strides(tuple(shape[d] for d in order)), strict=True))
    return tuple(steps[d] for d in range(len(shape)))


def _strides(shape: Sequence[Dim], steps: Sequence[Dim], order: Sequence[int] = ()) -> tuple[Dim, ...]:
    """The strides of a tensor, where `steps` says nothing of dimensions of size 1: they get those by which libraries see that dimensions lie
    in this order."""
    strides: list[Dim] = list(steps)
    inner: Dim = 1
    for d in reversed(order or range(len(shape))):
        if shape[d] == 1:
            strides[d] = inner
        inner = strides[d] * shape[d]
    return tuple(strides)


def _arguments(kernel: Kernel, exprs: Sequence[Expr]) -> tuple[Argument, ...]:
    read = {buffer for expr in exprs for buffer in buffers_of_expr(expr)}
    return tuple(argument for argument in kernel.reads if argument.buffer in read)


def _variables_of(expr: Expr) -> set[LoopVar]:
    found: set[LoopVar] = set()

    def visit(index: Index) -> None:
        for atom, _ in index.terms:
            match atom:
                case LoopVar():
                    found.add(atom)
                case FloorDiv() | Mod():
                    visit(atom.numerator)

    for part in parts([expr], within_indices=True):
        for index in indices(part):
            visit(index)
    return found


# Epilogues.


@dataclass(frozen=True, slots=True)
class _Epilogue:
    """The part of a kernel that a call computes besides: the sum of the accumulator and `addends`, then an `activation`. `left`: the stores
    over `taken`, which stands for the result of that."""

    addends: tuple[Load, ...]
    activation: str
    taken: Buffer
    left: tuple[Store, ...]


def _relu(x: Expr) -> Expr:
    return where(call("lt", x, formula.lit(x, 0)), formula.lit(x, 0), x)


# As the lowerings write them.
_ACTIVATIONS: Mapping[str, Callable[[Expr], Expr]] = {"relu": _relu, "gelu": lambda x: formula.gelu(x, "tanh")}


def _epilogues(kernel: Anchored, most: int) -> list[_Epilogue]:
    """Epilogues that the stores begin with, of up to `most` addends: the largest first, none last."""
    accumulator, values = kernel.accumulator, [store.value for store in kernel.stores]
    every = list(parts(values))
    point = next((e.index for e in every if isinstance(e, Load) and e.buffer is accumulator), None)
    found = [_Epilogue((), "", accumulator, kernel.stores)]
    if point is None:
        return found
    buffers = dict.fromkeys(buffer for value in values for buffer in buffers_of_expr(value))
    names = {buffer: str(number) for number, buffer in enumerate(buffers)}

    def shown(e: Expr) -> str:
        # One operator of ATen's stands for several, and rounds once.
        return canonical(_without_rounding(e), names)

    texts = {e: shown(e) for e in every if isinstance(e, Call)}

    def add_epilogue(whole: Expr, addends: tuple[Load, ...], activation: str) -> None:
        """`whole` is all that the stores need of the accumulator, or no epilogue."""
        text = shown(whole)
        taken = Buffer(accumulator.shape, accumulator.dtype, "taken")
        same: dict[Expr, Expr] = {e: taken.at(point) for e, own in texts.items() if own == text}
        left = tuple(Store(s.buffer, s.index, _with(s.value, same)) for s in kernel.stores)
        if same and not any(accumulator in buffers_of_expr(store.value) for store in left):
            found.append(_Epilogue(addends, activation, taken, left))

    def grow(value: Expr, addends: tuple[Load, ...]) -> None:
        for name, activation in _ACTIVATIONS.items():
            add_epilogue(activation(value), addends, name)
        text = shown(value)
        for e in texts if len(addends) < most else ():
            if not isinstance(e, Call) or e.op != "add":
                continue
            for this, other in (e.args, e.args[::-1]):
                if isinstance(other, Load) and other.buffer is not accumulator and shown(this) == text:
                    before = len(found)
                    add_epilogue(e, (*addends, other), "")
                    grow(e, (*addends, other))
                    if len(found) > before:
                        return

    grow(Load(accumulator.dtype, accumulator, point), ())
    return found[::-1]


def _without_rounding(expr: Expr) -> Expr:
    """The expression in float32 throughout."""
    done: dict[Expr, Expr] = {}

    def visit(e: Expr) -> Expr:
        if e not in done:
            done[e] = e
            if isinstance(e, Call):
                done[e] = visit(e.args[0]) if e.op == "round" else e.with_args(map(visit, e.args))
        return done[e]

    return visit(expr)


def _with(expr: Expr, replaced: Mapping[Expr, Expr]) -> Expr:
    """The expression with some of its parts replaced."""
    done: dict[Expr, Expr] = dict(replaced)

    def visit(e: Expr) -> Expr:
        if e not in done:
            done[e] = Call(e.dtype, e.op, tuple(map(visit, e.args))) if isinstance(e, Call) else e
        return done[e]

    return visit(expr)


# The operators.


def _dtype(target: Target, kernel: Anchored, *operands: Expr) -> str | None:
    """The dtype that operands are multiplied in; None for a dtype that ATen's libraries do not multiply, or the kernel does not accumulate
    so."""
    dtype = operand_dtype(dataclasses.replace(target, is_interpreted=False), *operands)
    return dtype if is_float(compute_dtype(dtype)) and compute_dtype(dtype) == kernel.accumulator.dtype else None


def _vector(made: _Call, addend: Load, variable: LoopVar) -> Operand | None:
    """An addend as a bias along one variable."""
    found = made.in_place(addend, (variable,))
    return made.take(found) if found is not None and found.strides == (1,) else None


def _products(kernel: MatMulKernel, target: Target) -> list[Variant]:
    """mm and bmm by cuBLAS, linear with its bias and an activation by cuBLASLt."""
    dtype = _dtype(target, kernel, kernel.a, kernel.b)
    if dtype is None:
        return []
    batch, m, n = kernel.domain
    k = kernel.k
    if batch.extent != 1:
        made = _Call(kernel, dtype)
        a, b = made.operand(kernel.a, (batch, m, k)), made.operand(kernel.b, (batch, k, n))
        return [made.variant("bmm", (a, b), kernel.domain, _epilogues(kernel, 0)[-1])]
    found = []
    for epilogue in _epilogues(kernel, 1):
        made = _Call(kernel, dtype)
        a = made.operand(kernel.a, (m, k))
        if not epilogue.addends:
            if not epilogue.activation:
                found.append(made.variant("mm", (a, made.operand(kernel.b, (k, n))), (m, n), epilogue))
            continue
        bias = _vector(made, epilogue.addends[0], n)
        if bias is None:
            continue
        if not epilogue.activation:
            weight = made.operand(kernel.b, (n, k))
            found.append(made.variant("linear", (a, weight, bias), (m, n), epilogue))
        elif epilogue.activation == "relu" or not target.is_interpreted:  # the CPU's GELU is the exact one
            b = made.operand(kernel.b, (k, n))
            is_gelu = epilogue.activation == "gelu"
            found.append(made.variant("_addmm_activation", (bias, a, b, 1.0, 1.0, is_gelu), (m, n), epilogue))
    # What goes through AOTInductor's functions has to win: not every torch has them.
    return sorted(found[:_MOST_FORMS], key=lambda variant: "_addmm_activation" in variant.name)


_MOST_FORMS = 2  # of a product: each is timed
_CHANNELS_LAST = (0, 2, 3, 1)


def wants_channels_last(dtype: str, groups: int, rank: int, target: Target) -> bool:
    """True if cuDNN computes such a convolution on tensor cores, which want channels innermost. Grouped ones are slower so
    (pytorch/pytorch pull request 114600)."""
    return rank == 2 and groups == 1 and (dtype in _HALVES or (dtype == "float32" and target.convolution_tf32))


def _convolutions(kernel: ConvKernel, target: Target) -> list[Variant]:
    """ATen's convolution, and cuDNN's with a ReLU, after a sum too."""
    dtype = _dtype(target, kernel, kernel.x, kernel.w)
    rank = len(kernel.x_vars) - 2
    extra = _output_padding(kernel)
    if dtype is None or extra is None:
        return []
    is_last = wants_channels_last(dtype, kernel.groups, rank, target)
    order = _CHANNELS_LAST if is_last else ()
    settings = (kernel.stride, kernel.padding, kernel.dilation)
    found = []
    for epilogue in _epilogues(kernel, 2):
        made = _Call(kernel, dtype)
        x = made.operand(
            kernel.x, kernel.x_vars, lambda x: not is_last or x.strides == dense_strides(x.shape, order), order
        )
        w = _weight(made, kernel, order)
        if not epilogue.addends and not epilogue.activation:
            plain = (x, w, None, *settings, kernel.transposed, extra, kernel.groups)
            found.append(made.variant("convolution", plain, kernel.domain, epilogue, order))
        elif epilogue.activation == "relu" and rank == 2 and not (kernel.transposed or target.is_interpreted):
            fused = _fused(made, kernel, epilogue, order)
            if fused is not None:
                name, z, bias = fused
                added = () if z is None else (z, None)
                arguments = (x, w, *added, bias, *settings, kernel.groups)
                found.append(made.variant(name, arguments, kernel.domain, epilogue, order))
    # cuDNN's fused ones are slow for some shapes (pytorch/pytorch issue 68506): they come last, and have to win by the clock.
    return found[::-1]


def _output_padding(kernel: ConvKernel) -> tuple[int, ...] | None:
    """The rows that a transposed convolution's result has beyond what windows reach, 0 of any other; None where ATen has no such convolution:
    it takes images with as many zeros behind as before them."""
    found = []
    for x, out, tap, s, p, d in zip(
        kernel.x_vars[2:],
        kernel.domain[2:],
        kernel.w_vars[2:],
        kernel.stride,
        kernel.padding,
        kernel.dilation,
        strict=True,
    ):
        reach = d * (known_int(tap.extent) - 1) + 1 - 2 * p
        size, result = known_int(x.extent), known_int(out.extent)
        found.append(result - (size - 1) * s - reach if kernel.transposed else result - (size - reach) // s - 1)
    return tuple(found) if kernel.transposed or not any(found) else None


def _weight(made: _Call, kernel: ConvKernel, order: Sequence[int]) -> Operand:
    """The weight as the image lies: a constant is brought into that form once."""
    found = made.in_place(kernel.w, kernel.w_vars, order)
    if not order or found is None or found.strides == dense_strides(found.shape, order):
        return made.operand(kernel.w, kernel.w_vars, order=order)
    buffer, shape = found.buffer, tuple(map(known_int, found.shape))
    assert isinstance(kernel.w, Load)
    offset = linear(kernel.w.index, contiguous_strides(buffer.shape))
    steps = dict(offset.terms)
    view = StridedView(buffer, shape, tuple(steps.get(v, 0) for v in kernel.w_vars), offset.const)
    if not buffer.constant or not view.is_static:
        return made.take(found)
    last = Buffer(tuple(shape[d] for d in order), buffer.dtype, "channels last", constant=True)
    return made.packed(Operand(last, shape, dense_strides(shape, order)), Packed(last, buffer, view, channels_last))


def channels_last(weight: torch.Tensor) -> torch.Tensor:
    """weight: (O, I, H, W), any strides. Returns it as (O, H, W, I), contiguous."""
    return weight.permute(*_CHANNELS_LAST).contiguous()


def _fused(
    made: _Call, kernel: ConvKernel, epilogue: _Epilogue, order: Sequence[int]
) -> tuple[str, Operand | None, Operand | None] | None:
    """The name of cuDNN's convolution with that epilogue, the tensor that it adds, and its bias; None where there is none."""
    bias = z = None
    for addend in epilogue.addends:
        vector = _vector(made, addend, kernel.domain[1])
        whole = made.in_place(addend, kernel.domain, order) if vector is None else None
        if vector is not None and bias is None:
            bias = vector
        elif whole is not None and z is None and whole.strides == dense_strides(whole.shape, order):
            z = made.take(whole)
        else:
            return None
    return ("cudnn_convolution_relu" if z is None else "cudnn_convolution_add_relu"), z, bias


def _attentions(kernel: FlashKernel, target: Target) -> list[Variant]:
    """ATen's own choice of a back end, and those that it does not choose though they can compute it."""
    dtype = _dtype(target, kernel, kernel.q, kernel.k, kernel.v)
    if dtype is None or (kernel.causal and kernel.mask is not None):
        return []
    epilogue = _epilogues(kernel, 0)[-1]

    def variant(
        name: str, settings: Callable[[Operand | None], tuple[Operand | float | bool | None, ...]], results: int
    ) -> Variant:
        made = _Call(kernel, dtype)
        given = ((kernel.q, kernel.q_vars), (kernel.k, kernel.k_vars), (kernel.v, kernel.v_vars))
        q, k, v = (made.operand(value, variables, lambda x: x.strides[-1] == 1) for value, variables in given)
        mask = None if kernel.mask is None else made.operand(kernel.mask, kernel.mask_vars)
        return made.variant(name, (q, k, v, *settings(mask)), kernel.domain, epilogue, (0, 2, 1, 3), results)

    scale, causal = kernel.scale, kernel.causal
    found = [variant("scaled_dot_product_attention", lambda mask: (mask, 0.0, causal, scale, False), 1)]
    widths = [kernel.q_vars[3].extent, kernel.domain[3].extent]
    rows, keys = kernel.q_vars[2].extent, kernel.k_vars[2].extent
    if target.is_interpreted or dtype not in _HALVES or any(not isinstance(n, int) or n % 8 or n > 128 for n in widths):
        return found
    if (causal and rows != keys) or (kernel.mask is not None and (not isinstance(keys, int) or keys % 8)):
        return found
    allowed: Any = torch.backends.cuda
    if allowed.cudnn_sdp_enabled():
        found.append(
            variant("_scaled_dot_product_cudnn_attention", lambda mask: (mask, False, 0.0, causal, False, scale), 9)
        )
    # ATen chooses flash attention where it may, else the efficient one: that is another way only beside flash.
    is_flash = kernel.mask is None and allowed.flash_sdp_enabled()
    if is_flash and allowed.mem_efficient_sdp_enabled():
        found.append(
            variant("_scaled_dot_product_efficient_attention", lambda mask: (mask, False, 0.0, causal, scale), 4)
        )
    return found
