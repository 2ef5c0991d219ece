"""Statistics of normalisations of half precision: metadata says what the kernels return, other nodes see what they were traced for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.capture.fixes.norm_statistics import correct_statistics

aten = torch.ops.aten
Norm = Callable[..., tuple[torch.Tensor, ...]]


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.native_layer_norm(x, [4], w, b, 1e-5)


def _group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.native_group_norm(x, w, b, 3, 4, 1, 2, 1e-5)


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)


NORMS = [_layer_norm, _group_norm, _batch_norm]


def _values(dtype: torch.dtype, weights: torch.dtype) -> list[torch.Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [x, torch.ones(4, dtype=weights), torch.zeros(4, dtype=weights)]


def _graph(norm: Norm, values: list[torch.Tensor]) -> torch.fx.GraphModule:
    """Uses both statistics: one in arithmetic, one as a result."""

    def program(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, mean, deviation = norm(*given)
        return out, mean * 2, deviation

    return make_fx(program, tracing_mode="fake")(*values)


def _dtypes(values: object) -> list[torch.dtype]:
    return [value.dtype for value in values]  # type: ignore[attr-defined]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_metadata_is_what_the_kernels_return(norm: Norm, half: torch.dtype) -> None:
    """Each item says its true dtype where input and weights differ in dtype, and readers and outputs get what they were traced with."""
    values = _values(half, torch.float32)
    gm = _graph(norm, values)
    (node,) = (n for n in gm.graph.nodes if "norm" in str(n.target))
    (returned,) = gm.graph.output_node().args
    traced = _dtypes(result.meta["val"] for result in returned)
    correct_statistics(gm)
    gm.graph.lint()
    assert _dtypes(node.meta["val"]) == _dtypes(norm(*values))
    for item in (n for n in gm.graph.nodes if n.args[:1] == (node,)):
        assert item.meta["val"].dtype == node.meta["val"][item.args[1]].dtype
    results = gm(*values)
    assert _dtypes(results) == traced
    (returned,) = gm.graph.output_node().args
    assert _dtypes(result.meta["val"] for result in returned) == traced
    torch.testing.assert_close(results[0], norm(*values)[0], rtol=0, atol=0)
    torch.testing.assert_close(results[1].float(), norm(*values)[1].float() * 2, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float64,) * 2],
    ids=str,
)
def test_one_dtype_needs_nothing(norm: Norm, dtype: torch.dtype, weights: torch.dtype) -> None:
    """A graph whose input and weights agree is left as it is."""
    gm = _graph(norm, _values(dtype, weights))
    before = str(gm.graph), [n.meta.get("val") for n in gm.graph.nodes]
    correct_statistics(gm)
    assert str(gm.graph) == before[0]
    assert all(a is b for a, b in zip(before[1], [n.meta.get("val") for n in gm.graph.nodes], strict=True))


def test_unused_statistics_get_no_cast() -> None:
    """Nothing is added to the graph where nobody reads the statistics."""
    values = _values(torch.bfloat16, torch.float32)
    gm = make_fx(lambda *given: _layer_norm(*given)[0], tracing_mode="fake")(*values)
    operators = len(gm.graph.nodes)
    correct_statistics(gm)
    assert len(gm.graph.nodes) == operators
