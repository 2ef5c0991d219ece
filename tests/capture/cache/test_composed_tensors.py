"""Tensors that are made of others: taken apart as AOTAutograd does; keyed where nothing of the program's is in them.

`test_kept_graphs` has the classes that have keys, torchao's.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch._functorch._aot_autograd.subclass_utils import runtime_unwrap_tensor_subclasses
from torch.testing._internal.two_tensor import TwoTensor

from torch_hybrid_backend.capture.aot import capture
from torch_hybrid_backend.capture.cache.aot_cache import AotCache, capture_key
from torch_hybrid_backend.capture.cache.composed_tensors import (
    UnkeyedError,
    _functions,
    _in_full,
    parts_of,
    taking_apart,
)
from torch_hybrid_backend.storage.store import Store


class One(torch.Tensor):
    """Made of one tensor."""

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> One:
        made = torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)
        made.part = part
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: object) -> One:
        return One(parts["part"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        raise NotImplementedError


def tensors() -> list[torch.Tensor]:
    return [torch.full((2,), float(k)) for k in range(8)]


@pytest.mark.parametrize(
    "compose",
    [
        lambda a, b, c, *_: [a, b, c],
        lambda a, b, c, d, *_: [TwoTensor(a, b), c, TwoTensor(d, a)],
        lambda a, b, c, d, e, f, *_: [a, TwoTensor(TwoTensor(b, c), TwoTensor(d, e)), f],
        lambda a, b, c, d, *_: [One(a), b, One(TwoTensor(c, d))],
        lambda a, b, *_: [One(a), b, One(One(b))],
    ],
)
def test_parts_are_in_the_order_of_aotautograd(compose):
    """Parts are in order: of tensors of one part and of several, also of parts that are made of others, between plain ones; of other tensors
    than the first."""
    apart = taking_apart(compose(*tensors()))
    later = compose(*tensors())
    expected = runtime_unwrap_tensor_subclasses(later, append_symints=False)
    found = apart(tuple(later))
    assert [id(part) for part in found] == [id(part) for part in expected]
    assert all(type(part) is torch.Tensor for part in found)


def test_a_tensor_of_another_class_is_refused():
    """A tensor of another class is refused where guards were left out: its parts may have the same names."""
    a, b, *_ = tensors()
    apart = taking_apart([a, One(b)])
    with pytest.raises(TypeError, match=r"input 1 is of .*Tensor.*compiled for .*One"):
        apart((a, b))
    assert apart((a, One(b)))[1] is b


def test_parts_have_their_names():
    """Those of `__tensor_flatten__`."""
    a, b, *_ = tensors()
    assert dict(parts_of(TwoTensor(a, b))) == {"a": a, "b": b}


def test_tensors_of_other_libraries_have_no_key(tmp_path):
    """Methods of such tensors may change from process to process: such graphs are traced, and compute what they should."""
    keys = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        keys.append(capture_key(gm, inputs, ()))
        store = Store.open(tmp_path)
        return capture(gm, inputs, lambda captured: lambda given: captured.graph_module(*given), (), AotCache(store))

    torch._dynamo.reset()
    x = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    with torch.no_grad():
        found = torch.compile(lambda x: x * 3, backend=backend)(x)
    assert keys == [None]
    assert found.a.equal(x.a * 3)
    assert found.b.equal(x.b * 3)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    bits: int


def test_values_in_full_differ():
    """Numbers that are equal, and sequences of other types, have texts of their own."""
    values = [
        None,
        0,
        False,
        0.0,
        -0.0,
        "0",
        1,
        True,
        1.0,
        "",
        (),
        [],
        torch.Size(()),
        {},
        (1,),
        [1],
        torch.Size((1,)),
        ((1,),),
    ]
    values += [{"a": 1}, {"a": True}, {"b": 1}, {"a": (1,)}, torch.int8, torch.int4, torch.device("cpu"), torch.strided]
    texts = [_in_full(value) for value in values]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "value",
    [object(), Color.RED, Settings(8), {1, 2}, torch.ones(2), print, [1, object()], {"a": {"b": Color}}, b"bytes"],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_in_full_has_no_text(value):
    """Objects of the program's, and what prints as its address: nothing says what they do."""
    with pytest.raises(UnkeyedError):
        _in_full(value)


def test_all_functions_of_a_class_are_found():
    """Methods, what they wrap, and what tables hold."""

    def wrapped() -> None: ...

    def wrapper() -> None: ...

    wrapper.__wrapped__ = wrapped

    class Methods:
        table: ClassVar = {"a": {"b": wrapper}}
        names: ClassVar = ["a", "b"]
        static = staticmethod(lambda: None)
        of_class = classmethod(lambda cls: None)
        attribute = property(lambda self: None)

        def method(self) -> None: ...

    functions = {wrapped, wrapper, Methods.static, Methods.of_class.__func__, Methods.attribute.fget, Methods.method}
    assert set(_functions(vars(Methods))) == functions


@pytest.mark.parametrize(
    "value",
    [print, Path, functools.partial(print), staticmethod(print), functools.cached_property(len)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_called_and_has_no_source_is_refused(value):
    """Nothing says what it runs."""
    with pytest.raises(UnkeyedError):
        list(_functions({"method": {"of": value}}))
