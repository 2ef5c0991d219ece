"""The ways of computing a kernel, in the order in which they are tried."""

from __future__ import annotations

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.variants import Variant, variants
from torch_hybrid_backend.loops.index import LoopVar, var
from torch_hybrid_backend.loops.ir import Buffer
from torch_hybrid_backend.loops.kernels import Argument, MapKernel, Store
from torch_hybrid_backend.loops.layout import contiguous
from torch_hybrid_backend.sizes.size import symbol

_OTHERS = [Variant("a", ()), Variant("b", (), is_preferred=True), Variant("c", ())]


def test_the_kernel_itself_comes_first() -> None:
    """Then the preferred one, then the others in their order."""
    kernel = scale_kernel()
    found = variants(kernel, _OTHERS)
    assert [variant.name for variant in found] == ["", "b", "a", "c"]
    assert found[0].kernels == (kernel,)
    assert found[0].is_exact
    assert [variant.name for variant in variants(kernel, [])] == [""]


def test_sizes_known_at_run_time_leave_no_choice() -> None:
    """Times of one call say little of those to come: what is preferred by estimate is all there is."""
    n = symbol("n")
    x, out = (Argument(Buffer((n,), "float32"), contiguous((n,))) for _ in range(2))
    kernel = MapKernel(
        (x,), (out,), (LoopVar("i", n),), (Store(out.buffer, (var("i", n),), x.buffer.at((var("i", n),))),)
    )
    assert [variant.name for variant in variants(kernel, _OTHERS)] == ["", "b"]
