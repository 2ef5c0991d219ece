"""SHA-256 of a region's canonical form, which identifies the region in caches.

The form holds every operator, edge, constant (the bytes of tensor constants), dtype, shape, stride and which inputs
are constant. It holds no node name. Symbolic sizes enter by their expressions and their typical values, rounded to a power of two.
"""

from __future__ import annotations

import hashlib
import io
import operator
from collections.abc import Mapping, Sequence

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.region import RegionInput
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.sizes.size import size_hint
from torch_hybrid_backend.torch_private import unset_fake_temporarily


def region_key(graph_module: torch.fx.GraphModule, inputs: Sequence[RegionInput]) -> str:
    """SHA-256 of the region's canonical form, in hexadecimal; `inputs` describe the placeholders in order."""
    digest = hashlib.sha256(b"region 2")  # the number changes with the form
    for region_input in inputs:
        digest.update(f"{region_input.spec!r}{region_input.is_constant}".encode())
        if region_input.spec is not None and not region_input.spec.is_static:
            # Timings at a length of 8 say little about a length of 512.
            digest.update(repr([size_hint(size).bit_length() for size in region_input.spec.shape]).encode())
    _add_graph(digest, graph_module)
    return digest.hexdigest()


def _add_graph(digest: hashlib._Hash, graph_module: torch.fx.GraphModule) -> None:
    number: dict[Node, int] = {}
    for node in graph_module.graph.nodes:
        number[node] = len(number)
        parts = [node.op]
        if node.op == "get_attr":
            _add_attribute(digest, operator.attrgetter(str(node.target))(graph_module))
        elif node.op != "placeholder":
            parts.append(str(node.target))
            parts.append(_token(node.args, number))
            parts.append(_token(node.kwargs, number))
        parts.append(_value_token(node.meta.get("val")))
        digest.update("|".join(parts).encode() + b"\n")


def _add_attribute(digest: hashlib._Hash, value: object) -> None:
    if isinstance(value, torch.fx.GraphModule):
        _add_graph(digest, value)
    elif isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    else:
        digest.update(repr(value).encode())


def _bytes(tensor: torch.Tensor) -> bytes:
    with unset_fake_temporarily():  # AOTAutograd may still be tracing: the constant would be fake, without contents
        plain = tensor.detach()
        if plain.layout is torch.strided and not plain.is_quantized:
            return plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        stream = (
            io.BytesIO()
        )  # sparse and quantized tensors have no plain bytes; the stream is only hashed, never read back
        torch.save(plain, stream)
        return stream.getvalue()


def _token(argument: object, number: Mapping[Node, int]) -> str:
    if isinstance(argument, Node):
        return f"%{number[argument]}"
    if isinstance(argument, list | tuple):
        return "[" + ",".join(_token(item, number) for item in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{key}={_token(argument[key], number)}" for key in sorted(argument)) + "}"
    if isinstance(argument, slice):
        return f"slice{_token([argument.start, argument.stop, argument.step], number)}"
    return f"{type(argument).__name__}:{argument!r}"


def _value_token(value: object) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.layout}{value.dtype}{tuple(value.shape)}"
        return repr(TensorSpec.of(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value_token(item) for item in value) + "]"
    return f"{type(value).__name__}:{value}"
