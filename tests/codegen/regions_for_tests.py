"""A function as a region."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.partition.regions import partition_graph


def region_of(function: Callable[..., object], *inputs: torch.Tensor, changing: int = 1) -> Region:
    """The function as a region; all inputs but the first `changing` are constants."""
    (segment,) = partition_graph(trace(function, *inputs), [FakeEngine()], Config()).graph.segments
    named = [dataclasses.replace(i, is_constant=n >= changing) for n, i in enumerate(segment.region.inputs)]
    return dataclasses.replace(segment.region, inputs=tuple(named))
