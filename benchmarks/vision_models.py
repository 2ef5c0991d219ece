"""Vision models that only benchmarks use: torchvision's own definitions, and two from elsewhere.

torchvision is imported when a model is built, from wherever it is installed or from the folder `torchvision` below `sys.prefix`
(`make .venv/torchvision`; see `benchmarks.torchvision_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models import Model, Size, from_transformers, images
from benchmarks.networks import Darknet53
from benchmarks.torchvision_cpu import import_torchvision
from benchmarks.weights import randomise


class Detector(nn.Module):
    """torchvision's Faster R-CNN behind a tensor of images of one size.

    x: (batch, 3, h, w) float32, from 0 to 1.  Returns: boxes (k, 4), scores (k,) and labels (k,) of all images, one after the other.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.detector(list(x.unbind()))
        return tuple(torch.cat([image[part] for image in found]) for part in ("boxes", "scores", "labels"))


def _torchvision(name: str, **settings: object) -> Callable[[Size], nn.Module]:
    """torchvision's function `name`. "small" has ten classes only: there are no smaller configurations."""

    def make(size: Size) -> nn.Module:
        models = import_torchvision().models
        model: nn.Module = getattr(models, name)(weights=None, num_classes=10 if size == "small" else 1000, **settings)
        return model

    return make


def _faster_rcnn(size: Size) -> nn.Module:
    """ResNet-50 with a feature pyramid; batch norms are not frozen, so that random weights give features of order one.

    Few proposals: `nms` and `roi_align` are written in Python here, and would otherwise be all that is measured.
    """
    import_torchvision()
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    side = _side(size)
    few = {"rpn_pre_nms_top_n_test": 100, "rpn_post_nms_top_n_test": 50, "box_detections_per_img": 10}
    backbone = resnet_fpn_backbone(
        backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    detector = FasterRCNN(backbone, num_classes=91, min_size=side, max_size=side, box_score_thresh=0.0, **few)
    built = Detector(detector)
    randomise(built, (torch.rand(2, 3, side, side),))
    with torch.no_grad():  # boxes near their anchors, as a trained detector has them
        for part in (detector.rpn.head.bbox_pred, detector.roi_heads.box_predictor.bbox_pred):
            part.weight *= 0.1
    return built


def _side(size: Size) -> int:
    return 128 if size == "small" else 320


def _pictures(size: Size, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.rand(batch, 3, _side(size), _side(size)),)


_RESNET101_SMALL = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 3, 1], "num_labels": 10}

_MODELS: tuple[Model, ...] = (
    Model(
        "resnet101",
        "ResNet-101",
        from_transformers(
            "ResNetForImageClassification",
            "ResNetConfig",
            _RESNET101_SMALL,
            {"depths": [3, 4, 23, 3], "num_labels": 1000},
        ),
        images(64, 224),
        tvm_flops=True,
    ),
    Model(
        "inception_v3",
        "Inception v3",
        _torchvision("inception_v3", aux_logits=False, transform_input=False, init_weights=False),
        images(160, 299),
        tvm_flops=True,
    ),
    Model("vgg19", "VGG-19", _torchvision("vgg19", init_weights=False), images(64, 224), tvm_flops=True),
    Model(
        "darknet53",
        "Darknet-53",
        lambda size: Darknet53((1, 1, 1), 8, 10) if size == "small" else Darknet53((1, 2, 8, 8, 4), 32, 1000),
        images(64, 256),
        tvm_flops=True,
    ),
    Model("densenet121", "DenseNet-121", _torchvision("densenet121"), images(64, 224), tvm_flops=True),
    Model(
        "mobilenet_v3_large", "MobileNetV3-large", _torchvision("mobilenet_v3_large"), images(128, 224), tvm_flops=True
    ),
    Model("shufflenet_v2", "ShuffleNetV2 x1.0", _torchvision("shufflenet_v2_x1_0"), images(128, 224), tvm_flops=True),
    Model("faster_rcnn", "Faster R-CNN", _faster_rcnn, _pictures, pretrained=True),
)

VISION: dict[str, Model] = {model.name: model for model in _MODELS}
