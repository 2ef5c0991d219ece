"""Work of kernels: which operators a kernel computes, and the operations and bytes that these need."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.partition.kernel_work import eager_work, kernel_work

aten = torch.ops.aten
FLOAT = 4


def _graph(function: object, *inputs: torch.Tensor) -> torch.fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph  # type: ignore[arg-type]


@pytest.fixture
def product() -> torch.fx.Graph:
    """relu(x @ w) + b, summed, of x (4, 8) and w (8, 16)."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return aten.sum.dim_IntList(aten.add.Tensor(aten.relu.default(aten.mm.default(x, w)), b), [1])

    return _graph(function, torch.ones(4, 8), torch.ones(8, 16), torch.ones(16))


def test_what_is_computed_inside_a_kernel_is_its_readers(product: torch.fx.Graph) -> None:
    """relu is computed where add is; nothing between them is read or written."""
    first, second = kernel_work(product, [{"mm", "add"}, {"sum_1"}])
    assert first.nodes == ("mm", "relu", "add")
    assert second.nodes == ("sum_1",)
    assert first.flops == 2 * 4 * 8 * 16
    assert second.flops == 0
    assert first.bytes == FLOAT * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert second.bytes == FLOAT * (4 * 16 + 4)
    assert first.precision == "float32"


def test_a_value_that_stays_inside_costs_no_bytes(product: torch.fx.Graph) -> None:
    """A kernel for everything reads the graph's inputs and writes its outputs."""
    (whole,) = kernel_work(product, [{"mm", "sum_1"}])
    assert whole.nodes == ("mm", "relu", "add", "sum_1")
    assert whole.bytes == FLOAT * (4 * 8 + 8 * 16 + 16 + 4)


def test_eager_reads_and_writes_memory_in_each_operator(product: torch.fx.Graph) -> None:
    """Eager's operators read and write memory where a kernel elsewhere would not; views cost nothing."""
    work = eager_work(product)
    x, w, b, y, total = 4 * 8, 8 * 16, 16, 4 * 16, 4
    assert work.bytes == FLOAT * ((x + w + y) + (y + y) + (y + b + y) + (y + total))
    assert work.nodes == ("mm", "relu", "add", "sum_1")
    assert work.flops == 2 * 4 * 8 * 16
    assert eager_work(_graph(lambda x: aten.view.default(x, [2, 4]), torch.ones(8))).bytes == 0


def test_a_view_that_a_kernel_is_for_is_a_copy() -> None:
    """A view that a kernel is for reads and writes what it shows."""
    graph = _graph(lambda x: aten.view.default(x, [2, 4]), torch.ones(8))
    (work,) = kernel_work(graph, [{"view"}])
    assert work.bytes == FLOAT * (8 + 8)


def test_what_several_kernels_compute_together_counts_once(product: torch.fx.Graph) -> None:
    """Two kernels that share a product share its operations."""
    parts = kernel_work(product, [{"mm"}, {"mm", "add"}, {"sum_1"}])
    assert sum(part.flops for part in parts) == 2 * 4 * 8 * 16


def test_a_view_counts_with_the_elements_that_it_shows() -> None:
    """A row of a large table is read, not the table; an expanded row counts once."""

    def function(table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return aten.mul.Tensor(aten.select.int(table, 0, 3), aten.select.int(aten.expand.default(row, [5, 8]), 0, 1))

    (work,) = kernel_work(_graph(function, torch.ones(1000, 8), torch.ones(1, 8)), [{"mul"}])
    assert work.bytes == FLOAT * (8 + 8 + 8)
    assert set(work.nodes) == {"select", "expand", "select_1", "mul"}


def test_of_several_results_those_that_are_read_are_written() -> None:
    """A normalisation's statistics, which nobody reads, cost nothing."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.native_layer_norm.default(x, [8], None, None, 1e-5)[0]

    (work,) = kernel_work(_graph(function, torch.ones(4, 8)), [{"native_layer_norm"}])
    assert work.bytes == FLOAT * 2 * 32
    assert work.nodes[:2] == ("native_layer_norm", "getitem")


def test_modules_and_line_are_those_of_the_operators(product: torch.fx.Graph) -> None:
    """Modules are named once each, in graph order; the line is that of the product."""
    for node in product.nodes:
        if node.name in ("mm", "relu", "add"):
            path = {"mm": "blocks.0.linear", "relu": "blocks.0.act", "add": "blocks.0.linear"}[node.name]
            node.meta["nn_module_stack"] = {"1": ("L['self']", None), "2@1": (f"L['self'].{path}", None)}
            node.meta["stack_trace"] = f'  File "/home/me/model.py", line {3 if node.name == "mm" else 4}, in forward\n'
    first, second = kernel_work(product, [{"mm", "add"}, {"sum_1"}])
    assert first.modules == ("blocks.0.linear", "blocks.0.act")
    assert first.source == "model.py:3 in forward"
    assert (second.modules, second.source) == ((), "")
