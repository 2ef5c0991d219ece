"""Errors of a call as the user's code raises them in eager.

AOTAutograd's operators are not the user's: `cross_entropy` has become a gather, which raises RuntimeError where `cross_entropy` raises
IndexError. So a call that raises is made once more in eager, with Dynamo's graph. Its error is the one that reaches the user, with a note
of the line that it comes from. Nothing was written to the inputs before: AOTAutograd's wrapper does that after the graph has run.

Where hooks on saved tensors are set the error is raised as it is: they may have raised it, and would see the second call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.errors import HybridError, failures, is_out_of_memory, is_sticky
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.torch_private import has_saved_tensors_hooks, tree_leaves


def raising_as_written(planned: Callable[..., Any], graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """`planned`, a call of the compiled graph, with the errors of `graph_module`, which is Dynamo's and can run twice unnoticed."""

    def call(*inputs: Any) -> Any:
        try:
            return planned(*inputs)
        except failures(Exception) as error:  # PyTorch's operators raise many classes
            if isinstance(error, HybridError) or is_out_of_memory(error) or is_sticky(error):
                raise
            if (
                has_saved_tensors_hooks()
            ):  # such as a checkpoint's, which ends a call by an error, and would see a second one
                raise
            raised = error
        try:
            as_written(graph_module)(*inputs)
            raise raised  # eager has nothing against the call: the fault is ours, and is not hidden
        finally:
            del raised  # it and this frame would keep each other alive

    return call


def as_written(graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """Dynamo's graph in eager, node by node. An error that a node raises gets a note: the user's line, and the tensors that it was given."""
    return lambda *inputs: _AsWritten(graph_module).run(*inputs)


class _AsWritten(torch.fx.Interpreter):
    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # it would write into the messages of errors

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        try:
            # Not Interpreter.run_node: it writes to a record of the process (torch.fx.traceback) that another thread's tracing relies on.
            return getattr(self, n.op)(n.target, args, kwargs)
        except failures(Exception) as error:
            tensors = (value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
            error.add_note(f"in {source_line(n) or n.format_node()}; given {', '.join(map(_described, tensors))}")
            raise


def _described(tensor: torch.Tensor) -> str:
    """Text such as "int64 (2, 3) of 0 to 7"; floating-point numbers, and what lies on a device, are not looked at."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.is_cpu and tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
        text += f" of {tensor.min().item()} to {tensor.max().item()}"
    return text
