"""Detectors, whose sizes depend on what they see: right, their static parts on the engine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_hybrid_backend
from benchmarks.weights import randomise
from tests.end_to_end.two_stage_detector import TwoStageDetector

_ROOT = Path(__file__).resolve().parents[2]


def _images() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(1, 3, 64, 96, generator=generator) * scale for scale in (1.0, 3.0, 0.2)]


def _detector() -> TwoStageDetector:
    detector = TwoStageDetector()
    weights = {name: value.clone() for name, value in detector.state_dict().items() if "backbone" not in name}
    randomise(detector, (_images()[0],))  # for batch norms that are not the identity
    detector.load_state_dict(weights, strict=False)
    return detector.eval()


def test_two_stage_detector() -> None:
    """The detector finds as many boxes as eager, the same ones, for every image; backbone, heads and box arithmetic run on the engine."""
    detector = _detector()
    fast = torch.compile(detector, backend="hybrid")
    counts = set()
    with torch.no_grad():
        for image in _images() * 2:
            expected = detector(image)
            torch.testing.assert_close(fast(image), expected, rtol=1e-3, atol=1e-3)
            counts.add(len(expected[0]))
        torch._dynamo.reset()
        plans = torch_hybrid_backend.explain(detector, _images()[0]).plans
    assert len(counts) > 1  # else nothing depended on data
    assert 0 not in counts
    nodes = [node for plan in plans for node in plan.nodes]
    convolutions = {node.engine for node in nodes if node.operator == "aten.convolution.default"}
    assert convolutions == {"tvm"}
    flops = {engine: sum(node.flops for node in nodes if node.engine == engine) for engine in ("tvm", "eager")}
    assert flops["tvm"] > 0.9 * sum(flops.values())


@pytest.mark.full
def test_two_stage_detector_captured_whole() -> None:
    """The first stage, with its number of boxes an unbacked size, is one graph whose static part is compiled."""
    detector = _detector()
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(detector.propose, backend="hybrid", fullgraph=True)
        for image in _images():
            torch.testing.assert_close(fast(image), detector.propose(image), rtol=1e-3, atol=1e-3)


_MASK_RCNN = """
import functools, os, torch
from benchmarks.torchvision_cpu import import_torchvision
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config

import_torchvision()
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

torch.manual_seed(0)
few = dict(box_detections_per_img=6, rpn_pre_nms_top_n_test=60, rpn_post_nms_top_n_test=20)
backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=0)
model = MaskRCNN(backbone, num_classes=5, min_size=96, max_size=128, box_score_thresh=0.0, **few).eval()
for part in (model.rpn.head.cls_logits, model.roi_heads.box_predictor):  # scores of random weights lie too close to be ordered
    for parameter in part.parameters():
        parameter.data *= 20
plans = []
backend = functools.partial(compile_graph, config=Config.from_env(os.environ), on_plan=plans.append)
with torch.no_grad():
    fast = torch.compile(model, backend=backend)
    images = [torch.rand(3, 96, 120)]
    for _ in range(2):
        expected = model(images)
        assert all(len(found["boxes"]) for found in expected)
        torch.testing.assert_close(fast(images), expected, rtol=1e-3, atol=1e-3)
nodes = [node for plan in plans for node in plan.nodes]
static = [node for node in nodes if node.operator == "aten.convolution.default" and node.engine == "tvm"]
print(len(plans), "graphs;", len(static), "convolutions on tvm;", len(nodes), "operators")
assert len(static) >= 20
"""


@pytest.mark.full
def test_mask_rcnn(tmp_path: Path) -> None:
    """torchvision's Mask R-CNN: boxes, labels, scores and masks equal eager's; its backbone's convolutions run on the engine.

    In a process of its own, because transformers cannot be imported beside a torchvision built for another torch. `make test-full`
    keeps torchvision in a folder apart, .venv/torchvision.
    """
    beside = Path(sys.prefix) / "torchvision"
    if not beside.is_dir() and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision: make .venv/torchvision")
    (tmp_path / "mask_rcnn.py").write_text(_MASK_RCNN)
    done = subprocess.run(
        [sys.executable, "mask_rcnn.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{beside}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
