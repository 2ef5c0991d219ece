"""Models of the zoo as inference graphs for a GPU that does not exist, after the passes: what TensorRT takes and refuses.

Golden files show changes of capability, of passes or of torch_tensorrt by model.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator, Sequence

import pytest
import torch

from benchmarks.models import ZOO
from tests.conftest import Golden
from tests.engines.tensorrt.networks_for_tests import network_of
from tests.engines.tensorrt.regions_for_tests import GOLDEN_RELEASE, engine, has_golden_release
from tests.fake_devices import FakeDevices
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.prepared import prepare
from torch_hybrid_backend.graph.schema import is_view
from torch_hybrid_backend.partition.regions import Partition, partition_graph

pytestmark = pytest.mark.tensorrt

MODELS = (
    *("resnet50", "efficientnet_b0", "convnext_tiny", "regnet_y", "unet"),
    *("vit_b16", "swin_tiny", "segformer_b0", "bert_base", "gpt2", "llama_small"),
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SHOWN = 12  # operators that are refused in so many lines at most


def mains(name: str, dtype: torch.dtype, unknown: Sequence[int] = ()) -> list[torch.fx.GraphModule]:
    """The model's graphs before partitioning. `unknown`: dimensions of its inputs that are known only at run time."""
    try:
        model = ZOO[name].build("small").eval().to(dtype)
    except ImportError as error:
        pytest.skip(str(error))
    devices = FakeDevices()
    inputs = [devices.like(tensor, "cuda", dtype) for tensor in ZOO[name].inputs("small", 2)]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, list(unknown))
    found = devices.all_captured(devices.move(copy.deepcopy(model), "cuda"), *inputs)
    return [prepare(each, name, Config(), lambda title, body: lambda given: given).hoisted.main for each in found]


def partitions(name: str, dtype: torch.dtype, unknown: Sequence[int] = ()) -> list[Partition]:
    """Partitions of the model's graphs."""
    offered = engine()
    offered.devices = frozenset({"cuda"})
    return [partition_graph(main, [offered], Config()) for main in mains(name, dtype, unknown)]


def described(cut: Partition) -> Iterator[str]:
    """Lines for regions that are taken, and for operators that are refused."""
    views = {segment.region.name: _views(segment.region.graph_module) for segment in cut.graph.segments}
    for segment in cut.graph.segments:
        count = len(segment.region.node_names)
        shown = f"{count} operators, {views[segment.region.name]} of them views"
        yield f"{segment.region.name} {segment.engine_hint}: {shown}; {len(segment.inputs)} in, {len(segment.outputs)} out"
    refusals = collections.Counter(
        f"{node.operator}: {refusal.code}: {refusal.why}" for node in cut.nodes for refusal in node.refusals
    )
    for refusal, count in sorted(refusals.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]:
        yield f"  refused x{count}: {refusal}"


def _views(module: torch.fx.GraphModule) -> int:
    return sum(node.op == "call_function" and is_view(node) for node in module.graph.nodes)


@pytest.mark.parametrize("name", MODELS)
def test_regions_and_refusals(name: str, golden: Golden) -> None:
    """Partitions of models in float32, float16 and bfloat16 are those in the golden files."""
    if not has_golden_release():
        pytest.skip(f"golden files are of torch_tensorrt {GOLDEN_RELEASE}")
    lines = []
    for title, dtype in DTYPES.items():
        for number, cut in enumerate(partitions(name, dtype)):
            lines += [f"{title}, graph {number}", *described(cut)]
    golden.check("\n".join(lines))


@pytest.mark.parametrize("name", ["vit_b16", "bert_base", "gpt2", "llama_small", "segformer_b0"])
def test_transformers_are_one_engine(name: str) -> None:
    """In every release, attention, norms and products are taken, as are resizes and transformers' position masks in int64."""
    (cut,) = partitions(name, torch.bfloat16)
    assert [segment.engine_hint for segment in cut.graph.segments] == ["tensorrt"]
    assert not any(node.refusals for node in cut.nodes)


@pytest.mark.parametrize("unknown", [(1,), (0, 1)], ids=["length", "batch-and-length"])
@pytest.mark.parametrize("name", ["bert_base", "gpt2", "llama_small"])
def test_transformers_of_any_length_are_one_engine(name: str, unknown: tuple[int, ...]) -> None:
    """A transformer is one engine of all operators, for a range of lengths. Layer by layer, the network computes what the graph computes in
    eager: at the least length, at odd lengths, and at 1, which no call asks for. Only sizes are left, which the host computes. Batches have at
    most 16 samples here, by their example."""
    (cut,) = partitions(name, torch.float32, unknown)
    assert not [node.operator for node in cut.nodes if node.refusals and node.operator.startswith("aten")]
    (region,) = (segment.region for segment in cut.graph.segments if segment.engine_hint == "tensorrt")
    network = network_of(region)
    assert network.request.ranges
    for length in (1, 2, 5, 17, 24, 33):
        network.check({symbol: min(length, each.most) for symbol, each in network.request.ranges.items()})
