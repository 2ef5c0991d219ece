"""The strides that eager's operators give their results, in traces too.

AOTAutograd traces on fake tensors. PyTorch's rules for those, and the formulas that operators are decomposed by, follow eager's shapes and
dtypes, but not always its strides (torch 2.13: `logical_xor` of broadcast operands, `batch_norm` and `div(rounding_mode="floor")` of permuted
ones, among others). The traced strides are those of the graph's outputs, and they decide what `as_strided` reads.

So rules are checked while AOTAutograd traces. Where a tensor that an operator takes or returns is not contiguous, the operator itself runs on
small tensors of the same dtypes, whose dimensions lie in the same order. Where that contradicts the rule, the fake result gets eager's order.
A formula whose result lies in another order than the operator's gets a copy behind it. What an operator showed is kept for the process: calls
that differ only in large sizes run it once.

Checked are ATen's public operators on the CPU: others may do more than compute, trust their arguments, or keep a device busy. Operators that
draw random numbers are not checked, nor are results whose elements do not lie densely.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from torch_hybrid_backend.core.tensor_spec import dim, is_computable
from torch_hybrid_backend.errors import ignored
from torch_hybrid_backend.graph.schema import is_random
from torch_hybrid_backend.sizes.size import size_hint
from torch_hybrid_backend.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    without_autocast,
    without_modes,
    without_python_dispatcher,
)

# Tensors of together so many elements, which take milliseconds, are tried as they are where an operator does not take smaller ones, as other
# arguments than tensors say how large they are. No results are larger.
_MOST = 1 << 20
# Sizes up to this one stay as they are in small tensors: they may be those of windows.
_LEAST = 8

_by_rules = FakeTensorMode.dispatch

# The dimensions of a dense tensor from the outermost in memory to the innermost.
_Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A strided tensor without its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """The number of elements of its memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def filled(self, number: int) -> torch.Tensor:
        memory = torch.full((self.span,), number, dtype=self.dtype, device="cpu")
        return memory.as_strided(self.shape, self.strides)

    def with_sizes(self, sizes: Mapping[int, int]) -> _Form | None:
        """A tensor with other sizes whose dimensions lie in the same order and have gaps where its have some; None where elements overlap."""
        shape = tuple(sizes.get(size, size) for size in self.shape)
        strides = [0] * len(shape)
        dense, new_dense = 1, 1  # strides of the next dimension, were there no gap
        for d in sorted(range(len(shape)), key=lambda d: (self.strides[d], self.shape[d] != 1)):
            stride = self.strides[d]
            if stride == 0:
                continue
            if stride < dense and self.shape[d] > 1:
                return None
            strides[d] = new_dense if stride <= dense else 2 * new_dense
            if self.shape[d] > 1:
                dense, new_dense = stride * self.shape[d], strides[d] * shape[d]
        return _Form(self.dtype, shape, tuple(strides))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator, with a `_Form` for each tensor, tuples for lists, and keyword arguments as pairs."""

    operator: OpOverload
    arguments: tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]

    @property
    def forms(self) -> list[_Form]:
        found: list[_Form] = []
        _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, _Form) else None, self.arguments)
        return found

    def smaller(self) -> _Call | None:
        """The call on small tensors: equal sizes stay equal, also to whole numbers among the arguments; None where there are none."""
        forms = self.forms
        large = sorted({size for form in forms for size in form.shape if size > _LEAST})
        sizes = {size: _LEAST + 1 + k for k, size in enumerate(large)}
        small = {form: form.with_sizes(sizes) for form in forms}
        if None in small.values():
            return None

        def made_small(leaf: Any) -> Any:
            if isinstance(leaf, _Form):
                return small[leaf]
            return sizes.get(leaf, leaf) if type(leaf) is int else leaf

        return _Call(self.operator, _mapped(made_small, self.arguments))

    def __call__(self, number: int) -> list[Any]:
        """The results for tensors that hold `number` everywhere."""
        args, kwargs = _mapped(lambda leaf: leaf.filled(number) if isinstance(leaf, _Form) else leaf, self.arguments)
        return tree_leaves(self.operator(*args, **dict(kwargs)))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value, nested tuples and lists, as tuples with each leaf mapped."""
    if isinstance(value, tuple | list):
        return tuple([_mapped(function, each) for each in value])
    return function(value)


