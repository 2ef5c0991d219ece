"""The user's line and the call of a module that an operator stems from."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n?(?P<code>[^\n]*)')
_TORCH_FOLDER, _OWN_FOLDER = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)


def source_line(node: Node) -> str:
    """The user's line the node stems from, as "model.py:12 in forward: y = torch.relu(x)", or ""."""
    trace = node.meta.get("stack_trace")
    return _source_line(trace) if isinstance(trace, str) else ""


def module_call(node: Node) -> str:
    """The module in whose forward the operator was called, by its path in what was compiled, "encoder.layers.0", with "@1" behind it in that
    module's second call and so on; "" for the outermost, and where nothing is known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    key, (path, _) = next(
        reversed(stack.items())
    )  # as Dynamo has it: {"139@1": ("L['self'].encoder.layers.0", its class)}
    call = str(key).partition("@")[2]
    path = str(path).partition(".")[2]
    return f"{path}@{call}" if call else path


def with_module_call(node: Node, call: str) -> None:
    """Has `module_call` of the node give `call`."""
    path, _, number = call.partition("@")
    node.meta["nn_module_stack"] = {f"@{number}": (f"_.{path}", None)}


@functools.lru_cache(maxsize=4096)
def _source_line(trace: str) -> str:
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    # The innermost frame outside PyTorch and this package: inside torch.nn.Linear.forward nobody finds their own code again.
    own = [frame for frame in frames if not frame["path"].startswith((_TORCH_FOLDER, _OWN_FOLDER))]
    frame = (own or frames)[-1]
    code = frame["code"].strip()
    where = f"{Path(frame['path']).name}:{frame['line']} in {frame['function'].strip()}"
    return f"{where}: {code}" if code else where
