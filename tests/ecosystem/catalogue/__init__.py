"""The models, one file for each library or kind. A library is imported when a model is built."""

from __future__ import annotations

from tests.ecosystem.case import Case
from tests.ecosystem.catalogue import (
    detection,
    diffusion,
    graphs,
    images,
    language,
    recommender,
    recurrent,
    sentences,
)

_FILES = (diffusion, graphs, images, detection, language, sentences, recommender, recurrent)
CASES: dict[str, Case] = {case.name: case for file in _FILES for case in file.CASES}


def find(name: str) -> Case:
    """The case of that name; any model of timm has one. Raises KeyError where there is none."""
    library, _, model = name.partition("/")
    return images.case(model) if library == "timm" and name not in CASES else CASES[name]
