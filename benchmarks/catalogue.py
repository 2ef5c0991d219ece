"""All models that are timed: the zoo, which tests use as well, and the vision models, most of which need torchvision."""

from __future__ import annotations

from benchmarks.models import ZOO, Model
from benchmarks.vision_models import VISION

MODELS: dict[str, Model] = {**ZOO, **VISION}
