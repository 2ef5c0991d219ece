"""Scatters of many elements against eager, for kernels that combine in place."""

from __future__ import annotations

import math

import pytest
import torch

from loops.check import check, sample
from loops.interpret import trace
from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.loops.lowering import supports
from torch_hybrid_backend.loops.policy import Abilities

aten = torch.ops.aten
ANY, ORDERED = Abilities(scatters="any"), Abilities(scatters="ordered")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


def _positions(*shape: int, below: int) -> torch.Tensor:
    return sample(*shape, dtype=torch.int64, low=0, high=below - 1, seed=3)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_sums(dtype: torch.dtype) -> None:
    """Values that meet at one element add up, with one rounding for half types: slices, elements, several indices at once, flat positions."""
    x, source = sample(5, 4, dtype=dtype), sample(11, 4, dtype=dtype, seed=5)
    index = _positions(11, below=5)
    check(lambda a, i, s: aten.index_add.default(a, 0, i, s, alpha=2), x, index, source, abilities=ANY)
    check(
        lambda a, i, s: aten.index_add.default(a, -1, i[:9] % 4, s[:5, :1].expand(5, 9)),
        x,
        index,
        source,
        abilities=ANY,
    )
    wide = _positions(7, 3, below=5)
    check(lambda a, i, s: aten.scatter_add.default(a, 0, i, s), x, wide, source, abilities=ANY)
    check(lambda a, i, s: aten.scatter.reduce(a, 0, i, s, reduce="add"), x, wide, source, abilities=ANY)
    check(lambda a, i, s: aten.index_put.default(a, [i, i % 4 - 4], s[:, 0], True), x, index, source, abilities=ANY)
    check(lambda a, i, s: aten.put.default(a, i - 5, s[:, 0], True), x, index, source, abilities=ANY)


def test_sums_into_few_elements_need_no_atomics() -> None:
    """Few slices are asked for by each element, as for every other kernel: also of index_add."""
    check(
        lambda a, i, s: aten.index_add.default(a, 1, i, s, alpha=-1), sample(3, 5), _positions(2, below=5), sample(3, 2)
    )


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_reductions(dtype: torch.dtype, reduce: str, include_self: bool) -> None:
    """Elements that nothing meets stay as they are."""
    x, source, index = sample(6, 3, dtype=dtype), sample(9, 3, dtype=dtype, seed=5), _positions(9, 3, below=5)
    check(
        lambda a, i, s: aten.scatter_reduce.two(a, 0, i, s, reduce, include_self=include_self),
        x,
        index,
        source,
        abilities=ANY,
    )
    if reduce != "sum":
        check(
            lambda a, i, s: aten.index_reduce.default(a, 0, i[:, 0], s, reduce, include_self=include_self),
            x,
            index,
            source,
            abilities=ANY,
        )


def test_nan_wins() -> None:
    """In what is there before, and in what is written."""
    x, source, index = sample(6, 3), sample(9, 3, seed=5), _positions(9, 3, below=5)
    x[1], source[4], source[7] = math.nan, math.nan, -math.inf
    for reduce in ("amax", "amin"):
        check(lambda a, i, s: aten.scatter_reduce.two(a, 0, i, s, reduce), x, index, source, abilities=ANY)  # noqa: B023


def test_writes() -> None:
    """Writes are taken where no two meet. A mask takes one number."""
    x, source, index = sample(20, 3), sample(11, 3, seed=5), torch.randperm(20)[:11]
    check(lambda a, i, s: aten.index_put.default(a, [i], s), x, index, source, abilities=ANY)
    check(lambda a, i, s: aten.scatter.src(a, 0, i[:, None], s), x, index, source, abilities=ANY)
    check(lambda a, i: aten.scatter.value(a, 0, i[:, None], 7.0), x, index, abilities=ANY)
    check(lambda a, s: aten.index_put.default(a, [s > 0], s.new_full((), 2.0)), x[:11], source, abilities=ANY)


def test_gradient_of_an_embedding() -> None:
    """Rows read twice add up; what padding reads does not count."""
    grad, index = sample(4, 7, 3), _positions(4, 7, below=6)
    for padding in (-1, 2):
        check(lambda g, i: aten.embedding_dense_backward.default(g, i, 6, padding, False), grad, index, abilities=ANY)  # noqa: B023


def _verdict(call: torch.fx.GraphModule, abilities: Abilities) -> object:
    (node,) = call.graph.find_nodes(
        op="call_function", target=next(n.target for n in call.graph.nodes if n.op == "call_function")
    )
    return supports(node, abilities)


def test_what_depends_on_an_order_is_refused_where_torch_avoids_that() -> None:
    """Sums of floats, and writes of several values; not sums of integers, extremes, or one value everywhere."""
    x, whole, index = torch.zeros(9, 3), torch.zeros(9, 3, dtype=torch.int64), torch.zeros(8, 3, dtype=torch.int64)
    source = torch.zeros(8, 3)

    def refused(call: object, *inputs: torch.Tensor) -> bool:
        graph = trace(call, inputs)  # type: ignore[arg-type]
        verdict = _verdict(graph, ORDERED)
        assert _verdict(graph, ANY)
        assert not isinstance(verdict, Refused) or verdict.code is Reason.NONDETERMINISTIC
        return isinstance(verdict, Refused)

    assert refused(lambda a, i, s: aten.scatter_add.default(a, 0, i, s), x, index, source)
    assert refused(lambda a, i, s: aten.scatter.src(a, 0, i, s), x, index, source)
    assert not refused(lambda a, i, s: aten.scatter_add.default(a, 0, i, s), whole, index, index)
    assert not refused(lambda a, i, s: aten.scatter_reduce.two(a, 0, i, s, "amax"), x, index, source)
    assert not refused(lambda a, i: aten.scatter.value(a, 0, i, 1.0), x, index)


def test_what_no_kernel_combines_is_refused() -> None:
    """Products; and everything where kernels cannot combine in place."""
    x, index, source = torch.zeros(9, 3), torch.zeros(8, 3, dtype=torch.int64), torch.zeros(8, 3)
    product = trace(lambda a, i, s: aten.scatter_reduce.two(a, 0, i, s, "prod"), (x, index, source))
    assert not _verdict(product, ANY)
    assert not _verdict(trace(lambda a, i, s: aten.scatter_add.default(a, 0, i, s), (x, index, source)), Abilities())
