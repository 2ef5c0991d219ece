"""The rest of torch.compile's surface: export, explain, counters, reset, stances, disable, nesting, regional compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_hybrid_backend
from benchmarks.models import ZOO, tensors
from tests.end_to_end import models


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(model, backend="hybrid", **options)


def assert_same(model: Callable[..., Any], reference: Callable[..., Any], *inputs: Any) -> None:
    """Both give the same under no_grad, twice."""
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(tensors(model(*inputs)), tensors(reference(*inputs)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_exported_program(name: str) -> None:
    """The module of a program that torch.export made compiles and gives the model's values."""
    model, inputs = ZOO[name].build("small"), ZOO[name].inputs("small", batch=2)
    program = torch.export.export(model, inputs)
    assert_same(compiled(program.module()), model, *inputs)


def test_exported_program_of_dynamic_batch() -> None:
    """A program exported with a dynamic batch is right at every batch size it allows."""
    model = models.perceptron()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (models.rows(4),), dynamic_shapes=((batch, None),))
    fast = compiled(program.module())
    for count in (2, 5, 64):
        assert_same(fast, model, models.rows(count))


def test_exported_program_reloaded(tmp_path: Any) -> None:
    """So does a program that was saved and loaded, and one taken down to ATen operators."""
    model, x = models.convolutional(), models.images()
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    assert_same(compiled(program.module()), model, x)
    assert_same(compiled(program.run_decompositions().module()), model, x)


def test_dynamo_explain() -> None:
    """torch._dynamo.explain sees one graph and no break; its own backend leaves ours alone."""
    model, x = models.perceptron(), models.rows()
    with torch.no_grad():
        explanation = torch._dynamo.explain(compiled(model))(x)
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0
    assert_same(compiled(model), model, x)


def test_counters_and_recompilations() -> None:
    """torch's compile counter wraps the backend: one frame for equal calls, a second for another shape, none for a third."""
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(models.perceptron(), backend=counter)
    with torch.no_grad():
        for count, frames in ((6, 1), (6, 1), (7, 2), (9, 2)):  # from the second batch size on, the batch is symbolic
            assert fast(models.rows(count)).shape == (count, 9)
            assert counter.frame_count == frames
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_reset() -> None:
    """After torch.compiler.reset() the same compiled model compiles anew and is right."""
    model, x = models.perceptron(), models.rows()
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(model, backend=counter)
    assert_same(fast, model, x)
    torch.compiler.reset()
    assert_same(fast, model, x)
    assert counter.frame_count == 2


def test_stances() -> None:
    """force_eager runs the model's own code; fail_on_recompile and eager_on_recompile keep what is compiled."""
    model, x = models.perceptron(), models.rows()
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(model, backend=counter, dynamic=False)
    with torch.no_grad():
        expected = model(x)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(fast(x), expected, rtol=0, atol=0)
        assert counter.frame_count == 0
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(RuntimeError, match="recompile"):
                fast(models.rows(7))
        with torch.compiler.set_stance("eager_on_recompile"):
            other = models.rows(8)
            torch.testing.assert_close(fast(other), model(other), rtol=0, atol=0)
    assert counter.frame_count == 1


def test_stance_with_another_backend() -> None:
    """A stance may force the backend onto code compiled for another."""
    model, x = models.perceptron(), models.rows()
    with torch.compiler.set_stance("default", force_backend="hybrid"):
        assert_same(torch.compile(model, backend="eager"), model, x)


def test_disable() -> None:
    """A function under torch.compiler.disable runs as it is, between compiled parts."""
    ran: list[bool] = []

    @torch.compiler.disable
    def as_it_is(x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.compiler.is_compiling())
        return x.flip(0)

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(as_it_is(torch.sin(x) * 2)) + 1

    x = models.rows()
    assert_same(compiled(mixed), mixed, x)
    assert ran
    assert not any(ran)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "default"},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs", "options": None},
        {"options": {}},
        {"options": {"verify": "always", "strict": True}},
        {"options": {"engines": ["tvm"], "measure_budget_s": 0.01, "placement": "measure"}},
        {"fullgraph": True, "dynamic": True, "options": {"min_region_nodes": 3}},
    ],
    ids=str,
)
def test_modes_and_options(options: dict[str, Any]) -> None:
    """Every form in which torch.compile takes modes and options gives right answers."""
    assert_same(compiled(models.convolutional(), **options), models.convolutional(), models.images())


