"""The user's line and the call of a module that an operator stems from."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n?(?P<code>[^\n]*)')
_RESUMED = re.compile(
    r"^torch_dynamo_resume_in_(.+)_at_\d+$"
)  # what Dynamo calls the rest of a function after a graph break
_TORCH_FOLDER, _OWN_FOLDER = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)


def source_line(node: Node) -> str:
    """The user's line the node stems from, as "model.py:12 in forward: y = torch.relu(x)", or ""."""
    trace = node.meta.get("stack_trace")
    return _source_line(trace) if isinstance(trace, str) else ""


def module_stack(node: Node) -> tuple[tuple[str, str], ...]:
    """The modules in whose forward the operator was called, outermost first: ("encoder.layers.0@1", "Block") is the path in what was compiled,
    with "@1" behind it in that module's second call and so on, and the name of the class. The outermost module of all, whose path is "", is
    left out. An operator of a backward graph has the modules of the operator that it differentiates."""
    # As Dynamo has it: {"139@1": ("L['self'].encoder.layers.0", its class)}
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    calls = []
    for key, (path, kind) in stack.items():
        _, _, name = str(path).partition(".")
        number = str(key).partition("@")[2]
        class_name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
        calls.append((f"{name}@{number}" if number else name, class_name))
    return tuple((call, class_name) for call, class_name in calls if call)


def module_call(node: Node) -> str:
    """The innermost call of `module_stack`; "" for the outermost module, and where nothing is known."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


def with_module_stack(node: Node, stack: Iterable[tuple[str, str]]) -> None:
    """Has `module_stack` of the node give `stack`."""
    named = enumerate((*call.partition("@"), class_name) for call, class_name in stack)
    node.meta["nn_module_stack"] = {f"{i}@{number}": (f"_.{path}", kind) for i, (path, _, number, kind) in named}


@functools.lru_cache(maxsize=4096)
def _source_line(trace: str) -> str:
    # Code that fx generates, such as what torch.export compiles of a branch, is no line of the user's.
    frames = [frame for frame in _FRAME.finditer(trace) if not frame["path"].startswith("<eval_with_key>")]
    if not frames:
        return ""
    # The innermost frame outside PyTorch and this package: inside torch.nn.Linear.forward nobody finds their own code again.
    own = [frame for frame in frames if not frame["path"].startswith((_TORCH_FOLDER, _OWN_FOLDER))]
    frame = (own or frames)[-1]
    code = frame["code"].strip()
    function = _RESUMED.sub(r"\1", frame["function"].strip())
    where = f"{Path(frame['path']).name}:{frame['line']} in {function}"
    return f"{where}: {code}" if code else where
