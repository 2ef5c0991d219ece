"""The choice of axes, and the way along them."""

from __future__ import annotations

from torch_hybrid_backend.engines.cpu.schedules.axes import fastest
from torch_hybrid_backend.loops.index import Index, LoopVar


def _offset(*terms: tuple[LoopVar, int]) -> Index:
    return Index(tuple(terms), 0)


def test_the_axis_of_the_large_accesses_is_the_vector_axis() -> None:
    """A batch norm's gradient reads two images once and five values per channel: it runs along the images, not the channels."""
    n, c, hw = LoopVar("n", 16), LoopVar("c", 64), LoopVar("hw", 1024)
    image, channel = _offset((n, 65536), (c, 1024), (hw, 1)), _offset((c, 1))
    assert fastest([image, image, *[channel] * 5], [n, c, hw]) is hw


def test_pixels_with_channels_last() -> None:
    """Channels that lie next to each other are the vector axis."""
    n, c, hw = LoopVar("n", 16), LoopVar("c", 64), LoopVar("hw", 1024)
    assert fastest([_offset((n, 65536), (c, 1), (hw, 64)), _offset((c, 1))], [n, c, hw]) is c


def test_no_axis() -> None:
    """A kernel has no vector axis where nothing runs through memory one by one."""
    n = LoopVar("n", 16)
    assert fastest([_offset((n, 2))], [n]) is None
