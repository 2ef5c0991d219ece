"""Head of a report: the model, its inputs, the machine, the versions, the date."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.machine import processor
from torch_hybrid_backend.report.share import counted, tensor_in_words
from torch_hybrid_backend.torch_private import tree_leaves

_INPUTS_SHOWN = 4


def about_call(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
    """Facts about the call `model(*args, **kwargs)` on this machine: texts by name, in the order of the report."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else getattr(model, "__name__", "Model")
    threads = counted(torch.get_num_threads(), "thread")
    return {
        "model": name,
        "inputs": _tensors_in_words(
            [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        ),
        "machine": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {threads}",
        "versions": f"torch {torch.__version__}, hybrid {__version__}, Python {sys.version.split()[0]}",
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }


def _tensors_in_words(tensors: Sequence[torch.Tensor]) -> str:
    """For example "1x3x224x224 float32, 1x128 int64"."""
    shown = [
        tensor_in_words(tensor.shape, str(tensor.dtype).removeprefix("torch.")) for tensor in tensors[:_INPUTS_SHOWN]
    ]
    more = len(tensors) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") or "no tensors"