def test_mode_and_options_together() -> None:
    """torch itself refuses a mode beside options."""
    with pytest.raises(RuntimeError, match="mode"):
        compiled(models.perceptron(), mode="max-autotune", options={"verify": "off"})


def test_module_compile() -> None:
    """nn.Module.compile, in place, works as torch.compile does, state dict included."""
    model, reference = models.perceptron(), models.perceptron()
    model.compile(backend="hybrid")
    assert_same(model, reference, models.rows())
    assert model.state_dict().keys() == reference.state_dict().keys()


def test_compiled_model_inside_a_compiled_function() -> None:
    """A compiled model called by compiled code becomes part of its graph."""
    model = models.perceptron()
    inner = compiled(model)
    counter = CompileCounterWithBackend("hybrid")

    def outer(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(inner(torch.relu(x)), -1) * 2

    assert_same(
        torch.compile(outer, backend=counter), lambda x: torch.softmax(model(torch.relu(x)), -1) * 2, models.rows()
    )
    assert counter.frame_count == 1


def test_inductor_beside() -> None:
    """Code compiled by inductor and by hybrid runs in one process, in turn and one on the other's results."""
    model, x = models.perceptron(), models.rows()
    ours, theirs = compiled(model), torch.compile(lambda y: torch.softmax(y, -1) * 2 + 1, backend="inductor")
    with torch.no_grad():
        expected = torch.softmax(model(x), -1) * 2 + 1
        for _ in range(3):
            torch.testing.assert_close(theirs(ours(x)), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A residual block with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Equal blocks, one after the other; `repeated` marks them as a region that is traced once."""

    def __init__(self, repeated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.run = torch.compiler.nested_compile_region(lambda block, x: block(x)) if repeated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x) if self.run is not None else block(x)
        return x


def _train_step(run: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_blocks_compiled_one_by_one() -> None:
    """Regional compilation: equal blocks, each compiled by itself, share one compilation; each keeps its weights, in training too."""
    model, x = Stack(), torch.randn(5, 32)
    reference = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="hybrid", fullgraph=True)
    assert_same(model, reference, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(_train_step(model, model, x), _train_step(reference, reference, x), rtol=1e-3, atol=1e-5)


def test_nested_compile_region() -> None:
    """Blocks marked as one repeated region: right forward and backward, and in one piece: no call is left to eager."""
    model, reference, x = Stack(repeated=True), Stack(), torch.randn(5, 32)
    fast = compiled(model, fullgraph=True)
    assert_same(fast, reference, x)
    torch.testing.assert_close(_train_step(fast, model, x), _train_step(reference, reference, x), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, x).plans
    assert {node.engine for node in plan.nodes} == {"tvm"}
    assert len(plan.regions) == 1


def test_nested_compile_region_of_dynamic_sizes() -> None:
    """The same with a symbolic batch: one compilation serves every batch."""
    model, reference = Stack(repeated=True), Stack()
    fast = compiled(model)
    for count in (5, 2, 11):
        x = torch.randn(count, 32)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(fast, reference, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_autocast_and_inference_mode_around() -> None:
    """Compiled models under autocast and under inference_mode give what eager gives there."""
    model, x = models.perceptron(), models.rows()
    fast = compiled(model)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = fast(x), model(x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def test_vmap_and_grad_around() -> None:
    """functorch's transforms around and inside compiled code."""
    weight = torch.randn(40, 9)

    def loss(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.tanh(row @ weight).square().sum()

    per_row = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    torch.testing.assert_close(
        compiled(per_row)(weight, models.rows()), per_row(weight, models.rows()), rtol=1e-4, atol=1e-4
    )


def test_guards_may_be_left_out() -> None:
    """Without Dynamo's guards on modules, parameters are followed all the same (written to, loaded, moved, replaced), and inputs' shapes."""
    model, x = models.convolutional(), models.images()
    fast = compiled(model, options={"guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe})
    assert_same(fast, model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert_same(fast, model, x)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        assert_same(fast, model, x)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.25
        assert_same(fast, model, x)
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter * 0.75))
        assert_same(fast, model, x)
    assert_same(fast, model, torch.cat([x, x]))


def test_a_weight_of_another_shape_behind_left_out_guards_runs_in_eager() -> None:
    """A weight that guards would have noticed is refused before kernels read beyond a smaller weight's end."""
    model, x = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).eval(), torch.randn(4, 64)
    fast = compiled(model, options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe})
    assert_same(fast, model, x)
    model[0], model[2] = nn.Linear(64, 32), nn.Linear(32, 10)
    assert_same(fast, model, x)
