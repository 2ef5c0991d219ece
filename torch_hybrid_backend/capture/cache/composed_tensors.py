"""Tensors that are made of others, such as torchao's quantized weights: what of them decides how a graph is traced, and where their parts are.

AOTAutograd calls the methods of their class while it traces; its graph knows the parts alone. So a key must cover what the methods do. That is
known of one library, `LIBRARY`, and as long as the program has put nothing of its own in its classes: the key has its sources, the class, what
`__tensor_flatten__` says beside the parts, and what the processor can, for some of the methods ask. All else has no key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

from torch_hybrid_backend.errors import failures
from torch_hybrid_backend.storage.sources import sources_version
from torch_hybrid_backend.torch_private import is_traceable_wrapper_subclass

LIBRARY = "torchao"
_PRINTED_IN_FULL = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)  # `__dict__` is one


class UnkeyedError(Exception):
    """Something that a key cannot cover; the message says what."""


def class_key(tensor: Any) -> str:
    """Key of a tensor that is made of others, beside its parts. Raises UnkeyedError if the key is not known."""
    kind = type(tensor)
    folder = _library_folder()
    own = f"{folder}{os.sep}"
    for base in kind.__mro__[: kind.__mro__.index(torch.Tensor)]:
        _check_class(base)
        for function in _functions(vars(base)):
            if not function.__code__.co_filename.startswith(own):
                raise UnkeyedError(f"{_qualified(base)} has the function {_qualified(function)} of another library")
    names, metadata = tensor.__tensor_flatten__()
    return f"{_library_version(folder)} {_qualified(kind)} {_in_full(names)} {_in_full(metadata)}"


def parts_of(tensor: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of what a tensor is made of, in AOTAutograd's order."""
    for name in tensor.__tensor_flatten__()[0]:
        yield name, getattr(tensor, name)


def taking_apart(example_inputs: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Function that makes AOTAutograd's inputs of those of Dynamo's graph, in each call: tensors that are made of others become their parts.

    Classes and names of parts are those of the first inputs: Dynamo guards both, as it guards what else the class says of a tensor.
    Raises TypeError where a tensor is of another class all the same: guards can be left out.
    """
    composed = [(k, type(x), _getter(x)) for k, x in enumerate(example_inputs) if is_traceable_wrapper_subclass(x)]
    if not composed:
        return list

    def apart(inputs: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        start = 0
        for k, kind, parts in composed:
            if type(inputs[k]) is not kind:
                raise TypeError(f"input {k} is of {type(inputs[k])}, but the graph was compiled for {kind}")
            flat += inputs[start:k]
            flat += parts(inputs[k])
            start = k + 1
        flat += inputs[start:]
        return flat

    return apart


def _getter(tensor: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Function that gives the parts of tensors like this one, and the parts of those."""
    paths = list(_paths(tensor))
    get = attrgetter(*paths)
    return get if len(paths) > 1 else lambda tensor: (get(tensor),)


def _paths(tensor: Any) -> Iterator[str]:
    for name, part in parts_of(tensor):
        if is_traceable_wrapper_subclass(part):
            yield from (f"{name}.{inner}" for inner in _paths(part))
        else:
            yield name


def _library_folder() -> Path:
    file = Path(getattr(sys.modules.get(LIBRARY), "__file__", None) or "")
    if not file.is_file():
        raise UnkeyedError(f"{LIBRARY} is not imported, or from no files")
    return file.parent


@functools.cache
def _library_version(folder: Path) -> str:
    """All that its methods depend on beside their arguments. The version is that of what was imported: files may have been replaced since."""
    try:
        sources = sources_version(".", package=folder)
    except failures(OSError) as error:
        raise UnkeyedError(f"{LIBRARY}'s sources: {error}") from error
    parts = [sys.modules[LIBRARY].__version__, sources, *sorted(torch.cpu.get_capabilities().items())]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _check_class(kind: type) -> None:
    """Raises UnkeyedError where a class is not the one of its name in the library, or in torch."""
    module = sys.modules.get(kind.__module__)
    if (
        kind.__module__.partition(".")[0] not in (LIBRARY, "torch")
        or getattr(module, kind.__qualname__, None) is not kind
    ):
        raise UnkeyedError(f"the class {_qualified(kind)}")


def _functions(value: object) -> Iterator[FunctionType]:
    """The functions of a class, those in its tables too, and what they wrap. Raises UnkeyedError for what may run anything else."""
    if isinstance(value, FunctionType):
        yield value
        yield from _functions(getattr(value, "__wrapped__", None))
    elif isinstance(value, classmethod | staticmethod):
        yield from _functions(value.__func__)
    elif isinstance(value, property):
        yield from _functions((value.fget, value.fset, value.fdel))
    elif isinstance(value, Mapping):
        yield from _functions(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _functions(item)
    elif callable(value) or (hasattr(value, "__get__") and not isinstance(value, _SLOTS)):
        raise UnkeyedError(f"a class with {value!r} in it")


def _in_full(value: object) -> str:
    """A text that no other value has. Raises UnkeyedError where there is none."""
    kind = type(value)
    if value is None or kind in _PRINTED_IN_FULL:
        return repr(value)
    if isinstance(value, list | tuple) and kind in (list, tuple, torch.Size):
        return f"{kind.__name__}({', '.join(map(_in_full, value))})"
    if isinstance(value, dict) and kind is dict:
        return f"{{{', '.join(f'{_in_full(key)}: {_in_full(item)}' for key, item in value.items())}}}"
    if isinstance(value, enum.Enum):
        _check_class(kind)
        return f"{_qualified(kind)}.{value.name}"
    if dataclasses.is_dataclass(value):
        _check_class(kind)
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{_qualified(kind)}({_in_full(fields)})"
    raise UnkeyedError(f"a tensor's metadata of type {kind.__name__}")


def _qualified(what: type | FunctionType) -> str:
    return f"{what.__module__}.{what.__qualname__}"
