"""An operator's arguments as the C++ plan is given them."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.core.operator_schema import described_arguments, is_native, operator_schema
from torch_hybrid_backend.core.program import OperatorArgument, OperatorResult, TensorArgument
from torch_hybrid_backend.errors import HybridError

T = TensorArgument


def test_every_argument_has_the_type_of_its_schema() -> None:
    """Not that of its value: an int may stand for a float, and an optional argument says whether it is there."""
    described = described_arguments("aten::native_layer_norm", "", (T(3), (6,), None, T(5), 1))
    assert described == [["tensor", 3], ["list", [["int", 6]]], ["none"], ["some", ["tensor", 5]], ["float", 1]]
    options = (torch.bfloat16, torch.strided, torch.device("cuda", 1), False, torch.channels_last)
    assert described_arguments("aten::empty", "memory_format", ((2,), *options)) == [
        ["list", [["int", 2]]],
        ["some", ["dtype", "bfloat16"]],
        ["some", ["layout", "strided"]],
        ["some", ["device", "cuda:1"]],
        ["some", ["bool", False]],
        ["some", ["memory_format", "channels_last"]],
    ]
    assert described_arguments("aten::index", "Tensor", (T(0), (None, T(1)))) == [
        ["tensor", 0],
        ["list", [["none"], ["some", ["tensor", 1]]]],
    ]


@pytest.mark.parametrize(
    ("name", "overload", "arguments", "results", "native"),
    [
        ("aten::topk", "", (T(0), 2, -1, True, True), (1, 2), True),
        ("aten::split", "Tensor", (T(0), 2, 0), ((1, 2),), True),
        ("aten::add", "Tensor", (T(0), T(1), 1), (2,), False),  # a number that may be whole or not
        ("aten::clamp", "", (T(0), None, None), (1,), True),  # unless it is not there
        ("aten::constant_pad_nd", "", (T(0), (1, 1), 0), (1,), False),
        ("aten::item", "", (T(0),), (None,), False),  # a result that is no tensor
        # The types of results that do not read the same from behind are confused: two numbers stand before three tensors.
        (
            "aten::_scaled_dot_product_flash_attention",
            "",
            (T(0), T(1), T(2), 0.0, False, False, None),
            (3, 4, *(None,) * 7),
            False,
        ),
        ("mkldnn::_linear_pointwise", "", (T(0), T(1), None, "none", (), None), (2,), True),
    ],
)
def test_what_the_c_interface_can_call(
    name: str,
    overload: str,
    arguments: tuple[OperatorArgument, ...],
    results: tuple[OperatorResult, ...],
    native: bool,
) -> None:
    """Decided by the schema and by which optional arguments are there."""
    assert is_native(name, overload, arguments, results) == native


def test_calls_that_contradict_the_schema_are_refused() -> None:
    """By an error that shows the schema."""
    with pytest.raises(HybridError, match="torch has no operator aten::no_such with the overload 'out'"):
        operator_schema("aten::no_such", "out")
    with pytest.raises(HybridError, match=r"aten::abs\(Tensor self\) -> Tensor takes 1 arguments, not 2"):
        is_native("aten::abs", "", (T(0), 1), (1,))
    with pytest.raises(HybridError, match="does not return what the program takes from it"):
        is_native("aten::abs", "", (T(0),), ((1,),))
    with pytest.raises(HybridError, match=r"'3' is no int among the arguments of aten::unsqueeze"):
        described_arguments("aten::unsqueeze", "", (T(0), "3"))
