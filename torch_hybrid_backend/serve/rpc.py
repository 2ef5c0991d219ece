"""The Open Inference Protocol over gRPC, by Serve's gRPC proxy.

Messages are described here by their fields, so that no generated code is needed. The proxy hands on the bytes of requests; the replica reads
them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.errors import RequestError, failures
from torch_hybrid_backend.serve.protocol import Tensors, bytes_of, datatype_of, form_of, tensor_of_bytes

SERVICE = "inference.GRPCInferenceService"
METHODS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
# Import path for Serve's `gRPCOptions`.
ADDER = "torch_hybrid_backend.serve.rpc:add_service"

# Fields of messages by number: a name, and a type; "*" for a list, a capital for a message. What is missing here (parameters) is not read.
_NAMED = {1: ("name", "string"), 2: ("version", "string")}
_TENSOR = {1: ("name", "string"), 2: ("datatype", "string"), 3: ("shape", "*int64")}
_MESSAGES: Mapping[str, Mapping[int, tuple[str, str]]] = {
    "ServerLiveRequest": {},
    "ServerLiveResponse": {1: ("live", "bool")},
    "ServerReadyRequest": {},
    "ServerReadyResponse": {1: ("ready", "bool")},
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": {1: ("ready", "bool")},
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {**_NAMED, 3: ("extensions", "*string")},
    "ModelMetadataRequest": _NAMED,
    "TensorMetadata": _TENSOR,
    "ModelMetadataResponse": {
        1: ("name", "string"),
        2: ("versions", "*string"),
        3: ("platform", "string"),
        4: ("inputs", "*TensorMetadata"),
        5: ("outputs", "*TensorMetadata"),
    },
    "InferTensorContents": {
        1: ("bool_contents", "*bool"),
        2: ("int_contents", "*int32"),
        3: ("int64_contents", "*int64"),
        4: ("uint_contents", "*uint32"),
        5: ("uint64_contents", "*uint64"),
        6: ("fp32_contents", "*float"),
        7: ("fp64_contents", "*double"),
    },
    "InferTensor": {**_TENSOR, 5: ("contents", "InferTensorContents")},
    "InferRequestedOutput": {1: ("name", "string")},
    "ModelInferRequest": {
        1: ("model_name", "string"),
        2: ("model_version", "string"),
        3: ("id", "string"),
        5: ("inputs", "*InferTensor"),
        6: ("outputs", "*InferRequestedOutput"),
        7: ("raw_input_contents", "*bytes"),
    },
    "ModelInferResponse": {
        1: ("model_name", "string"),
        2: ("model_version", "string"),
        3: ("id", "string"),
        5: ("outputs", "*InferTensor"),
        6: ("raw_output_contents", "*bytes"),
    },
}
# The list of a tensor's values by its datatype; others come as bytes.
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def add_service(servicer: Any, server: Any) -> None:
    """Register the service with a gRPC server. Serve's proxy replaces the handlers by calls of a replica's methods."""
    import grpc

    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    handlers = grpc.method_handlers_generic_handler(SERVICE, dict.fromkeys(METHODS, handler))
    server.add_generic_rpc_handlers((handlers,))


def message(name: str, content: bytes = b"") -> Any:
    """A message of that name. Raises RequestError for bytes that are none."""
    try:
        return _classes()[name].FromString(content)
    except failures(Exception) as error:  # google.protobuf.message.DecodeError
        raise RequestError(f"the request is no {name}: {error}") from error


def server_metadata() -> Any:
    """The answer for the server."""
    answer = message("ServerMetadataResponse")
    answer.name, answer.version = "torch_hybrid_backend", __version__
    return answer


def model_metadata(described: Mapping[str, Any]) -> Any:
    """The answer for a model; `described`: its metadata of HTTP."""
    answer = message("ModelMetadataResponse")
    answer.name, answer.platform = described["name"], described["platform"]
    answer.versions.extend(described["versions"])
    for field in ("inputs", "outputs"):
        for each in described[field]:
            getattr(answer, field).add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
    return answer


def tensors_of(request: Any) -> Tensors:
    """The tensors of a ModelInferRequest. Raises RequestError for what is none."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"the request has {len(request.inputs)} inputs and the bytes of {len(raw)}")
    tensors: dict[str, torch.Tensor] = {}
    for number, each in enumerate(request.inputs):
        name, datatype, shape = form_of(each.name, each.datatype, list(each.shape))
        if name in tensors:
            raise RequestError(f"the input {name!r} is there twice")
        content = raw[number] if raw else _bytes_of_values(each.contents, name, datatype)
        tensors[name] = tensor_of_bytes(memoryview(content), datatype, shape)
    outputs = {each.name: True for each in request.outputs} or None
    return Tensors(tensors, request.id, outputs, binary=True)


def infer_response(name: str, version: str, answer: Tensors) -> Any:
    """The ModelInferResponse of an answer, with the tensors as bytes."""
    response = message("ModelInferResponse")
    response.model_name, response.model_version, response.id = name, version, answer.id
    for output, tensor in answer.tensors.items():
        response.outputs.add(name=output, datatype=datatype_of(tensor), shape=list(tensor.shape))
        response.raw_output_contents.append(bytes_of(tensor))
    return response


def _bytes_of_values(contents: Any, name: str, datatype: str) -> bytes:
    if datatype not in _CONTENTS:
        raise RequestError(f"the input {name!r} is {datatype}, which must come as raw_input_contents")
    values = list(getattr(contents, _CONTENTS[datatype]))
    dtype = {"BOOL": torch.bool, "FP32": torch.float32, "FP64": torch.float64}.get(datatype)
    if dtype is None:
        dtype = getattr(torch, datatype.lower())
        limits = torch.iinfo(dtype)
        if values and not limits.min <= min(values) <= max(values) <= limits.max:
            raise RequestError(f"the input {name!r} does not fit in {datatype}: it has {min(values)} to {max(values)}")
    return bytes_of(torch.tensor(values, dtype=dtype))


@functools.cache
def _classes() -> Mapping[str, Any]:
    """The classes of the messages, in a pool of their own: the process may have generated code of the same names."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="hybrid_inference.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for number, (field, kind) in fields.items():
            base = kind.removeprefix("*")
            is_message = base[0].isupper()
            added = described.field.add(name=field, number=number)
            added.label = field_types.LABEL_REPEATED if kind.startswith("*") else field_types.LABEL_OPTIONAL
            added.type = field_types.TYPE_MESSAGE if is_message else getattr(field_types, f"TYPE_{base.upper()}")
            if is_message:
                added.type_name = f".inference.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}")) for name in _MESSAGES
    }
