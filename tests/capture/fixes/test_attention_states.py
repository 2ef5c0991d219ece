"""The states of random numbers that attention's gradient does not read."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.capture.fixes.attention_states import drop_attention_states, without_attention_states

aten = torch.ops.aten


def _step(dropout: float, q: torch.Tensor) -> list[torch.Tensor]:
    results = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, dropout)
    backward = aten._scaled_dot_product_efficient_attention_backward
    mask = [True, True, True, False]
    return list(backward(q, q, q, q, None, results[0], results[1], results[2], results[3], dropout, mask)[:3])


def _graph(dropout: float) -> torch.fx.GraphModule:
    """The joint graph of a step on a GPU that need not be there."""
    with FakeTensorMode():
        return make_fx(partial(_step, dropout))(torch.empty(1, 2, 4, 8, device="cuda"))


@pytest.mark.parametrize(("dropout", "replaced"), [(0.0, 2), (0.5, 0)])
def test_states_are_dropped_without_dropout_only(dropout: float, replaced: int) -> None:
    """Nothing reads the forward operator's states any more; with dropout nothing changes."""
    joint = _graph(dropout)
    drop_attention_states(joint)
    joint.graph.lint()
    empty = joint.graph.find_nodes(op="call_function", target=aten.empty.memory_format)
    assert len(empty) == replaced
    for node in empty:
        assert node.meta["val"].device.type == "cuda"
    drop_attention_states(joint)
    assert len(joint.graph.find_nodes(op="call_function", target=aten.empty.memory_format)) == replaced


def test_graphs_are_partitioned_afterwards() -> None:
    """With the options that AOTAutograd gives its partitioner."""
    seen: list[object] = []

    def partition(
        joint: torch.fx.GraphModule, inputs: object, **options: object
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        seen.extend((len(joint.graph.find_nodes(op="call_function", target=aten.empty.memory_format)), inputs, options))
        return joint, joint

    without_attention_states(_graph(0.0), [1], partition=partition, num_fwd_outputs=3)
    assert seen == [2, [1], {"num_fwd_outputs": 3}]
