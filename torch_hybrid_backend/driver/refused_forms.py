"""Operators of the user's that eager refuses for the dtypes that they are given.

Fake tensors accept what kernels refuse: the product of a float32 and an int64 matrix, a layer norm of float32 with weights of float64. And
AOTAutograd would take such an operator apart into others, which compute something. So operators are tried before that, on zeros: each form
once, and only those whose tensors are not all of one dtype of floating point. That eager lacks a kernel (NotImplementedError) for a half type,
say, is no refusal: an engine may have one. It is one for integers where what is computed are real numbers: adaptive pooling, a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.fx import Node
from torch.fx.node import map_arg

from torch_hybrid_backend.errors import failures, is_out_of_memory
from torch_hybrid_backend.graph.source import source_line
from torch_hybrid_backend.torch_private import (
    FUNCTORCH,
    OperatorBase,
    is_any_autocast_enabled,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)

# Elements of an operator's tensors: trying larger ones takes longer than some tens of milliseconds.
_MOST_ELEMENTS = 1 << 24


def refused_operator(graph_module: torch.fx.GraphModule) -> str | None:
    """The line of the first operator of Dynamo's graph that eager refuses whatever its tensors hold, and what eager raises; None if there is
    no such operator, or autocast or functorch change what operators mean."""
    nodes = graph_module.graph.nodes
    if is_any_autocast_enabled() or any(map(_changes_others, nodes)):
        return None
    forms: dict[object, Node] = {}
    for node in filter(_is_suspect, nodes):
        forms.setdefault(_form(node), node)
    if not forms:
        return None
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        refusals = ((node, _refusal(node)) for node in forms.values())
        return next(
            (f"{source_line(node) or node.name}: {error}" for node, error in refusals if error is not None), None
        )


def _changes_others(node: Node) -> bool:
    return str(getattr(node.target, "__module__", "")).startswith(("torch.amp", *FUNCTORCH))


def _is_suspect(node: Node) -> bool:
    module = getattr(node.target, "__module__", None)
    is_pytorchs = node.op == "call_method" or module in (None, "_operator") or str(module).split(".")[0] == "torch"
    if node.op not in ("call_function", "call_method") or not is_pytorchs or isinstance(node.target, OperatorBase):
        return False
    if "dropout" in getattr(node.target, "__name__", str(node.target)):
        return False  # its mask is what differs, and a trial would draw random numbers
    values = [source.meta.get("example_value") for source in (node, *node.all_input_nodes)]
    given = list(_tensors(values[1:]))
    if not given or not all(map(_is_plain, tree_leaves(values))):
        return False
    dtypes = {tensor.dtype for tensor in (*given, *_tensors(values[:1]))}
    return len(dtypes) > 1 or not dtypes.pop().is_floating_point


def _is_plain(value: object) -> bool:
    """True if something like it can be made to try: a number, or a tensor on the host, not too large, of sizes that are known."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float | bool | None)
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.layout is torch.strided and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _form(node: Node) -> object:
    def described(value: Any) -> Any:
        return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)

    given = map_arg((node.args, node.kwargs), lambda source: source.meta["example_value"])
    return node.target, str(tree_map(described, given))


def _is_of_reals(node: Node, given: Any) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    is_real = any(tensor.is_floating_point() or tensor.is_complex() for tensor in _tensors(given))
    return not is_real and name.startswith(("adaptive_", "softmax", "log_softmax"))


def _refusal(node: Node) -> Exception | None:
    """The error that the operator raises on zeros, if it raises on ones too."""
    error: Exception | None = None
    for number in (0, 1):

        def filled(value: Any, number: int = number) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return (
                torch.full(value.shape, number, dtype=value.dtype)
                if number
                else torch.zeros(value.shape, dtype=value.dtype)
            )

        given = map_arg((node.args, node.kwargs), lambda source: tree_map(filled, source.meta["example_value"]))
        args, kwargs = given
        try:
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
        except failures(RuntimeError, TypeError, ValueError, IndexError) as raised:
            if is_out_of_memory(raised) or (isinstance(raised, NotImplementedError) and not _is_of_reals(node, given)):
                return None
            error = raised
        else:
            return None
    return error
