"""What only Python can run, as text: segments that eager runs, and operators that the C++ interface of PyTorch lacks.

A plan calls them back by number. A file with such functions runs where `load` runs, with the version of PyTorch that wrote it, and not in the
runner.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.program import OperatorArgument, OperatorCall, TensorArgument
from torch_hybrid_backend.errors import NotExportableError
from torch_hybrid_backend.generators import Taken
from torch_hybrid_backend.graph.eager_graph import EagerGraph
from torch_hybrid_backend.graph.graph_json import NotTextError, graph_from_text, graph_to_text
from torch_hybrid_backend.runtime.steps_in_python import call_operator
from torch_hybrid_backend.torch_private import FakeTensorMode

Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_SINGLETONS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def functions_to_text(functions: Mapping[int, Function]) -> bytes:
    """A segment of functions by number. Raises NotExportableError for one that has no text."""
    return json.dumps(
        {number: _written(function) for number, function in functions.items()}, separators=(",", ":")
    ).encode()


def functions_from_text(text: bytes) -> dict[int, Function]:
    """The functions of a segment, by number. Raises what `graph_from_text` does for other text."""
    return {int(number): _read(written) for number, written in json.loads(text).items()}


def _written(function: Function) -> dict[str, Any]:
    if isinstance(function, EagerGraph):
        try:
            return {"graph": graph_to_text(function.traced).decode()}
        except NotTextError as error:
            raise NotExportableError(f"a part that eager runs cannot be written: {error}") from error
    if isinstance(function, Taken):
        return {"random": [str(function.device), list(function.groups)]}
    if isinstance(function, functools.partial) and function.func is call_operator:
        call: OperatorCall = function.args[0]
        return {"operator": [call.name, call.overload, _argument(call.arguments), _kept(call.results)]}
    raise NotExportableError(f"a part of it is run by {function!r}, which is bound to this process")


def _read(written: Mapping[str, Any]) -> Function:
    ((kind, content),) = written.items()
    match kind:
        case "graph":
            return EagerGraph(graph_from_text(content.encode(), FakeTensorMode()))
        case "random":
            return Taken(Device.of(torch.device(content[0])), tuple(content[1]))
        case "operator":
            name, overload, arguments, kept = content
            results = tuple(tuple(each) if isinstance(each, list) else each for each in kept)
            return functools.partial(call_operator, OperatorCall(name, _value(arguments), results, "", overload))
    raise ValueError(f"no function is of the kind {kind!r}")


def _kept(results: Sequence[Any]) -> list[Any]:
    """The results of a call with their buffers as 0: only which are read matters."""

    def kept(result: Any) -> Any:
        if isinstance(result, tuple):
            return [kept(each) for each in result]
        return None if result is None else 0

    return [kept(result) for result in results]


def _argument(value: OperatorArgument) -> Any:
    if isinstance(value, tuple):
        return [_argument(item) for item in value]
    if isinstance(value, TensorArgument):
        return {"tensor": value.buffer}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if kind := _SINGLETONS.get(type(value)):
        return {kind: str(value).removeprefix("torch.")}
    return value


def _value(written: Any) -> Any:
    if isinstance(written, list):
        return tuple(map(_value, written))
    if not isinstance(written, dict):
        return written
    ((kind, value),) = written.items()
    if kind == "tensor":
        return TensorArgument(value)
    if kind == "device":
        return torch.device(value)
    found = getattr(torch, value)
    if _SINGLETONS.get(type(found)) != kind:
        raise ValueError(f"{value} is no {kind}")
    return found
