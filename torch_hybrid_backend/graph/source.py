"""The user's line that an operator stems from."""

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
