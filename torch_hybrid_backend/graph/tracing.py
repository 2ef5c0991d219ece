"""Tracing beside calls and traces of other threads, as where engines are chosen anew off the call: torch.fx traces for the whole process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.torch_private import clear_fx_tracing_flag, compile_lock


def traced(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    **options: Any,
) -> torch.fx.GraphModule:
    """`make_fx(function, decompositions, **options)(*inputs)`, in the modes that the caller is in."""

    def unseen(*given: Any) -> Any:
        # It is set for all threads, and compiled functions raise where they are called meanwhile (seen in 2.13).
        clear_fx_tracing_flag()
        return function(*given)

    # It changes nn.Module for all threads, too: of two that trace, the second would leave it as the first had made it. Dynamo traces with
    # this lock.
    with compile_lock:
        graph: torch.fx.GraphModule = make_fx(unseen, dict(decompositions), **options)(*inputs)
    return graph
