"""torchvision's models written in Python, beside a torch that its wheel was not built for (the CPU build).

The wheel on PyPI links CUDA libraries; beside a CPU-only torch its operators do not load, and importing it fails. The models need two
of those operators, `nms` and `roi_align`: here they are written with torch's own. They are slow next to C++, and opaque to Dynamo as
the originals are.

    torchvision = import_torchvision()
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
)
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def import_torchvision() -> ModuleType:
    """The package, its operators loaded or replaced; looked for in the folder `torchvision` below `sys.prefix`, too.

    Raises ModuleNotFoundError where it is not installed.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    apart = str(Path(sys.prefix) / "torchvision")
    if apart not in sys.path:
        sys.path.append(apart)
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    _libraries.append(library)
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CPU")
    torchvision = importlib.import_module("torchvision")
    torch.library.register_fake("torchvision::roi_align", _roi_align_like, lib=library)
    # What asks whether the operators are there has copied the question when it was imported.
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        vars(sys.modules[name])["_has_ops"] = lambda: True
    return torchvision


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Greedy suppression. boxes: (n, 4) as x1, y1, x2, y2; scores: (n,).  Returns: int64 numbers of the boxes kept, best first."""
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order]
    low, high = boxes[:, None, :2].maximum(boxes[:, :2]), boxes[:, None, 2:].minimum(boxes[:, 2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    overlaps = (common / (areas[:, None] + areas - common) > iou_threshold).tolist()
    kept: list[int] = []
    for candidate, row in enumerate(overlaps):
        if not any(row[earlier] for earlier in kept):
            kept.append(candidate)
    return order[torch.tensor(kept, dtype=torch.int64)]


def roi_align(
    features: torch.Tensor,
    rois: torch.Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> torch.Tensor:
    """Bilinear samples of each box, averaged by bin. features: (n, c, h, w); rois: (k, 5) as image, x1, y1, x2, y2.

    Returns: (k, c, pooled_height, pooled_width). Raises ValueError for an adaptive number of samples (`sampling_ratio` <= 0).
    """
    if sampling_ratio <= 0:
        raise ValueError(
            f"sampling_ratio is {sampling_ratio}; only a fixed number of samples, at least 1, is written here"
        )
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    start, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = size.clamp(min=1)

    def axis(dimension: int, bins: int, extent: int) -> tuple[torch.Tensor, ...]:
        """Lower and upper neighbours of each sample, the upper one's share, and whether the sample lies inside."""
        count = bins * sampling_ratio
        places = (torch.arange(count, device=rois.device) + 0.5) / sampling_ratio
        at = start[:, dimension, None] + size[:, dimension, None] / bins * places
        inside = (at >= -1) & (at <= extent)
        at = at.clamp(0, extent - 1)
        low = at.floor().long()
        return low, (low + 1).clamp(max=extent - 1), at - low, inside

    left, right, to_right, in_x = axis(0, pooled_width, features.shape[3])
    top, bottom, to_bottom, in_y = axis(1, pooled_height, features.shape[2])
    image = rois[:, 0].long()[:, None, None]
    by_place = features.permute(0, 2, 3, 1)

    def sample(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return by_place[image, y[:, :, None], x[:, None, :]]

    a, b = to_right[:, None, :, None], to_bottom[:, :, None, None]
    upper = sample(top, left) * (1 - a) + sample(top, right) * a
    lower = sample(bottom, left) * (1 - a) + sample(bottom, right) * a
    values = (upper * (1 - b) + lower * b) * (in_y[:, :, None] & in_x[:, None, :])[..., None]
    bins = (rois.shape[0], pooled_height, sampling_ratio, pooled_width, sampling_ratio, features.shape[1])
    return values.view(bins).mean((2, 4)).permute(0, 3, 1, 2).contiguous()


def _roi_align_like(
    features: torch.Tensor,
    rois: torch.Tensor,
    _scale: float,
    pooled_height: int,
    pooled_width: int,
    _sampling_ratio: int,
    _aligned: bool,
) -> torch.Tensor:
    return features.new_empty((rois.shape[0], features.shape[1], pooled_height, pooled_width))
