"""The Open Inference Protocol, version 2, over HTTP: bodies of requests to tensors, results to bodies of answers.

A body is JSON, or JSON followed by the bytes of tensors (the extension for binary tensors). The header `BINARY_HEADER` then has the length
of the JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_hybrid_backend.errors import RequestError, did_you_mean, failures

BINARY_HEADER = "inference-header-content-length"

# Names of the protocol by those of torch.
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for dtype, name in DATATYPES.items()}
# What is computed of a shape then takes no time: a request may have millions of sizes.
_MOST_DIMENSIONS = 64
_MOST_SIZE = 2**31 - 1
_MOST_ELEMENTS = 2**48


@dataclass(frozen=True, slots=True)
class Tensors:
    """A request, or an answer. `outputs`: the asked names, each True if its bytes are to follow the JSON; None asks for all."""

    tensors: Mapping[str, torch.Tensor]
    id: str = ""
    outputs: Mapping[str, bool] | None = None
    binary: bool = False

    def wants_bytes(self, output: str) -> bool:
        """True if the bytes of this output are to follow the JSON of the answer."""
        return self.binary if self.outputs is None else self.outputs[output]


def datatype_of(tensor: torch.Tensor) -> str:
    """The protocol's name of a tensor's dtype."""
    return DATATYPES[str(tensor.dtype).removeprefix("torch.")]


def json_of(body: bytes) -> Any:
    """The value of the JSON in a body. Raises RequestError (400) for what is none."""
    try:
        return json.loads(body.decode("utf-8-sig"))
    except failures(UnicodeDecodeError) as error:
        raise RequestError("the body is no JSON in UTF-8") from error
    except failures(ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error


def decode(body: bytes, json_length: str | None = None) -> Tensors:
    """The request in a body. `json_length`: the value of `BINARY_HEADER`. Raises RequestError (400) for what is none."""
    length = len(body)
    if json_length is not None:
        if not json_length.isdecimal() or int(json_length) > len(body):
            raise RequestError(
                f"{BINARY_HEADER} is {json_length!r}; it must be the length of the JSON, at most {len(body)}"
            )
        length = int(json_length)
    said = json_of(body[:length])
    if not isinstance(said, dict) or not isinstance(inputs := said.get("inputs"), list):
        raise RequestError('the body must be a JSON object with a list "inputs"')
    rest = memoryview(body)[length:]
    tensors: dict[str, torch.Tensor] = {}
    for each in inputs:
        name, tensor, rest = _input(each, rest)
        if name in tensors:
            raise RequestError(f"the input {name!r} is there twice")
        tensors[name] = tensor
    if len(rest):
        raise RequestError(f"{len(rest)} bytes follow the last tensor: check binary_data_size and {BINARY_HEADER}")
    binary = _parameter(said, "binary_data_output", bool, False)
    request_id = said.get("id", "")
    return Tensors(tensors, request_id if isinstance(request_id, str) else "", _outputs(said, binary), binary)


def encode(name: str, version: str, answer: Tensors) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if bytes follow it, else None."""
    described: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for output, tensor in answer.tensors.items():
        one: dict[str, Any] = {"name": output, "datatype": datatype_of(tensor), "shape": list(tensor.shape)}
        if answer.wants_bytes(output):
            content = bytes_of(tensor)
            one["parameters"] = {"binary_data_size": len(content)}
            parts.append(content)
        else:
            one["data"] = tensor.flatten().tolist()
        described.append(one)
    said: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": described}
    if answer.id:
        said["id"] = answer.id
    head = json.dumps(said, separators=(",", ":")).encode()
    return b"".join([head, *parts]), len(head) if parts else None


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, the last dimension innermost, in the machine's order of bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def tensor_of_bytes(content: memoryview, datatype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `bytes_of`: a tensor of its own memory. Raises RequestError for another number of bytes."""
    dtype, count = _DTYPES[datatype], math.prod(shape)
    if len(content) != count * dtype.itemsize:
        raise RequestError(
            f"{datatype} {list(shape)} has {count * dtype.itemsize} bytes; the request has {len(content)}"
        )
    if not count:
        return torch.empty(list(shape), dtype=dtype)
    if dtype is torch.bool and max(content) > 1:
        raise RequestError("a byte of BOOL must be 0 or 1")
    return torch.frombuffer(bytearray(content), dtype=dtype).view(list(shape))


