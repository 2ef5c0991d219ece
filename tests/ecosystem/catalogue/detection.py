"""ultralytics: the smallest published size of each family, from the library's own definitions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.ecosystem.case import Case
from tests.ecosystem.libraries import load


def _yolo(task: str, definition: str) -> Callable[[], nn.Module]:
    """The library's class for the task, made from its definition file."""

    def make() -> nn.Module:
        model: nn.Module = getattr(load("ultralytics.nn.tasks"), task)(definition, verbose=False)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model

    return make


def _case(name: str, task: str, definition: str, side: int = 320) -> Case:
    return Case(f"ultralytics/{name}", _yolo(task, definition), lambda: (torch.rand(1, 3, side, side),))


CASES = (
    _case("yolov5n", "DetectionModel", "yolov5n.yaml"),
    _case("yolov8n", "DetectionModel", "yolov8n.yaml"),
    _case("yolov9t", "DetectionModel", "yolov9t.yaml"),
    _case("yolov10n", "DetectionModel", "yolov10n.yaml"),
    _case("yolo11n", "DetectionModel", "yolo11n.yaml"),
    _case("yolo12n", "DetectionModel", "yolo12n.yaml"),
    _case("yolo11n_segment", "SegmentationModel", "yolo11n-seg.yaml"),
    _case("yolov8n_pose", "PoseModel", "yolov8n-pose.yaml"),
    _case("yolo11n_oriented", "OBBModel", "yolo11n-obb.yaml"),
    _case("yolov8n_classify", "ClassificationModel", "yolov8n-cls.yaml", 224),
    _case("rtdetr_l", "RTDETRDetectionModel", "rtdetr-l.yaml"),
)
