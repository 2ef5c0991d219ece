"""Graphs for Model Explorer."""

from __future__ import annotations

import json

import pytest

from tests.report.plans_for_tests import EMPTY, graph_of_blocks, profiled
from torch_hybrid_backend.report import render_model_explorer


def test_every_operator_is_a_node_in_its_module() -> None:
    """Edges begin at nodes. Layers are modules with their classes, colours are engines, kernels are attributes."""
    first, second = json.loads(render_model_explorer([profiled(graph_of_blocks(2)), EMPTY]))
    assert (first["id"], second["id"]) == ("1 graph (inference, 8x8 float32)", "2 graph (training, backward)")
    nodes = {node["id"]: node for node in first["nodes"]}
    assert len(nodes) == len(first["nodes"]) == 2 * 4 + 2 + 2
    assert {edge["sourceNodeId"] for node in nodes.values() for edge in node["incomingEdges"]} <= nodes.keys()
    product = nodes["mm_1"]
    assert product["namespace"] == "layers/1/linear"
    assert [edge["sourceNodeId"] for edge in product["incomingEdges"]] == ["add_0", "t_1"]
    assert product["outputsMetadata"] == [{"id": "0", "attrs": [{"key": "tensor_shape", "value": "8x8 float32"}]}]
    facts = {fact["key"]: fact["value"] for fact in product["attrs"]}
    assert facts["engine"] == "tvm"
    assert facts["microseconds"] == "50.0 (measured)"
    assert facts["kernel"] == "matmul_relu_add"
    assert product["style"] != nodes["sort"]["style"]
    assert first["groupNodeAttributes"]["layers/1"] == {"class": "Block"}
    assert [edge["sourceNodeId"] for edge in nodes["(outputs)"]["incomingEdges"]] == ["getitem"]


def test_the_package_knows_every_field() -> None:
    """Model Explorer's own classes accept the JSON."""
    builder = pytest.importorskip("model_explorer.graph_builder", reason="needs ai-edge-model-explorer")
    (graph,) = json.loads(render_model_explorer([graph_of_blocks(2)]))
    assert isinstance(builder.Graph(**graph), builder.Graph)
    for node in graph["nodes"]:
        made = builder.GraphNode(**node)
        for edge in made.incomingEdges:
            builder.IncomingEdge(**edge)
        for item in made.outputsMetadata:
            builder.MetadataItem(item["id"], [builder.KeyValue(**fact) for fact in item["attrs"]])
