"""TensorSpec: what it says of tensors is what torch says, also where sizes are symbols."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec, dim, is_computable
from torch_hybrid_backend.sizes.size import MAX_SIZE, Size, UndecidedSizeError, size_hint, symbol, symbols

S = symbol("s0")
_dims = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=4)
_dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_dims, _dtypes)
def test_memory_is_what_torch_allocates(dims: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """Elements, storage from the first to the last of them, bytes and dtype of any strided tensor are its own."""
    tensor = torch.empty_strided([n for n, _ in dims], [stride for _, stride in dims], dtype=dtype)
    spec = TensorSpec.of(tensor)
    assert spec == TensorSpec(tuple(tensor.shape), str(dtype).split(".")[1], tensor.stride(), CPU)
    assert (spec.torch_dtype, spec.numel) == (dtype, tensor.numel())
    assert spec.size_bytes == spec.span * dtype.itemsize == tensor.untyped_storage().nbytes()
    assert spec.is_static
    assert spec.is_computable
    assert spec.at({}) == spec


def _dynamic(environment: ShapeEnv, *shape: int) -> FakeTensor:
    """A fake tensor all of whose sizes are symbols."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(shape))
    return FakeTensorMode(shape_env=environment).from_tensor(torch.empty(shape), symbolic_context=context)


def test_symbols_become_sizes_without_a_guard() -> None:
    """Sizes and what is computed from them keep their value for the example inputs; asking for a spec decides nothing."""
    environment = ShapeEnv()
    x = _dynamic(environment, 6, 10)
    guards = len(environment.guards)
    spec = TensorSpec.of(x)
    assert [size_hint(size) for size in (*spec.shape, *spec.strides)] == [6, 10, 10, 1]
    assert not spec.is_static
    assert spec.is_computable
    for computed, value in (
        ((x.shape[0] + 1) // 2 * x.shape[1], 30),
        (torch.sym_max(x.shape[0], x.shape[1]) % 4, 2),
        (x.shape[1] - x.shape[0], 4),
    ):
        size = dim(computed)
        assert isinstance(size, Size)
        assert is_computable(size)
        assert size_hint(size) == value
    assert len(environment.guards) == guards
    names = {str(symbol): value for symbol, value in zip((x.shape[0], x.shape[1]), (3, 4), strict=True)}
    assert spec.at(names) == TensorSpec((3, 4), "float32", (4, 1), CPU)


def test_what_depends_on_data_is_a_name() -> None:
    """A size that no input tells is a symbol of its own, and said not to be computable; equal ones stay equal."""
    environment = ShapeEnv()
    found = environment.create_unbacked_symint()
    size, more = dim(found), dim(found + 1)
    assert not is_computable(size)
    assert not is_computable(more)
    assert size == dim(found) != more
    assert not TensorSpec((3, size), "float32", (size, 1), CPU).is_computable


def test_a_form_that_sizes_do_not_have_is_a_name() -> None:
    """An expression that is no arithmetic on whole numbers is known by its text alone."""
    (x,) = (_dynamic(ShapeEnv(), 6),)
    assert not is_computable(dim(torch.sym_int(torch.sym_sqrt(x.shape[0]))))


def test_symbolic_specs_have_no_numbers() -> None:
    """Elements and bytes of a symbolic spec are an error; with a value for each symbol they are known."""
    spec = TensorSpec((S + 1, 4), "float64", (S, 1), CPU)
    for number in ("numel", "span", "size_bytes"):
        with pytest.raises(UndecidedSizeError):
            getattr(spec, number)
    assert spec.at({"s0": 9, "s1": 0}) == TensorSpec((10, 4), "float64", (9, 1), CPU)
    assert spec.at({"s0": 9}).size_bytes == (1 + 9 * 9 + 3) * 8
    with pytest.raises(KeyError, match="s0"):
        spec.at({"s1": 0})


def test_what_is_known_of_a_symbol() -> None:
    """A dimension is one that kernels address; an integer is any of 64 bits, until something asked about it narrows it."""
    environment = ShapeEnv()
    (length,) = symbols([dim(_dynamic(environment, 6).shape[0])])
    assert (length.low >= 0, length.high, length.is_wide) == (True, MAX_SIZE, False)
    source = ConstantSource("n")
    made = environment.create_unspecified_symbol(5, source, dynamic_dim=DimDynamic.DYNAMIC)
    number = environment.create_symintnode(made, hint=5, source=source)
    (before,) = symbols([dim(number)])
    assert (before.low, before.high, before.is_wide) == (-(1 << 63), (1 << 63) - 1, True)
    assert 0 <= number < 8
    (after,) = symbols([dim(number)])
    assert (after.low, after.high, after.is_wide) == (0, 7, False)
