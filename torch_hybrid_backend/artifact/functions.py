"""Functions that only Python can run, as text: segments that eager runs, and operators that the C++ interface of PyTorch lacks.

A plan calls them back by number. A file with such functions runs where `load` runs, with the version of PyTorch that wrote it, and not in the
runner. A function of an entry for many sizes is text for all of them; at each set of sizes it becomes a function of tensors.
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
from torch_hybrid_backend.runtime.native.description import expression
from torch_hybrid_backend.runtime.native.ops import SizeTable
from torch_hybrid_backend.runtime.plan_layout import AtSizes, NumbersTaken
from torch_hybrid_backend.runtime.steps_in_python import call_operator
from torch_hybrid_backend.runtime.symbolic_executor import WithSizes
from torch_hybrid_backend.sizes.size import Dim
from torch_hybrid_backend.torch_private import FakeTensorMode

Function = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
# Values of an entry's symbols -> the functions at these sizes, by number.
FunctionsAt = Callable[[Sequence[int]], dict[int, Function]]

_SINGLETONS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def functions_to_text(functions: Mapping[int, Function | AtSizes]) -> bytes:
    """A segment of functions by number. Raises NotExportableError for one that has no text."""
    sizes: dict[Dim, int] = {}
    written = {number: _written(function, sizes) for number, function in functions.items()}
    text = {"functions": written, "sizes": list(map(expression, sizes))}
    return json.dumps(text, separators=(",", ":")).encode()


def functions_from_text(text: bytes, symbols: Sequence[str] = ()) -> FunctionsAt:
    """The functions of a segment, for values of `symbols`, which its sizes depend on; of none, where there is one set of sizes.

    What is returned raises what `graph_from_text` does for other text, and HybridError where a size does not fit in 64 bits.
    """
    segment = json.loads(text)
    functions, table = segment["functions"], SizeTable(symbols, segment["sizes"])

    def at(values: Sequence[int]) -> dict[int, Function]:
        sizes = table.at(values)
        return {int(number): _read(written, sizes) for number, written in functions.items()}

    return at


def graph_of(function: Function | AtSizes) -> EagerGraph | None:
    """The graph that eager runs, of a function that is one."""
    run = function.run if isinstance(function, WithSizes) else function
    return run if isinstance(run, EagerGraph) else None


def _written(function: Function | AtSizes, sizes: dict[Dim, int]) -> dict[str, Any]:
    """The text of a function; sizes known only at run time are added to `sizes`, and stand there as numbers of these."""
    if (graph := graph_of(function)) is not None:
        try:
            return {"graph": graph_to_text(graph.traced, any_operator=True, sizes=sizes).decode()}
        except NotTextError as error:
            raise NotExportableError(f"a part that eager runs cannot be written: {error}") from error
    if isinstance(function, Taken | NumbersTaken):
        return {"random": [str(function.device), [sizes.setdefault(size, len(sizes)) for size in function.groups]]}
    if isinstance(function, functools.partial) and function.func is call_operator:
        call: OperatorCall = function.args[0]
        return {"operator": [call.name, call.overload, _argument(call.arguments), _kept(call.results)]}
    raise NotExportableError(f"a part of it is run by {function!r}, which is bound to this process")


def _read(written: Mapping[str, Any], sizes: Sequence[int]) -> Function:
    ((kind, content),) = written.items()
    match kind:
        case "graph":
            return EagerGraph(graph_from_text(content.encode(), FakeTensorMode(), any_operator=True, sizes=sizes))
        case "random":
            device, groups = content
            return Taken(Device.of(torch.device(device)), tuple(sizes[number] for number in groups))
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
