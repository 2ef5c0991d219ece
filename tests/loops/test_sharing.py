"""Equal expressions become one."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import var
from torch_hybrid_backend.loops.ir import Buffer, Expr
from torch_hybrid_backend.loops.sharing import Sharing


def _relu(x: Buffer, factor: float) -> Expr:
    i = var("i", 8)
    return ops.mul(ops.call("max", x.at((i,)), ops.const(0.0, "float32")), ops.const(factor, "float32"))


def test_equal_parts_are_one_object() -> None:
    """Whole expressions and their parts; what differs in a constant, a buffer or the sign of a zero does not."""
    sharing, x = Sharing(), Buffer((8,), "float32")
    first = sharing.of(_relu(x, 2.0))
    assert sharing.of(_relu(x, 2.0)) is first
    assert sharing.of(_relu(x, 2.0).args[0]) is first.args[0]  # type: ignore[attr-defined]
    assert sharing.of(_relu(x, 3.0)) is not first
    assert sharing.of(_relu(x, 3.0)).args[0] is first.args[0]  # type: ignore[attr-defined]
    assert sharing.of(_relu(Buffer((8,), "float32"), 2.0)) is not first
    assert sharing.of(ops.const(0.0, "float32")) is not sharing.of(ops.const(-0.0, "float32"))


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="not an expression"):
        Sharing().of(Expr("float32"))
