"""Graphs run in PyTorch: every value has its traced strides, and what cannot run for its form is told from what is the user's fault."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from torch_hybrid_backend.errors import OperatorRefusedError
from torch_hybrid_backend.graph.eager_graph import EagerGraph, TracedRun, with_right_text, with_strides

aten = torch.ops.aten


def traced(function: Callable[..., Any], *inputs: torch.Tensor, symbolic: bool = False) -> torch.fx.GraphModule:
    """The function as an ATen graph with `meta["val"]`, its inputs' strides those of `inputs`."""
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)


def pixels(x: torch.Tensor) -> torch.Tensor:
    """An image made of (1, pixels, channels): `view` gives it another batch stride than its trace has."""
    _, count, channels = x.shape
    side = 4
    return aten.view.default(x.transpose(1, 2), [1, channels, side, count // side]) * 2.0


def _restrided(graph: EagerGraph) -> int:
    """The number of values that the graph's later runs give other strides."""
    assert graph._module is not None
    return sum(getattr(n.target, "__name__", "") == "with_traced_strides" for n in graph._module.graph.nodes)


def test_values_have_the_traced_strides_in_every_run() -> None:
    """The first run finds the view; later runs correct it alone, and what follows from it has the traced strides by itself."""
    x = torch.randn(1, 16, 8)
    assert pixels(x).stride() == (8, 1, 32, 8)
    graph = EagerGraph(traced(pixels, x))
    for _ in range(3):
        (y,) = graph([x])
        assert y.stride() == (128, 1, 32, 8)
        assert torch.equal(y, pixels(x))
    assert _restrided(graph) == 1


def test_a_graph_that_runs_as_traced_is_left_alone() -> None:
    """Its later runs are the code that fx made of it, nothing added."""
    module = traced(lambda x: (x.t() @ x).sin(), torch.randn(3, 4))
    graph = EagerGraph(module)
    for _ in range(2):
        graph([torch.randn(3, 4)])
    assert graph._module is module


def test_a_first_run_beside_another_threads_trace() -> None:
    """A run leaves alone what PyTorch records, for the whole process, of the graph that is being traced."""
    module = traced(lambda x: x.sin(), torch.randn(3))
    seen: list[object] = []
    [node] = (n for n in module.graph.nodes if n.target is aten.sin.default)

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(dict(torch.fx.traceback.current_meta))
        return x.sin()

    node.target = watched
    module.recompile()
    with torch.fx.traceback.preserve_node_meta():  # as AOTAutograd traces
        before = dict(torch.fx.traceback.current_meta)
        EagerGraph(module)([torch.randn(3)])
        assert torch.fx.traceback.current_meta == before
    assert seen == [before]


def test_strides_that_depend_on_sizes_known_at_run_time() -> None:
    """A graph serves all sizes: each call's strides are those of its own sizes."""
    graph = EagerGraph(traced(pixels, torch.randn(1, 16, 8), symbolic=True))
    for count, channels in ((16, 8), (24, 8), (40, 6)):
        x = torch.randn(1, count, channels)
        (y,) = graph([x])
        assert y.stride() == (count * channels, 1, count // 4 * channels, channels)
        assert torch.equal(y, pixels(x))
    assert _restrided(graph) == 1


@torch.library.custom_op("hybrid_tests::loose", mutates_args=())
def loose(x: torch.Tensor) -> torch.Tensor:
    """A copy with a stride of its own in the first dimension, of size 1."""
    return x.clone().as_strided(x.shape, (5, *x.stride()[1:]))


@loose.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_sizes_that_depend_on_data() -> None:
    """Symbols that no input tells are read from the value that brings them."""

    def function(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        chosen = x[keep.nonzero()[:, 0]]  # (u0, 8)
        return loose(chosen.unsqueeze(0))

    x, keep = torch.randn(6, 8), torch.tensor([1, 0, 1, 1, 0, 0])
    graph = EagerGraph(traced(function, x, keep, symbolic=True))
    for given in (keep, torch.ones(6, dtype=torch.int64), keep):
        (y,) = graph([x, given])
        assert torch.equal(y, function(x, given))
        assert y.stride() == (8 * int(given.sum()), 8, 1)


def test_strides_that_really_differ_are_copied() -> None:
    """An operator whose trace tells other strides than it gives: what follows was chosen for the traced ones."""

    @torch.library.custom_op("hybrid_tests::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().t()

    @turned.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        return turned(x).view(-1) * 2

    x = torch.randn(3, 4)
    graph = EagerGraph(traced(function, x))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        function(x)
    for _ in range(2):
        assert torch.equal(graph([x])[0], x.reshape(-1) * 2)


@pytest.mark.parametrize(
    ("shape", "strides", "wanted", "shares"),
    [
        ((1, 3), (3, 1), (77, 1), True),
        ((2, 3), (3, 1), (3, 1), True),
        ((2, 3), (3, 1), (1, 2), False),
        ((0, 3), (3, 1), (1, 9), True),
        ((2, 3), (3, 1), (0, 1), True),  # no copy can have them
    ],
)
def test_with_strides(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...], shares: bool) -> None:
    """The same values; the same memory where only dimensions of size 1 differ."""
    value = torch.randn(100).as_strided(shape, strides)
    result = with_strides(value, wanted)
    assert torch.equal(result, value)
    assert (result.data_ptr() == value.data_ptr()) == shares
    assert result.stride() == (strides if wanted[0] == 0 else wanted)


def test_with_strides_keeps_lazy_bits() -> None:
    """A conjugated view stays one, and so does a negated one, also where its strides are had by a copy."""
    z = torch.randn(3, 2, dtype=torch.complex64)
    for value in (z.mH, z.mH.imag):
        result = with_strides(value, (3, 1))
        assert torch.equal(result, value)
        assert (result.is_conj(), result.is_neg()) == (value.is_conj(), value.is_neg())


def test_a_bare_output_is_a_list_of_one() -> None:
    """A bare output is a list of one, as the condition of a loop returns it."""
    module = traced(lambda x: x + 1, torch.ones(2))
    (returned,) = module.graph.output_node().args
    assert not isinstance(returned, list | tuple)
    graph = EagerGraph(module)
    for _ in range(2):
        assert torch.equal(torch.stack(graph([torch.ones(2)])), torch.full((1, 2), 2.0))


# What cannot run


def test_an_operator_that_refuses_a_dtype_is_decomposed() -> None:
    """The trace takes integers, the kernel does not: every run computes it by its decomposition."""
    x = torch.arange(12).reshape(1, 1, 3, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.upsample_nearest2d.default(x + 1, [6, 8]) * 2

    with pytest.raises(NotImplementedError):
        function(x)
    graph = EagerGraph(traced(function, x))
    for _ in range(2):
        (y,) = graph([x])
        assert torch.equal(y, ((x + 1).repeat_interleave(2, 2).repeat_interleave(2, 3)) * 2)


@torch.library.custom_op("hybrid_tests::never", mutates_args=())
def never(x: torch.Tensor) -> torch.Tensor:
    """An operator that no kernel computes, and no decomposition either."""
    raise RuntimeError("this form is not taken")


@never.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_nothing_computes() -> None:
    """A call raises what the operator raises; `run` says that the values are not at fault."""
    graph = EagerGraph(traced(lambda x: never(x) + 1, torch.ones(2)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^this form is not taken$"):
            graph([torch.ones(2)])
        with pytest.raises(OperatorRefusedError, match="never") as caught:
            graph.run([torch.ones(2)])
        assert str(caught.value.error) == "this form is not taken"
        assert caught.value.is_mistake


def test_dtypes_that_do_not_go_together_are_a_mistake() -> None:
    """No decomposition stands in for an operator that has kernels, but not for these dtypes together: the call raises what it raises."""
    whole = torch.randint(3, (3, 4)).t()
    graph = EagerGraph(traced(lambda x, y: aten.mm.default(x, y) + 1, torch.randn(4, 4), whole))
    with pytest.raises(RuntimeError, match="same dtype"):
        graph([torch.randn(4, 4), whole])
    with pytest.raises(OperatorRefusedError) as caught:
        graph.run([torch.randn(4, 4), whole])
    assert caught.value.is_mistake


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda w, i: functional.embedding(i, w), (torch.randn(4, 3), torch.tensor([1, 9]))),
        (lambda w, i: functional.embedding(i, w), (torch.randn(4, 3), torch.tensor([1, -1]))),
        (lambda w, i: functional.nll_loss(w, i, reduction="sum"), (torch.randn(2, 3), torch.tensor([1, 7]))),
        (lambda w, i: torch.linalg.inv(w), (torch.ones(3, 3), torch.ones(1))),
        (lambda w, i: w.div(i, rounding_mode="floor"), (torch.tensor([1, 2]), torch.tensor([1, 0]))),
        (lambda w, i: aten._assert_async.msg(i.sum() > 9, "too small"), (torch.ones(1), torch.ones(1))),
        (lambda w, i: w.gather(0, i), (torch.randn(4), torch.tensor([1, 9]))),
    ],
)
def test_a_fault_of_the_values_reaches_the_user(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """An error of these values is raised as in eager, even where a decomposition would have made something of them."""
    with pytest.raises(Exception) as expected:  # noqa: PT011
        function(*inputs)
    module = traced(function, *(torch.zeros_like(value) for value in inputs))
    graph = EagerGraph(module)
    for run in (graph, graph.run):
        with pytest.raises(type(expected.value)) as found:
            run(list(inputs))
        assert type(found.value) is type(expected.value)
        assert str(found.value) == str(expected.value)


def test_a_run_of_some_nodes() -> None:
    """Folding of constants runs the nodes it needs, one by one."""
    module = traced(pixels, torch.randn(1, 16, 8))
    run = TracedRun(module)
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    run.env[placeholder] = torch.ones(1, 16, 8)
    for node in module.graph.nodes:
        if node.op == "call_function":
            run.env[node] = run.run_node(node)
            assert run.env[node].stride() == node.meta["val"].stride()


def test_numbers_that_torch_fx_misprints() -> None:
    """A power of a negative number has its sign, and a complex number with infinities is one, also for a method."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    power = graph.call_function(operator.pow, (-2, x))
    other = graph.call_function(operator.pow, (-3, power))
    product = graph.call_method("mul", (other, complex(math.inf, 1.0)))
    graph.output((power, product))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    right = with_right_text(module)
    power_value, product_value = right(torch.tensor([1.0, 2.0]))
    assert power_value.tolist() == [-2.0, 4.0]
    torch.testing.assert_close(
        product_value, (-3) ** torch.tensor([-2.0, 4.0]) * complex(math.inf, 1.0), equal_nan=True
    )
    assert with_right_text(right) is right
    assert [node.op for node in module.graph.nodes].count("call_method") == 1  # the graph given is as it was
