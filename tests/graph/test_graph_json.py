"""Graphs as text: what comes back is the graph, and what is no text of a graph is refused before anything of it runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.graph.graph_json import NotTextError, graph_from_text, graph_to_text
from torch_hybrid_backend.graph.source import module_stack, with_module_stack

aten = torch.ops.aten
_TABLE = torch.tensor([1.5, -math.inf, math.nan])
_NAMED_LATER = (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def _views(x: torch.Tensor) -> tuple[Any, ...]:
    y = x * 2
    return y, y.t(), y.t()[1:, ::2], x[1:].t()


def _several_results(x: torch.Tensor) -> tuple[Any, ...]:
    values, places = torch.topk(x, 2)
    left, right = x.split(2, 1)
    return values, places, left + right, None, 3, 2.5, True


def _arguments(x: torch.Tensor) -> tuple[Any, ...]:
    wide = x.to(torch.float64, memory_format=torch.preserve_format)
    made = torch.full((2, 3), -math.inf, dtype=torch.float16, device="cpu")
    return wide, made, torch.nn.functional.gelu(x, approximate="tanh"), torch.clamp(x, None, math.inf), x.sum([0, 1])


def _constants(x: torch.Tensor) -> tuple[Any, ...]:
    empty, truth, places = torch.empty(0, 3), torch.tensor([True, False]), torch.tensor([[1, 0]])
    return x[:, :3] * _TABLE, empty + 1, truth.any(), x[places], torch.tensor(2.5, dtype=torch.bfloat16) * x


def _strided(x: torch.Tensor) -> tuple[Any, ...]:
    return x.t().contiguous(), x.t() + 1, x.expand(2, *x.shape)


PROGRAMS = [_views, _several_results, _arguments, _constants, _strided]


def _graph(program: Callable[..., Any], x: torch.Tensor) -> torch.fx.GraphModule:
    gm = make_fx(program, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    for number, node in enumerate(gm.graph.nodes):
        if number % 3:
            with_module_stack(node, (("layer", "Stack"), (f"layer.{number % 2}@1", "Block")))
            node.meta["stack_trace"] = f'File "model.py", line {number % 2}, in forward\n    y = "größer"'
    return gm


def _forms(node: torch.fx.Node) -> Any:
    return torch.utils._pytree.tree_map(
        lambda v: (
            (v.shape, v.stride(), v.dtype, v.device, v.storage_offset(), v.untyped_storage().nbytes())
            if isinstance(v, torch.Tensor)
            else v
        ),
        node.meta.get("val"),
    )


def _shared(gm: torch.fx.GraphModule) -> list[int]:
    """For each tensor, the first one that shares its storage."""
    tensors = [
        v
        for node in gm.graph.nodes
        for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor)
    ]
    storages = [v.untyped_storage()._cdata for v in tensors]
    return [storages.index(storage) for storage in storages]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(4, 3).t()], ids=["contiguous", "transposed"])
def test_graphs_come_back(program: Callable[..., Any], x: torch.Tensor) -> None:
    """Names, operators, arguments, stack traces, modules' calls, forms of values and which of them share storage. It computes the same."""
    gm = _graph(program, x)
    text = graph_to_text(gm)
    mode = FakeTensorMode()
    copy = graph_from_text(text, mode)
    for before, after in zip(gm.graph.nodes, copy.graph.nodes, strict=True):
        assert (before.op, before.name, before.format_node()) == (after.op, after.name, after.format_node())
        assert before.op == "get_attr" or before.target == after.target
        assert str((before.args, before.kwargs)) == str((after.args, after.kwargs))
        assert before.meta.get("stack_trace") == after.meta.get("stack_trace")
        assert module_stack(before) == module_stack(after)
        assert _forms(before) == _forms(after)
        values = torch.utils._pytree.tree_leaves(after.meta.get("val"))
        assert all(value.fake_mode is mode for value in values if isinstance(value, torch.Tensor))
    assert _shared(copy) == _shared(gm)
    torch.testing.assert_close(copy(x), gm(x), rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert graph_to_text(copy) == text


@torch.library.custom_op("hybrid_graph_json::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    """An operator of another library."""
    return x * 2


@_twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


_LARGE, _TURNED = torch.zeros(1 << 14), torch.zeros(2, 3).t()
_CONJUGATED = torch.zeros(3, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda x: _twice(x) + 1, "hybrid_graph_json.twice"),
        (_branch, "attribute|operator"),
        (lambda x: x[:3, :2] + _TURNED, "unusual form"),
        (lambda x: x[0, :3] + _CONJUGATED, "unusual form|conjugated"),
        (lambda x: x.to(torch.complex64).conj() + 1, "conjugated"),
    ],
    ids=["other library", "sub-graph", "strided constant", "conjugated constant", "conjugated value"],
)
def test_what_has_no_text_is_said_not_to(program: Callable[..., Any], message: str) -> None:
    """The error names it."""
    with pytest.raises(NotTextError, match=message):
        graph_to_text(_graph(program, torch.ones(3, 4)))


def test_constants_are_small_in_all() -> None:
    """64 KiB of them have a text, four bytes more do not."""
    gm = _graph(lambda x: (_LARGE + x.sum()).sum(), torch.ones(3))
    assert graph_from_text(graph_to_text(gm), FakeTensorMode())(torch.ones(3)) == 3 << 14
    gm.register_buffer("more", torch.zeros(1))
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.get_attr("more")
    with pytest.raises(NotTextError, match="constants of 65540 bytes"):
        graph_to_text(gm)


def test_sizes_known_only_at_run_time_have_no_text() -> None:
    """Neither as the size of a value nor as a value."""
    for program in (lambda x: x + 1, lambda x: x.shape[0] + 1):
        with pytest.raises(NotTextError, match=r"run time|SymInt"):
            graph_to_text(make_fx(program, tracing_mode="symbolic")(torch.ones(3, 4)))


def _change(**changes: object) -> Callable[[dict[str, Any]], None]:
    def change(written: dict[str, Any]) -> None:
        (operator,) = (node for node in written["nodes"] if node["op"] == "call_function")
        operator.update(changes)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        _change(target="os.system.default"),
        _change(target="_C._jit.default"),
        _change(target="aten.no_such_operator.default"),
        _change(target="aten.add.__class__"),
        _change(target="aten.add.__setattr__"),
        _change(target="aten.add"),
        _change(op="call_method"),
        _change(name="not the name\n"),
        _change(args={"tuple": [{"node": "later"}, 1]}),
        _change(args={"tuple": [{"dtype": "nn"}]}),
        _change(args={"tuple": [{"memory_format": "float32"}]}),
        _change(args={"tuple": [{"load": "float32"}]}),
        _change(args={"tuple": [{"device": "no such device"}]}),
        _change(val={"tensor": ["save", "cpu", 0, 0, 4, 0]}),
        _change(trace=7),
        lambda written: written.pop("nodes"),
        lambda written: written["nodes"].append({}),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused(damage: Callable[[dict[str, Any]], object]) -> None:
    """An operator that ATen does not have, an attribute of one, a call that is none of an operator, a value of the wrong kind: one of the
    errors that callers expect."""
    written = json.loads(graph_to_text(_graph(lambda x: x + 1, torch.ones(3, 4))))
    assert graph_from_text(json.dumps(written).encode(), FakeTensorMode())(torch.ones(2)).tolist() == [2, 2]
    damage(written)
    with pytest.raises(_NAMED_LATER):
        graph_from_text(json.dumps(written).encode(), FakeTensorMode())


def test_operators_on_quantized_tensors_are_found_in_a_new_process(tmp_path) -> None:
    """Operators on quantized tensors exist only once torch.ao's module is imported: reading a graph that holds some imports it."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(3)
    q = graph.call_function(
        torch.ops.quantized_decomposed.quantize_per_tensor.default, (x, 0.5, 0, -128, 127, torch.int8)
    )
    graph.output((q,))
    (tmp_path / "graph.json").write_bytes(graph_to_text(torch.fx.GraphModule(torch.nn.Module(), graph)))
    program = (
        "import sys; from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "from torch_hybrid_backend.graph.graph_json import graph_from_text\n"
        "graph = graph_from_text(open(sys.argv[1], 'rb').read(), FakeTensorMode())\n"
        "import torch; print(graph(torch.tensor([0.2, 0.3, 9.0]))[0].tolist())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "graph.json")], check=False, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "[0, 1, 18]", ran.stderr
