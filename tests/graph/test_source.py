"""The place in the user's code that a region came from."""

from __future__ import annotations

import torch

from tests.partition.engines_for_tests import trace
from torch_hybrid_backend.graph import source
from torch_hybrid_backend.graph.source import module_call, module_stack, source_line, with_module_stack

_TORCH_FILE = torch.nn.functional.__file__


def _source(trace_text: str | None) -> str:
    node = next(node for node in trace(torch.sin, torch.randn(2)).graph.nodes if node.op == "call_function")
    node.meta["stack_trace"] = trace_text
    return source_line(node)


def test_the_innermost_line_of_the_users_own_is_named() -> None:
    """Frames inside PyTorch and this package are passed over; file name, line, function and code are given."""
    text = (
        '  File "/home/me/model.py", line 3, in forward\n    x = self.block(x)\n'
        '  File "/home/me/block.py", line 12, in forward\n    return F.relu(x)\n'
        f'  File "{source.__file__}", line 5, in call\n    return operator()\n'
        f'  File "{_TORCH_FILE}", line 1700, in relu\n    result = torch.relu(input)\n'
    )
    assert _source(text) == "block.py:12 in forward: return F.relu(x)"


def test_without_a_frame_of_the_users_the_last_is_named() -> None:
    """Better PyTorch's line than none."""
    text = f'  File "{_TORCH_FILE}", line 1700, in relu\n    result = torch.relu(input)\n'
    assert _source(text) == "functional.py:1700 in relu: result = torch.relu(input)"


def test_generated_code_is_no_line_of_the_users() -> None:
    """Code that fx generates and torch.export compiles again, such as a branch, has no place in the user's files."""
    generated = '  File "<eval_with_key>.5", line 7, in forward\n    relu = linear.relu()\n'
    assert _source(generated) == ""
    assert _source(f'  File "/home/me/model.py", line 3, in forward\n    x = f(x)\n{generated}').startswith(
        "model.py:3"
    )


def test_frames_without_code_and_nodes_without_trace() -> None:
    """Code made at run time has no source line; nodes that passes made have no trace."""
    assert _source('  File "<string>", line 1, in forward') == "<string>:1 in forward"
    assert _source(None) == ""
    assert _source("nothing known") == ""


def test_the_modules_of_an_operator() -> None:
    """Paths from what was compiled, which call of each, and the classes; what is written into a node is read again."""
    (node,) = trace(torch.sin, torch.randn(2)).graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    outer = {"139": ("L['self']", torch.nn.Module)}
    inner = {
        **outer,
        "140@2": ("L['self'].layers", "torch.nn.Sequential"),
        "7": ("L['self'].layers.0", torch.nn.Linear),
    }
    stack = (("layers@2", "Sequential"), ("layers.0", "Linear"))
    for meta, found in ((inner, stack), (outer, ()), (None, ())):
        node.meta["nn_module_stack"] = meta
        assert module_stack(node) == found
        assert module_call(node) == (found[-1][0] if found else "")
    for written in (stack, (("encoder.0@1", ""),), (("a b", "B"), ("@3", "C")), ()):
        with_module_stack(node, written)
        assert module_stack(node) == written


def test_the_modules_of_a_derivative_are_those_of_what_is_differentiated() -> None:
    """AOTAutograd writes them under a name of their own."""
    (node,) = trace(torch.sin, torch.randn(2)).graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node.meta["fwd_nn_module_stack"] = {"140": ("L['self'].layers.0", torch.nn.Linear)}
    assert module_stack(node) == (("layers.0", "Linear"),)
