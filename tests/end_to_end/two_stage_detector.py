"""A two-stage detector in the manner of Faster R-CNN, small, its sizes dependent on data wherever the original's are.

Features -> objectness and offsets at every place -> the best boxes that are large enough, less those that overlap a better one
(how many is known only then) -> features sampled in each box -> class scores -> what scores high enough.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

STRIDE, BEST, SIDE = 8, 24, 4


def suppress(boxes: torch.Tensor, threshold: float) -> torch.Tensor:
    """Numbers of the boxes, best first, that overlap none kept before them by more than `threshold`. boxes: (n, 4) corners."""
    low, high = boxes[:, None, :2].maximum(boxes[:, :2]), boxes[:, None, 2:].minimum(boxes[:, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlaps = common / (areas[:, None] + areas - common + 1e-6) > threshold
    kept: list[int] = []
    for number in range(len(boxes)):
        if not any(bool(overlaps[number, earlier]) for earlier in kept):
            kept.append(number)
    return torch.tensor(kept, dtype=torch.int64)


class TwoStageDetector(nn.Module):
    """image: (1, 3, h, w) float32.  Returns: boxes (n, 4), scores (n,), labels (n,) int64, n dependent on the image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            layer
            for inside, outside in ((3, 16), (16, 24), (24, 32))
            for layer in (nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.ReLU())
        ]
        self.backbone = nn.Sequential(*layers)
        self.objectness = nn.Conv2d(32, 1, 1)
        self.offsets = nn.Conv2d(32, 4, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * SIDE * SIDE, 48), nn.ReLU(), nn.Linear(48, 5))
        nn.init.normal_(self.objectness.weight, std=2.0)
        nn.init.normal_(self.offsets.weight, std=0.3)
        nn.init.normal_(self.head[3].weight, std=1.0)

    def propose(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The feature map and the best boxes on it, best first: static sizes, but for how many boxes are large enough."""
        features = self.backbone(image)
        height, width = features.shape[2:]
        places = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1) * float(STRIDE) + STRIDE / 2
        offsets = self.offsets(features)[0].permute(1, 2, 0).reshape(-1, 4)
        centre, size = places + offsets[:, :2].tanh() * STRIDE, 12.0 * offsets[:, 2:].clamp(-2, 2).exp()
        limit = torch.tensor([width, height, width, height]) * float(STRIDE)
        boxes = torch.cat((centre - size / 2, centre + size / 2), 1).clamp(min=0).minimum(limit)
        best = self.objectness(features).flatten().topk(BEST).indices
        boxes = boxes[best]
        large = ((boxes[:, 2:] - boxes[:, :2]) > 5).all(1)
        return features, boxes[large]

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features, boxes = self.propose(image)
        boxes = boxes[suppress(boxes, 0.5)]
        steps = (torch.arange(SIDE) + 0.5) / SIDE
        at = boxes[:, None, :2] + (boxes[:, 2:] - boxes[:, :2])[:, None] * steps[None, :, None]  # (n, SIDE, 2)
        grid = torch.stack(
            (at[:, None, :, 0].expand(-1, SIDE, -1), at[:, :, None, 1].expand(-1, -1, SIDE)), -1
        )  # (n, SIDE, SIDE, 2)
        scale = torch.tensor([image.shape[3], image.shape[2]]) / 2.0
        inside = functional.grid_sample(
            features.expand(len(boxes), -1, -1, -1), grid / scale - 1, align_corners=False, padding_mode="border"
        )
        scores, labels = torch.softmax(self.head(inside), -1).max(-1)
        sure = scores > 0.3
        return boxes[sure], scores[sure], labels[sure]
