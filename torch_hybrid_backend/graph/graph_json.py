"""A functional ATen graph as text, and back: for what is kept of AOTAutograd's work between processes, and for processes that build.

Text (JSON), not a pickle: nothing that is read can run. An operator is looked up by name, in ATen, prims and torch.ao's operators on quantized
tensors alone unless `any_operator` is set. What has no place in it raises `NotTextError`: sub-graphs, constants that are large or lie elsewhere
than on the CPU, and sizes known only at run time unless `sizes` collects them. With `sizes` the text is of a graph for any sizes: it takes and
returns tensors alone, and is read at given sizes.

    text = graph_to_text(graph_module)
    same = graph_from_text(text, fake_mode)   # names, arguments, origins; meta["val"] of the same strides, sharing the same storages
"""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from torch_hybrid_backend.core.tensor_spec import dim, is_computable
from torch_hybrid_backend.graph.quantized import QUANTIZED
from torch_hybrid_backend.graph.source import module_stack, with_module_stack
from torch_hybrid_backend.sizes.size import Dim
from torch_hybrid_backend.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    quantized_operators,
    unset_fake_temporarily,
)

NAMESPACES = ("aten", "prims", QUANTIZED)
_OPS = ("placeholder", "get_attr", "call_function", "output")
_MAX_CONSTANT_BYTES = 1 << 16  # of all lifted constants: they are small tables in the user's code
_SINGLETONS: dict[type, str] = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}
_SIZE = "$size"  # no keyword of an operator is named so


class NotTextError(Exception):
    """The graph holds something that has no textual form; the message says what."""


def graph_to_text(
    graph_module: torch.fx.GraphModule, *, any_operator: bool = False, sizes: dict[Dim, int] | None = None
) -> bytes:
    """The graph as JSON. `any_operator`: operators of other libraries have text too, by name. Raises NotTextError.

    sizes: where given, gets the sizes known only at run time, with their numbers; inputs and outputs that are numbers are left out.
    """
    writer = _Writer(graph_module, any_operator=any_operator, sizes=sizes)
    with unset_fake_temporarily():  # AOTAutograd is still tracing: a constant's contents would not be there
        nodes = [writer.node(node) for node in graph_module.graph.nodes if not writer.is_size(node)]
    tables = {"traces": list(writer.traces), "stacks": list(writer.stacks), "constants": writer.constants}
    return json.dumps({"nodes": nodes, **tables}).encode()


def graph_from_text(
    text: bytes, fake_mode: FakeTensorMode, *, any_operator: bool = False, sizes: Sequence[int] = ()
) -> torch.fx.GraphModule:
    """The graph that `graph_to_text` wrote, its metadata in `fake_mode`. `any_operator`: operators of every library that is imported are known.
    `sizes`: values of the sizes that were written apart, by number.

    Raises ValueError, KeyError, TypeError, IndexError, AttributeError or RuntimeError where the text is not one of a graph.
    """
    written = json.loads(text, object_hook=lambda each: sizes[each[_SIZE]] if _SIZE in each else each)
    return _Reader(written, fake_mode, any_operator=any_operator).graph_module()


class _Writer:
    def __init__(self, graph_module: torch.fx.GraphModule, *, any_operator: bool, sizes: dict[Dim, int] | None) -> None:
        self._any_operator = any_operator
        self._sizes = sizes
        self.traces: dict[str, int] = {}
        self.stacks: dict[tuple[tuple[str, str], ...], int] = {}
        self.constants: dict[str, Any] = {}
        self._module = graph_module
        self._storages: dict[int, int] = {}
        self._constant_bytes = 0

    def is_size(self, node: Node) -> bool:
        """True for a node whose value is written in its place, as a size."""
        return self._sizes is not None and type(node.meta.get("val")) in (int, torch.SymInt)

    def node(self, node: Node) -> dict[str, Any]:
        arguments: Any = node.args
        match node.op:
            case "placeholder":
                target = str(node.target)
            case "output":
                target = str(node.target)
                if self._sizes is not None:
                    outputs: Any = node.args[0]
                    arguments = ([each for each in outputs if not isinstance(each, Node) or not self.is_size(each)],)
            case "get_attr":
                target = self._constant(str(node.target))
            case "call_function":
                target = _operator_name(node.target, any_operator=self._any_operator)
            case _:
                raise NotTextError(f"{node.op} {node.target}")
        written = {"op": node.op, "name": node.name, "target": target, "args": self._argument(arguments)}
        if node.kwargs:
            written["kwargs"] = self._argument(dict(node.kwargs))
        if "val" in node.meta:
            written["val"] = self._value(node.meta["val"])
        trace = node.meta.get("stack_trace")
        if trace is not None:
            written["trace"] = self.traces.setdefault(trace, len(self.traces))
        if stack := module_stack(node):
            written["modules"] = self.stacks.setdefault(stack, len(self.stacks))
        return written

    def _constant(self, name: str) -> str:
        tensor = getattr(self._module, name, None)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise NotTextError(f"the attribute {name}, a {type(tensor).__name__}")
        if not tensor.is_contiguous() or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise NotTextError(f"the constant {name} in an unusual form")
        self._constant_bytes += tensor.nbytes
        if self._constant_bytes > _MAX_CONSTANT_BYTES:
            raise NotTextError(f"constants of {self._constant_bytes} bytes")
        data = bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        self.constants[name] = [_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]
        return name

    def _argument(self, value: object) -> Any:
        """Numbers, strings and None as they are; lists, tuples and all else as an object with one entry that says what it is."""
        if isinstance(value, Node):
            return self._size(value.meta["val"]) if self.is_size(value) else {"node": value.name}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self._argument(item) for item in value]}
        if isinstance(value, dict) and all(type(key) is str for key in value):
            return {"dict": {key: self._argument(item) for key, item in value.items()}}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        kind = _SINGLETONS.get(type(value))
        if kind is None:
            raise NotTextError(f"an argument {value!r} of type {type(value).__name__}")
        return {kind: _name(value)}

    def _value(self, value: object) -> Any:
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [self._value(item) for item in value]}
        if value is None or type(value) in (bool, int, float):
            return value
        if type(value) is not FakeTensor or value.layout is not torch.strided or value.is_quantized:
            raise NotTextError(f"a value of type {type(value).__name__}")
        if value.is_conj() or value.is_neg():
            raise NotTextError("a lazily conjugated or negated value")
        storage = value.untyped_storage()
        numbers = list(map(self._size, [storage.nbytes(), value.storage_offset(), *value.shape, *value.stride()]))
        place = self._storages.setdefault(storage._cdata, len(self._storages))
        return {"tensor": [_name(value.dtype), str(value.device), place, value.dim(), *numbers]}

    def _size(self, value: int | torch.SymInt) -> int | dict[str, int]:
        size = dim(value)
        if isinstance(size, int):
            return size
        if self._sizes is None:
            raise NotTextError("a size known only at run time")
        if not is_computable(size):
            raise NotTextError(f"the size {value}, which depends on data")
        return {_SIZE: self._sizes.setdefault(size, len(self._sizes))}


