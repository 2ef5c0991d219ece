"""Bodies of the Open Inference Protocol: what goes in comes out, and what is none is refused with what was expected."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torch_hybrid_backend.errors import RequestError
from torch_hybrid_backend.serve.protocol import DATATYPES, Tensors, bytes_of, decode, encode

_X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [3, 4]]}


def _body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


@pytest.mark.parametrize("data", [[[1, 2.5], [3, 4]], [1, 2.5, 3, 4]])
def test_data_is_nested_or_flat(data: Any) -> None:
    request = decode(_body({**_X, "data": data}, id="7"))
    assert torch.equal(request.tensors["x"], torch.tensor([[1, 2.5], [3, 4]]))
    assert (request.id, request.outputs, request.wants_bytes("any")) == ("7", None, False)


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3)])
@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype_goes_there_and_back(name: str, shape: tuple[int, ...], binary: bool) -> None:
    """Bytes and numbers give the same tensors."""
    tensor = torch.randint(0, 2, shape).to(getattr(torch, name))
    body, length = encode("m", "1", Tensors({"x": tensor}, "a", None, binary))
    said = json.loads(body[:length])
    assert (said["model_name"], said["model_version"], said["id"]) == ("m", "1", "a")
    (output,) = said["outputs"]
    back = decode(
        json.dumps({"inputs": [output]}).encode() + body[length:] if length else _body(output), _length(output, length)
    )
    assert back.tensors["x"].dtype == tensor.dtype
    assert torch.equal(back.tensors["x"], tensor)


def test_infinities_and_a_mark_of_utf8_are_allowed() -> None:
    values = [float("inf"), float("-inf"), 3.4028235e38, 0.0]
    request = decode(b"\xef\xbb\xbf" + _body({**_X, "data": values}))
    assert torch.equal(request.tensors["x"], torch.tensor(values).view(2, 2))


def _length(output: Any, length: int | None) -> str | None:
    return None if length is None else str(len(json.dumps({"inputs": [output]})))


def test_strided_tensors_and_several_of_bytes() -> None:
    a, b = torch.arange(6.0).view(2, 3).t(), torch.tensor([1, 2], dtype=torch.int8)
    inputs = [
        {"name": n, "datatype": d, "shape": list(t.shape), "parameters": {"binary_data_size": t.nbytes}}
        for n, d, t in (("a", "FP32", a), ("b", "INT8", b))
    ]
    head = _body(*inputs)
    request = decode(head + bytes_of(a) + bytes_of(b), str(len(head)))
    assert torch.equal(request.tensors["a"], a)
    assert torch.equal(request.tensors["b"], b)


def test_outputs_that_are_asked_for() -> None:
    asked = [{"name": "p", "parameters": {"binary_data": True}}, {"name": "q"}]
    request = decode(_body(_X, outputs=asked))
    assert request.outputs == {"p": True, "q": False}
    assert decode(_body(_X, outputs=asked, parameters={"binary_data_output": True})).outputs == {"p": True, "q": True}
    assert decode(_body(_X, parameters={"binary_data_output": True})).wants_bytes("any")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xff", "is no JSON in UTF-8"),
        (b"\xff\xfe{", "is no JSON in UTF-8"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", 'with a list "inputs"'),
        (_body(3), "an input is 3"),
        (_body({**_X, "name": 3}), "the name of an input is 3"),
        (_body({**_X, "datatype": "FP23"}), "Did you mean 'FP32'"),
        (_body({**_X, "datatype": "BYTES"}), "must be one of BOOL"),
        (_body({**_X, "shape": [2, -1]}), "none below 0"),
        (_body({**_X, "shape": [2, 2.0]}), "whole numbers"),
        (_body({**_X, "shape": [3, 10**18]}), "the size 1000000000000000000, which is too large: at most 2147483647"),
        (_body({**_X, "shape": [2**24, 2**24]}), "must be a list of"),
        (_body({**_X, "shape": [2**24, 2**25, 0]}), "2.48 elements"),
        (_body({**_X, "shape": [1] * 65}), "at most 64 dimensions"),
        (_body({**_X, "data": [[1, 2], 3, 4]}), "it is 3 elements"),
        (_body({**_X, "shape": [2, 1], "data": [[1], 2]}), r"\[1\], which is no FP32"),
        (_body({**_X, "data": [1, 2, 3]}), "a list of 4 elements.*it is 3 elements"),
        (_body({**_X, "data": "abcd"}), "it is a str"),
        (_body({**_X, "data": [1, 2, 3, "4"]}), "'4', which is no FP32"),
        (_body({**_X, "data": [1, 2, 3, None]}), "None, which is no FP32"),
        (_body({**_X, "datatype": "INT8", "data": [1, 2, 3, 300]}), "does not fit in INT8"),
        (_body({**_X, "datatype": "UINT8", "data": [1, 2, 3, -1]}), "does not fit in UINT8"),
        (_body({**_X, "datatype": "INT64", "data": [1, 2, 3, 2**70]}), "does not fit in INT64"),
        (_body({**_X, "datatype": "INT64", "data": [1, 2, 3, 4.5]}), "4.5, which is no INT64"),
        (_body({**_X, "data": [1, 2, float("inf"), -1e39]}), "does not fit in FP32: it has -1e.39"),
        (_body({**_X, "data": [1, 2, 3, 10**39]}), "does not fit in FP32"),
        (_body({**_X, "datatype": "FP16", "data": [1, 2, 3, 70000]}), "does not fit in FP16"),
        (_body({**_X, "datatype": "BF16", "data": [1, 2, 3, 3.4e38]}), "does not fit in BF16"),
        (_body(_X, _X), "'x' is there twice"),
        (_body({k: v for k, v in _X.items() if k != "data"}), "neither"),
        (_body({**_X, "parameters": []}), '"parameters" is'),
        (_body({**_X, "parameters": {"binary_data_size": 16}}), "0 bytes follow the JSON"),
        (_body({**_X, "parameters": {"binary_data_size": True}}), "must be of the type int"),
        (_body(_X, outputs=["p"]), '"outputs" must be'),
        (_body(_X, outputs=[{"name": "p", "parameters": {"classification": 3}}]), "returns tensors alone"),
    ],
)
def test_wrong_bodies(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        decode(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"shape": [2**31 - 1] * 1_000_000}, "the shape of 'x' is"),
        ({"data": [json.loads("[" * 500 + "]" * 500), *range(1_000_000)]}, "it is 1000001 elements"),
    ],
    ids=["sizes", "values beside deep lists"],
)
def test_hostile_bodies(described: dict[str, Any], said: str) -> None:
    """No product of a million sizes is computed, and values are not copied for each level of a list beside them: that would take minutes. The
    error quotes little of the body."""
    with pytest.raises(RequestError, match=said) as caught:
        decode(_body({**_X, **described}))
    assert len(str(caught.value)) <= 2000


@pytest.mark.parametrize("length", ["x", "-1", "100000"])
def test_wrong_lengths_of_the_json(length: str) -> None:
    with pytest.raises(RequestError, match="must be the length of the JSON"):
        decode(_body(_X), length)


@pytest.mark.parametrize(
    ("size", "content", "said"),
    [(15, b"0" * 15, "has 16 bytes; the request has 15"), (16, b"0" * 17, "1 bytes follow")],
)
def test_wrong_numbers_of_bytes(size: int, content: bytes, said: str) -> None:
    head = _body({"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": size}})
    with pytest.raises(RequestError, match=said):
        decode(head + content, str(len(head)))


def test_a_byte_that_is_no_bool() -> None:
    head = _body({"name": "x", "datatype": "BOOL", "shape": [2], "parameters": {"binary_data_size": 2}})
    with pytest.raises(RequestError, match="must be 0 or 1"):
        decode(head + b"\x00\x02", str(len(head)))
