"""All models that are timed: the zoo, which tests use as well, and the vision models, which need torchvision."""

from __future__ import annotations

from benchmarks.models import ZOO, Model

MODELS: dict[str, Model] = {**ZOO}
