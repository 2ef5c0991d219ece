"""The values of a plan for the page."""

from __future__ import annotations

import dataclasses
import json

from tests.report.plans_for_tests import PLAN, graph_of_blocks, profiled
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.report.picture import picture
from torch_hybrid_backend.sizes.size import symbol


def test_operators_with_their_values() -> None:
    """Operators have names, shapes and bytes of their values. Parameters differ from inputs."""
    drawn = json.loads(json.dumps(picture(graph_of_blocks(2))))
    product = next(node for node in drawn["nodes"] if node["name"] == "mm_1")
    assert (product["in"], product["out"], product["bytes"]) == (["add_0", "t_1"], ["8x8 float32"], 256)
    assert (product["module"], product["work"], product["region"]) == ("layers.1.linear", "1.02 kFLOP", "r0")
    assert drawn["inputs"] == [{"name": "x", "out": ["8x8 float32"], "bytes": 256}]
    assert drawn["constants"] == {"weight_0": ["8x8 float32"], "weight_1": ["8x8 float32"]}
    assert drawn["called"] == {"x": "hidden_states"}
    assert drawn["outputs"] == ["getitem"]
    assert drawn["modules"][1] == ["layers.0", "Block", "layers"]
    assert drawn["timing"] == "estimated"


def test_inputs_that_nothing_reads_are_left_out() -> None:
    """Unused inputs are left out, such as sizes that no operator needs."""
    plan = graph_of_blocks(1)
    unread = dataclasses.replace(plan.inputs[0], name="s0")
    drawn = picture(dataclasses.replace(plan, inputs=(*plan.inputs, unread)))
    assert [given["name"] for given in drawn["inputs"]] == ["x"]


def test_refusals_and_regions_in_words() -> None:
    """Refusals and regions have the words of the text report."""
    drawn = picture(PLAN)
    assert drawn["nodes"][2]["refused"] == ["tvm: unknown_operator: aten.sort.default has no lowering"]
    assert drawn["regions"]["r2"]["refused"] == ["tvm: deadline: DeadlineError: it took over 300 s"]
    assert drawn["regions"]["r0"]["cost"] == "tvm 12.3 us, eager 31.5 us (measured)"


def test_sizes_known_only_at_run_time_have_their_names() -> None:
    """Symbolic sizes have names; bytes are those of the traced call."""
    spec = TensorSpec((symbol("s0", 32), 8), "bfloat16", (8, 1), CPU)
    node = dataclasses.replace(PLAN.nodes[0], outputs=(spec,))
    drawn = picture(dataclasses.replace(PLAN, nodes=(node,)))
    assert (drawn["nodes"][0]["out"], drawn["nodes"][0]["bytes"]) == (["s0x8 bfloat16"], 512)


def test_kernels_that_were_timed() -> None:
    """Each operator names the kernels that compute it."""
    drawn = picture(profiled(graph_of_blocks(2)))
    (number,) = next(node for node in drawn["nodes"] if node["name"] == "relu_1")["kernels"]
    assert drawn["kernels"][number] == {
        "name": "matmul_relu_add",
        "us": 50.0,
        "nodes": 4,
        "rate": "0.0 GFLOP/s, 0.0 GB/s",
    }
    assert drawn["timing"] == "measured"
    assert drawn["other_us"] == 20.0
