"""Differences of targets."""

from __future__ import annotations

from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target


def test_fingerprints_differ() -> None:
    """Kernels for one are not those for another, interpreted ones included."""
    targets = [
        Target(80, 108),
        Target(90, 132),
        Target(90, 78),
        Target(90, 132, True),
        Target(90, 132, convolution_tf32=True),
        Target(90, 132, is_interpreted=True),
    ]
    assert len({target.fingerprint for target in [*targets, INTERPRETER]}) == 7


def test_tiles() -> None:
    """Without a GPU they are large, and one program is enough."""
    assert INTERPRETER.has_large_tiles
    assert INTERPRETER.programs == 1
    assert not Target(90, 132, is_interpreted=True).has_large_tiles
    assert Target(90, 132).programs == 264
