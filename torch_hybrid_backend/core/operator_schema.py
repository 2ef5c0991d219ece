"""Arguments and results of a call by the operator's schema, as the C++ plan hands them to PyTorch's dispatcher.

Enters: an operator's name and overload, and values. Leaves: the same values with the schema's types written beside them, as JSON has it:

    aten::topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)
    (TensorArgument(0), 2, -1, True, True)  ->  [["tensor", 0], ["int", 2], ["int", -1], ["bool", true], ["bool", true]]

An optional argument that is there is ["some", ...], one that is not ["none"]. Illegal: an operator that torch does not have, and values that
do not fit its schema (HybridError).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_hybrid_backend.errors import HybridError, failures
from torch_hybrid_backend.sizes.size import Size
from torch_hybrid_backend.torch_private import get_schema

if TYPE_CHECKING:
    from torch_hybrid_backend.core.program import OperatorArgument, OperatorResult

# Types of schemas that the C interface of PyTorch's dispatcher takes, by what csrc/torch/operator.cc calls them.
_WORDS = {
    "TensorType": "tensor",
    "IntType": "int",
    "SymIntType": "int",
    "FloatType": "float",
    "NumberType": "float",  # of those in BY_C_FUNCTION
    "BoolType": "bool",
    "StringType": "str",
    "ScalarTypeType": "dtype",
    "LayoutType": "layout",
    "MemoryFormatType": "memory_format",
    "DeviceObjType": "device",
}
_KINDS_OF_WORD: dict[str, type | tuple[type, ...]] = {
    "int": (int, Size),
    "float": (int, float),
    "bool": bool,
    "str": str,
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


# Operators that the plan calls by AOTInductor's C functions, which take a number as a float (torch/csrc/inductor/aoti_torch/generated): the
# dispatcher's C interface cannot. csrc/torch/operator.cc has the same.
BY_C_FUNCTION = frozenset({"aten::_addmm_activation", "aten::_scaled_dot_product_cudnn_attention"})


def operator_schema(name: str, overload: str) -> Any:
    """The schema of "namespace::operator". Raises HybridError where torch has no such operator."""
    try:
        return get_schema(name, overload)
    except failures(RuntimeError) as error:
        raise HybridError(f"torch has no operator {name} with the overload {overload or 'default'!r}") from error


def is_native(
    name: str, overload: str, arguments: Sequence[OperatorArgument], results: Sequence[OperatorResult]
) -> bool:
    """True if the C interface of PyTorch's dispatcher can make the call: it lacks some types, and gets the types of results wrong where they
    do not read the same from behind (torch/csrc/shim_common.cpp of torch 2.11 to 2.14).

    Raises HybridError where there are more or fewer arguments, or other results, than the schema's.
    """
    schema = operator_schema(name, overload)
    if len(arguments) != len(schema.arguments):
        raise HybridError(f"{schema} takes {len(schema.arguments)} arguments, not {len(arguments)}")
    if name in BY_C_FUNCTION:
        if len(results) != len(schema.returns):
            raise HybridError(f"{schema} does not return what the program takes from it: {tuple(results)}")
        return True
    returns = [_returned(result.real_type) for result in schema.returns]
    if [isinstance(result, tuple) for result in results] != [kind == "list" for kind in returns]:
        raise HybridError(f"{schema} does not return what the program takes from it: {tuple(results)}")
    return (
        None not in returns
        and returns == returns[::-1]
        and all(
            _is_native(argument.real_type, value) for argument, value in zip(schema.arguments, arguments, strict=True)
        )
    )


def described_arguments(name: str, overload: str, arguments: Sequence[OperatorArgument]) -> list[Any]:
    """The arguments of a call that is native. Raises HybridError where one has another type than the schema's."""
    schema = operator_schema(name, overload)
    try:
        return [
            _described(argument.real_type, value) for argument, value in zip(schema.arguments, arguments, strict=True)
        ]
    except TypeError as error:
        raise HybridError(f"{error} among the arguments of {schema}") from error


def _returned(kind: Any) -> str | None:
    """The way in which a result becomes tensors; None if the result is something else."""
    if kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
        return "list"
    return "tensor" if kind.kind() == "TensorType" else None


def _is_native(kind: Any, value: OperatorArgument) -> bool:
    if kind.kind() == "OptionalType":
        return value is None or _is_native(kind.getElementType(), value)
    if kind.kind() == "ListType":
        return all(_is_native(kind.getElementType(), item) for item in (value if isinstance(value, tuple) else ()))
    return kind.kind() in _WORDS and kind.kind() != "NumberType"


def _described(kind: Any, value: OperatorArgument) -> list[Any]:
    if kind.kind() == "OptionalType":
        return ["none"] if value is None else ["some", _described(kind.getElementType(), value)]
    if kind.kind() == "ListType":
        if not isinstance(value, tuple):
            raise TypeError(f"{value!r} is no tuple")
        return ["list", [_described(kind.getElementType(), item) for item in value]]
    word = _WORDS[kind.kind()]
    if word == "tensor":
        buffer = getattr(value, "buffer", None)
        if buffer is None:
            raise TypeError(f"{value!r} is no tensor")
        return [word, buffer]
    if not isinstance(value, _KINDS_OF_WORD[word]) or (isinstance(value, bool) and word != "bool"):
        raise TypeError(f"{value!r} is no {word}")
    return [word, value if isinstance(value, int | float | str | Size) else str(value).removeprefix("torch.")]