class _Reader:
    def __init__(self, written: Mapping[str, Any], fake_mode: FakeTensorMode, *, any_operator: bool) -> None:
        self._any_operator = any_operator
        self._written = written
        self._fake_mode = fake_mode
        self._nodes: dict[str, Node] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def graph_module(self) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        traces, stacks = self._written["traces"], self._written["stacks"]
        for entry in self._written["nodes"]:
            op, name = entry["op"], entry["name"]
            if op not in _OPS:  # a call_method would run whatever method of a tensor the text names
                raise ValueError(f"a node's op must be one of {', '.join(_OPS)}, not {op}")
            target = (
                _operator(entry["target"], any_operator=self._any_operator)
                if op == "call_function"
                else entry["target"]
            )
            arguments, keywords = self._argument(entry["args"]), self._argument(entry.get("kwargs", {"dict": {}}))
            node = graph.create_node(op, target, arguments, keywords, name)
            if node.name != name:
                raise ValueError(f"the node {name} became {node.name}")
            if "val" in entry:
                node.meta["val"] = self._value(entry["val"])
            if "trace" in entry:
                node.meta["stack_trace"] = traces[entry["trace"]]
            if "modules" in entry:
                with_module_stack(node, stacks[entry["modules"]])
            self._nodes[name] = node
        owner = torch.nn.Module()
        for name, written in self._written["constants"].items():
            setattr(owner, name, _constant(*written))
        return torch.fx.GraphModule(owner, graph)

    def _argument(self, written: Any) -> Any:
        if not isinstance(written, dict):
            return written
        ((kind, value),) = written.items()
        match kind:
            case "node":
                return self._nodes[value]
            case "list":
                return [self._argument(item) for item in value]
            case "tuple":
                return tuple(self._argument(item) for item in value)
            case "dict":
                return {key: self._argument(item) for key, item in value.items()}
            case "device":
                return torch.device(value)
        return _singleton(kind, value)

    def _value(self, written: Any) -> Any:
        if not isinstance(written, dict):
            return written
        ((kind, value),) = written.items()
        if kind != "tensor":
            items = [self._value(item) for item in value]
            return items if kind == "list" else tuple(items)
        dtype, device, place, rank, size_bytes, offset, *lengths = value
        if place not in self._storages:
            self._storages[place] = torch.UntypedStorage(size_bytes, device="meta")  # type: ignore[no-untyped-call]
        tensor = torch.empty(0, dtype=_singleton("dtype", dtype), device="meta")
        tensor.set_(self._storages[place], offset, lengths[:rank], lengths[rank:])
        return FakeTensor(self._fake_mode, tensor, torch.device(device))


def _operator_name(target: object, *, any_operator: bool) -> str:
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, OpOverload) or not (any_operator or target.namespace in NAMESPACES):
        raise NotTextError(f"the operator {target}")
    return str(target)


def _operator(name: str, *, any_operator: bool) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if not any_operator and namespace not in NAMESPACES:
        raise ValueError(f"an operator of {namespace}")
    if namespace == QUANTIZED:
        quantized_operators()  # its operators exist from now on
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload):  # "aten.add.__class__"
        raise ValueError(f"{name} is no operator")
    return found


def _name(singleton: object) -> str:
    return str(singleton).removeprefix("torch.")


def _singleton(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if _SINGLETONS.get(type(found)) != kind:
        raise ValueError(f"{name} is no {kind}")
    return found


def _constant(dtype: str, shape: list[int], data: str) -> torch.Tensor:
    content = bytearray(base64.b64decode(data))
    if not content:
        return torch.empty(shape, dtype=_singleton("dtype", dtype), device="cpu")
    return torch.frombuffer(content, dtype=torch.uint8).clone().view(_singleton("dtype", dtype)).reshape(shape)
