"""The passes together, their order, and what happens when one misbehaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.passes.values import verify_values
from torch_hybrid_backend.errors import PassError
from torch_hybrid_backend.passes.pipeline import PASSES, PRECISION_PASSES, run_passes
from torch_hybrid_backend.passes.verify import verify

aten = torch.ops.aten


def test_every_position_has_a_reason():
    """The order is a literal, each place argued."""
    assert all(callable(graph_pass) and reason for graph_pass, _, reason in (*PASSES, *PRECISION_PASSES))


def test_passes_for_kernels_of_the_cpu_exist_for_the_cpu_alone():
    """The folder that a pass lies in says for which devices it is."""
    for graph_pass, devices, _ in PASSES:
        folder = graph_pass.__module__.split(".")[-2]
        assert (folder, devices) in {("canonical", frozenset()), ("cpu", frozenset({"cpu"}))}


MODELS = {
    "conv": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.AdaptiveAvgPool2d(1)),
        (2, 3, 8, 8),
    ),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)),
}


@pytest.mark.parametrize(
    ("name", "grad", "dynamic"),
    [("conv", False, False), ("transformer", False, True), ("attention", True, False), ("conv", True, True)],
)
def test_whole_pipeline(captured, name, grad, dynamic):
    """Inference and forward graphs, static and symbolic, keep their results and their metadata stays true."""
    model, shape = MODELS[name]
    x = torch.randn(shape)
    inputs = (x, x, x) if name == "attention" else (x,)
    subject = captured(model.eval(), *inputs, grad=grad, dynamic=dynamic)
    run_passes(subject.gm, subject.ctx)
    subject.apply()


def test_a_raising_pass_is_named(captured):
    """The error names the pass and those before it."""
    subject = captured(lambda x: x + 1, torch.randn(3))

    def fine(gm, ctx):
        return False

    def broken(gm, ctx):
        raise KeyError("oops")

    with pytest.raises(PassError, match=r"pass broken failed \(passes before it: fine\).*oops"):
        run_passes(subject.gm, subject.ctx, ((fine, frozenset(), "first"), (broken, frozenset(), "then")))


def _graph_of(subject):
    return subject.gm.graph, subject.gm.graph.output_node()


def lose_metadata(gm, ctx):
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        gm.graph.call_function(aten.sin.default, (output.args[0][0],))
    return True


def return_the_input(gm, ctx):
    (x,) = gm.graph.find_nodes(op="placeholder")
    gm.graph.output_node().args = ((x,),)
    return True


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lose_metadata, "no meta"),
        (return_the_input, "share memory"),
    ],
)
def test_illegal_graphs_are_refused(captured, bad, message):
    """The graph is verified after each pass, against what it was before the first: the pass that breaks it is named."""
    subject = captured(lambda x: x + 1, torch.randn(3))
    with pytest.raises(PassError, match=f"pass {bad.__name__} failed.*{message}"):
        run_passes(subject.gm, subject.ctx, ((bad, frozenset(), "bad"),))


def test_wrong_metadata_is_found(captured):
    """verify_values sees a node whose meta["val"] lies."""
    subject = captured(lambda x: (x + 1).sum(0), torch.randn(3, 2))
    add, total = (n for n in subject.gm.graph.nodes if n.op == "call_function")
    add.meta["val"] = total.meta["val"]
    verify(subject.gm, subject.contract)
    with pytest.raises(PassError, match=r"yields .*says"):
        verify_values(subject.gm)
