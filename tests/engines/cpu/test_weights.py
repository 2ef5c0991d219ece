"""Forms of weights: which arguments kernels read of them."""

from __future__ import annotations

import dataclasses

from torch_hybrid_backend.engines.cpu.weights import InPlace, Panels, Quantized
from torch_hybrid_backend.loops.ir import Buffer


def test_arguments_of_a_weight() -> None:
    """The packed one first, then what belongs to it, where there is any."""
    packed, start, scales, zeros, table = (Buffer((4,), "float32", name) for name in "abcde")
    panels = Panels(buffer=packed, width=4)
    assert panels.reads == InPlace(buffer=packed, offset=0, row_stride=4, k_stride=1).reads == [packed]
    assert dataclasses.replace(panels, start=start).reads == [packed, start]
    quantized = Quantized(buffer=packed, bits=4, scales=scales, group=8, width=4)
    assert quantized.reads == [packed, scales]
    assert dataclasses.replace(quantized, zeros=zeros, table=table).reads == [packed, scales, zeros, table]