@contextlib.contextmanager
def strides_of_eager() -> Iterator[None]:
    """Give fake tensors the strides that eager gives. Dynamo compiles under one lock, so that no other thread is here meanwhile."""

    def dispatch(
        mode: FakeTensorMode,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = _by_rules(mode, func, types, args, kwargs or {})
        return _corrected(mode, func, args, kwargs or {}, result) if _is_tried(func) else result

    before = FakeTensorMode.dispatch
    FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = before  # type: ignore[method-assign]


class _Unchecked(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode whose tensors have the strides that PyTorch's rules say."""

    dispatch = _by_rules


def with_strides_of(operator: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula, with its results copied where they lie in another order than the operator's."""
    if not _is_function(operator):
        return formula

    @functools.wraps(formula)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = formula(*args, **kwargs)
        if result is NotImplemented or _are_plain(args, kwargs, result):
            return result
        with disable_proxy_modes_tracing():
            wanted = operator(*args, **kwargs)
        leaves, spec = tree_flatten(result)
        return tree_unflatten(map(_laid_out_as, leaves, tree_leaves(wanted)), spec)

    return run


@functools.cache
def _is_tried(operator: Any) -> bool:
    """True if an operator can be called with any tensors: a private one may take its arguments, packed weights say, without a look at them."""
    return _is_function(operator) and (not operator.__name__.startswith("_") or torch.Tag.core in operator.tags)


@functools.cache
def _is_function(operator: Any) -> bool:
    """True if an operator of ATen computes new tensors of given ones, the same ones in each call."""
    if not isinstance(operator, OpOverload) or operator.namespace != "aten" or is_random(operator):
        return False
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.intersection(operator.tags):
        return False
    schema = operator._schema
    returns = bool(schema.returns) and all("Tensor" in str(result.type) for result in schema.returns)
    return returns and not any(each.alias_info for each in (*schema.arguments, *schema.returns))


def _are_plain(*values: Any) -> bool:
    """True if all tensors among the values are contiguous. Of those with symbolic sizes nothing is asked, as that would set guards."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value._has_symbolic_sizes_strides:
                return False
            if not value.is_contiguous() or (1 in value.size() and value.stride() != _contiguous(value.size())):
                return False
        elif isinstance(value, tuple | list):
            if not _are_plain(*value):
                return False
        elif isinstance(value, dict) and not _are_plain(*value.values()):
            return False
    return True


def _contiguous(shape: Sequence[Any]) -> tuple[Any, ...]:
    return _strides(shape, range(len(shape)))


def _strides(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """The strides of a dense tensor whose dimensions lie in this order."""
    strides: list[Any] = [1] * len(shape)
    for k in range(len(order) - 1, 0, -1):
        size = shape[order[k]]
        strides[order[k - 1]] = strides[order[k]] * (size or 1 if isinstance(size, int) else size)
    return tuple(strides)


def _order(form: _Form | None) -> _Order | None:
    """The order of a tensor's dimensions; None where its elements do not lie densely, or dimensions of size 1 have strides of their own."""
    if form is None:
        return None
    dims = range(len(form.shape))
    order = tuple(sorted(dims, key=lambda d: (-form.strides[d], form.shape[d] == 1)))
    return order if form.strides == _strides(form.shape, order) else None


def _form(tensor: torch.Tensor) -> _Form | None:
    """The form of a fake tensor on the CPU, with its sizes of the call that is traced; None where it has no such form."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor._has_symbolic_sizes_strides:
        return _Form(tensor.dtype, tuple(tensor.size()), tensor.stride())
    numbers = [dim(number) for number in (*tensor.size(), *tensor.stride())]
    if not all(map(is_computable, numbers)):
        return None
    known = tuple(map(size_hint, numbers))
    return _Form(tensor.dtype, known[: tensor.dim()], known[tensor.dim() :])


class _NoFormError(Exception):
    """An argument is a tensor elsewhere, or a number that depends on data."""


def _known(leaf: Any) -> Any:
    """An argument of a traced call as `_Call` has it. Raises _NoFormError."""
    known: Any = leaf
    if isinstance(leaf, torch.Tensor):
        known = _form(leaf) if isinstance(leaf, FakeTensor) and leaf.device.type == "cpu" else None
    elif isinstance(leaf, torch.SymInt):
        known = size_hint(dim(leaf)) if is_computable(dim(leaf)) else None
    elif isinstance(leaf, torch.SymFloat | torch.SymBool | torch.Generator):
        known = None
    if known is None and leaf is not None:
        raise _NoFormError
    return known


def _corrected(mode: FakeTensorMode, operator: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The fake results of an operator, with eager's strides."""
    if _are_plain(args, kwargs, result):
        return result
    results = tree_leaves(result)
    told = [_form(each) if isinstance(each, FakeTensor) and each.constant is None else None for each in results]
    if None in told:
        return result
    try:
        call = _Call(operator, _mapped(_known, (args, tuple(kwargs.items()))))
        orders = _orders(call, tuple(told))
    except _NoFormError:
        return result
    if orders is None or _memories(results) & _memories((args, kwargs)):
        return result
    left = iter(orders)
    return tree_map(lambda each: _in_order(mode, each, next(left)), result)


def _memories(values: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _in_order(mode: FakeTensorMode, fake: torch.Tensor, order: _Order | None) -> torch.Tensor:
    form = _form(fake)
    if order is None or form is None or form.strides == _strides(form.shape, order):
        return fake
    with mode:
        return torch.empty_strided(fake.size(), _strides(fake.size(), order), dtype=fake.dtype, device=fake.device)


@functools.lru_cache(maxsize=1 << 14)
def _orders(call: _Call, told: tuple[_Form | None, ...]) -> list[_Order | None] | None:
    """The orders that the results have in eager, None for one that is not dense; None for all where they are as told, or where that cannot be
    found out."""
    if not call.forms:
        return None  # what it makes may be of any size
    for tried in (call.smaller(), call if _elements(call.forms) <= _MOST else None):
        if tried is None or (_elements(told) > _MOST and _elements(_results(tried, in_eager=False)) > _MOST):
            continue
        real = _results(tried, in_eager=True)
        if not _are_alike(real, told):
            continue
        orders = [_order(form) for form in real]
        if _have_orders(told, orders):
            return None
        if tried is not call and _have_orders(_results(tried, in_eager=False), orders):
            # The rule is right, and the kernel chooses by sizes.
            orders = [_order(form) for form in _results(call, in_eager=False)]
        return orders
    return None


def _elements(forms: Sequence[_Form | None]) -> int:
    return sum(form.span for form in forms if form is not None)


def _have_orders(forms: Sequence[_Form | None], orders: Sequence[_Order | None]) -> bool:
    """True if results lie in these orders, those that have one."""
    pairs = zip(forms, orders, strict=True) if len(forms) == len(orders) else [(None, ())]
    return all(
        order is None or (form is not None and form.strides == _strides(form.shape, order)) for form, order in pairs
    )


def _are_alike(real: Sequence[_Form | None], told: Sequence[_Form | None]) -> bool:
    """True if results of small tensors stand for those told: as many, of as many dimensions, of which the same have size 1 or 0."""

    def degenerate(form: _Form | None) -> list[int] | None:
        return None if form is None else [min(size, 2) for size in form.shape]

    return list(map(degenerate, real)) == list(map(degenerate, told))


@functools.lru_cache(maxsize=1 << 14)
def _results(call: _Call, *, in_eager: bool) -> tuple[_Form | None, ...]:
    """The forms of the results that the operator gives, or that PyTorch's rules say; none where it does not take such tensors."""
    with without_modes(), without_python_dispatcher(), without_autocast(), torch.no_grad():
        for number in (1, 0):  # as indices, ones may lie outside
            mode = contextlib.nullcontext() if in_eager else _Unchecked(allow_non_fake_inputs=True)
            with ignored(Exception), mode:
                return tuple(_form(each) if isinstance(each, torch.Tensor) else None for each in call(number))
    return ()


def _laid_out_as(result: Any, wanted: Any) -> Any:
    """The result in the order of the tensor that is wanted: itself, or a copy."""
    if not isinstance(result, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return result
    form, order = _form(result), _order(_form(wanted))
    if form is None or order is None or _is_laid_out(form, order):
        return result
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _is_laid_out(form: _Form, order: _Order) -> bool:
    """True if the elements lie in this order, whatever strides dimensions of size 1 have."""
    strides = zip(form.shape, form.strides, _strides(form.shape, order), strict=True)
    return all(a == b for size, a, b in strides if size != 1)