def form_of(name: object, datatype: object, shape: object) -> tuple[str, str, list[int]]:
    """The same, checked. Raises RequestError for a name, datatype or shape that is none."""
    if not isinstance(name, str):
        raise RequestError(f"the name of an input is {name!r}; it must be a string")
    if not isinstance(datatype, str) or datatype not in _DTYPES:
        hint = did_you_mean(datatype, _DTYPES) if isinstance(datatype, str) else ""
        raise RequestError(f"the datatype of {name!r} is {datatype!r}. {hint}It must be one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise RequestError(f"the shape of {name!r} is {shape!r}; it must be a list of whole numbers, none below 0")
    if shape and (largest := max(shape)) > _MOST_SIZE:
        raise RequestError(f"the shape of {name!r} has the size {largest}, which is too large: at most {_MOST_SIZE}")
    if len(shape) > _MOST_DIMENSIONS or math.prod(n or 1 for n in shape) > _MOST_ELEMENTS:
        raise RequestError(
            f"the shape of {name!r} is {shape!r}; it must have at most {_MOST_DIMENSIONS} dimensions and 2^48 elements, sizes of 0 taken as 1"
        )
    return name, datatype, shape


def _input(said: object, rest: memoryview) -> tuple[str, torch.Tensor, memoryview]:
    """The name and the tensor of an input, and the bytes behind it."""
    if not isinstance(said, dict):
        raise RequestError(f'an input is {said!r}; it must be an object with "name", "datatype", "shape" and "data"')
    name, datatype, shape = form_of(said.get("name"), said.get("datatype"), said.get("shape"))
    size = _parameter(said, "binary_data_size", int, None)
    if size is not None:
        if not 0 <= size <= len(rest):
            raise RequestError(f"binary_data_size of {name!r} is {size}; {len(rest)} bytes follow the JSON")
        return name, tensor_of_bytes(rest[:size], datatype, shape), rest[size:]
    if "data" not in said:
        raise RequestError(f'the input {name!r} has neither "data" nor the parameter "binary_data_size"')
    return name, _tensor_of_json(name, said["data"], datatype, shape), rest


def _tensor_of_json(name: str, data: object, datatype: str, shape: list[int]) -> torch.Tensor:
    count = math.prod(shape)
    dtype = _DTYPES[datatype]
    flat = data
    # Nothing is copied but what lies one list deeper: values beside deep lists would be copied once for each level.
    while isinstance(flat, list) and flat and all(isinstance(row, list) for row in flat):
        flat = [value for row in flat for value in row]
    if not isinstance(flat, list) or len(flat) != count:
        got = f"{len(flat)} elements" if isinstance(flat, list) else f"a {type(data).__name__}"
        raise RequestError(
            f"the data of {name!r} must be a list of {count} elements, as its shape {shape} has; it is {got}"
        )
    kinds: tuple[type, ...] = (bool,) if dtype is torch.bool else (int,)
    if dtype.is_floating_point:
        kinds = (int, float)
    for value in flat:
        if type(value) not in kinds:
            raise RequestError(f"the data of {name!r} has {value!r}, which is no {datatype}")
    if kinds == (int,) and flat and not (limits := torch.iinfo(dtype)).min <= min(flat) <= max(flat) <= limits.max:
        raise RequestError(f"the data of {name!r} does not fit in {datatype}: it has {min(flat)} to {max(flat)}")
    try:
        tensor = torch.tensor(flat, dtype=dtype).view(shape)
    except failures(RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"the data of {name!r} does not fit in {datatype}: {error}") from error
    if dtype.is_floating_point and (is_infinite := tensor.isinf()).any():
        for value, is_large in zip(flat, is_infinite.flatten().tolist(), strict=True):
            if is_large and abs(value) != math.inf:
                raise RequestError(f"the data of {name!r} does not fit in {datatype}: it has {value!r}")
    return tensor


def _outputs(said: Mapping[str, Any], binary: bool) -> dict[str, bool] | None:
    asked = said.get("outputs")
    if asked is None or asked == []:
        return None
    if not isinstance(asked, list) or not all(
        isinstance(each, dict) and isinstance(each.get("name"), str) for each in asked
    ):
        raise RequestError('"outputs" must be a list of objects with a "name"')
    for each in asked:
        if _parameter(each, "classification", int, None) is not None:
            raise RequestError(f"classification is asked of {each['name']!r}; this server returns tensors alone")
    return {each["name"]: _parameter(each, "binary_data", bool, binary) for each in asked}


def _parameter(said: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    parameters = said.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f'"parameters" is {parameters!r}; it must be an object')
    value = parameters.get(name, default)
    if value is not default and type(value) is not kind:
        raise RequestError(f"the parameter {name} is {value!r}; it must be of the type {kind.__name__}")
    return value
