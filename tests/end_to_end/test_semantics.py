"""Properties that compiled models must share with eager beyond values: live weights, mutation, aliasing, threads, dynamic sizes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.end_to_end import models
from torch_hybrid_backend.runtime import constants
from torch_hybrid_backend.runtime.native import ops
from torch_hybrid_backend.runtime.native.ops import Guard, GuardKind


def compiled(model: nn.Module | Callable[..., object], **kwargs: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="hybrid", **kwargs)  # type: ignore[call-overload,no-any-return]


def _step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(models.images()).square().mean().backward()
    optimizer.step()


def _double_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _load(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.load_state_dict(
        {name: torch.rand_like(t) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    )


def _replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


@pytest.mark.parametrize("change", [_step, _double_data, _load, _replace_data])
def test_weights_are_live(change: Callable[[nn.Module], None]) -> None:
    """Folded and packed weights follow the parameters: optimizer steps, `.data` writes, load_state_dict, replaced storage."""
    model = models.convolutional()
    fast = compiled(model)
    x = models.images()
    with torch.no_grad():
        before = fast(x)
        torch.testing.assert_close(before, model(x), rtol=1e-4, atol=1e-5)
    change(model)
    with torch.no_grad():
        after = fast(x)
        torch.testing.assert_close(after, model(x), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after)


class Head(nn.Module):
    """Layers whose weights are folded, packed or read in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(96, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.deep(self.stem(x)))


def _add_through_data(parameter: torch.Tensor, index: tuple[int, ...]) -> None:
    parameter.data[index] += 100


def _add_through_numpy(parameter: torch.Tensor, index: tuple[int, ...]) -> None:
    parameter.detach().numpy()[index] += 100


def _add_row_through_data(parameter: torch.Tensor, index: tuple[int, ...]) -> None:
    parameter.data[index[0]] += 10


@pytest.mark.parametrize("kernel_watches", [True, False])
@pytest.mark.parametrize("write", [_add_through_data, _add_through_numpy, _add_row_through_data])
def test_one_weight_is_live(
    write: Callable[[torch.Tensor, tuple[int, ...]], None], kernel_watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single weight written behind PyTorch's counters is seen by the next call; where the kernel cannot watch, after `refresh`."""
    if kernel_watches and not ops.watches_writes():
        pytest.skip("this kernel does not watch writes")
    if not kernel_watches:
        monkeypatch.setattr(constants, "Guard", lambda tensors: Guard(tensors, GuardKind.LIVE_UNWATCHED))
    torch.manual_seed(0)
    model = Head().eval()
    x = torch.randn(2, 3, 20, 20)
    fast = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        for name, parameter in model.named_parameters():
            index = tuple(int(torch.randint(size, ())) for size in parameter.shape)
            write(parameter, index)
            if not kernel_watches:
                torch_hybrid_backend.refresh(fast)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_instances_share_one_graph() -> None:
    """Two instances of one class keep their own weights, called in turn."""
    one, two = models.perceptron(), models.perceptron()
    nn.init.normal_(two[0].weight)
    fast_one, fast_two = compiled(one), compiled(two)
    x = models.rows()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast_one(x), one(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(fast_two(x), two(x), rtol=1e-4, atol=1e-5)


def test_training_step() -> None:
    """Gradients and batch-norm statistics equal eager's."""
    model = models.convolutional().train()
    reference = copy.deepcopy(model)
    fast = compiled(model)
    for module, run in ((model, fast), (reference, reference)):
        run(models.images(4)).square().mean().backward()
        assert module.norm.num_batches_tracked.item() == 1
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    torch.testing.assert_close(model.norm.running_var, reference.norm.running_var)


def test_masked_weights_are_no_denormals() -> None:
    """A mask of -100, as Swin has, leaves zeros where e^x is below the normal numbers: those slow a product down a hundredfold."""
    torch.manual_seed(0)
    scores = torch.randn(6, 49, 49)
    mask = torch.where(torch.rand(49, 49) > 0.5, 0.0, -100.0)
    mask[0] = -100.0

    def weights(scores: torch.Tensor) -> torch.Tensor:
        return (scores + mask).softmax(-1)

    fast = compiled(weights)
    fast(scores)
    got = fast(scores)
    assert not ((got > 0) & (got < torch.finfo(torch.float32).tiny)).any()
    torch.testing.assert_close(got.double(), (scores + mask).double().softmax(-1), rtol=2e-6, atol=1e-37)


def test_mutated_input() -> None:
    """An input written in place is written in place."""

    def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total.add_(torch.sin(x) * 2)
        return total * 3

    total, expected = torch.zeros(50), torch.zeros(50)
    x = torch.randn(50)
    torch.testing.assert_close(compiled(accumulate)(total, x), accumulate(expected, x))
    torch.testing.assert_close(total, expected)


def test_output_strides_and_aliases() -> None:
    """Outputs keep eager's strides; an output that is a view of an input is a view of that input."""

    def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (x * 2).permute(2, 0, 1), x[1:], (x + 1).contiguous(memory_format=torch.channels_last)

    x = torch.randn(4, 5, 6, 7)[:, :, :, 0].unsqueeze(0).expand(1, 4, 5, 6)[0].unsqueeze(1)
    x = torch.randn(4, 5, 6, 7)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (x * 2).permute(0, 2, 3, 1), x[1:], (x + 1).contiguous(memory_format=torch.channels_last)

    for ours, theirs in zip(compiled(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert compiled(fn)(x)[1].data_ptr() == x[1:].data_ptr()


def test_strided_inputs() -> None:
    """Transposed, sliced, expanded and offset inputs give eager's values."""
    base = torch.randn(9, 12, 10)

    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b) + c

    arguments = (base[1:5, :, 1:9:2], base.permute(0, 2, 1)[2:6, 1:9:2, :], base[0, 0, :1].expand(4, 12, 12))
    torch.testing.assert_close(compiled(fn)(*arguments), fn(*arguments), rtol=1e-4, atol=1e-4)


def test_lazily_negated_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """A view whose memory holds the negated values (the imaginary part of a conjugate) is refused, not read as it is."""
    view = models.rows().to(torch.complex64).mul(1j).conj().imag
    assert view.is_neg()
    fast = compiled(lambda x: x * 2 + 1)
    with torch.no_grad():
        for x in (models.rows(), view, view):
            torch.testing.assert_close(fast(x), x * 2 + 1)
    assert not caplog.records


def test_dynamic_sizes() -> None:
    """Symbolic sizes reach the backend without a crash, and every size gives eager's values."""
    model = models.perceptron()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for batch in (3, 1, 17, 2, 64):
            x = models.rows(batch)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_threads_share_a_model() -> None:
    """Eight threads that call one compiled model at once, from its first call on, all get eager's values."""
    model = models.convolutional()
    fast = compiled(model)
    x = [models.images() + i for i in range(8)]
    with torch.no_grad():
        expected = [model(each) for each in x]
    wrong: list[object] = []

    def call(i: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    torch.testing.assert_close(fast(x[i]), expected[i], rtol=1e-4, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not wrong


def test_graph_break() -> None:
    """A model that graph-breaks runs its pieces."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return torch.sigmoid(y) + 1

    x = torch.randn(33)
    torch.testing.assert_close(compiled(broken)(x), broken(x))


def test_an_operator_that_is_left_to_pytorch_runs_in_eager() -> None:
    """A library's operator runs in eager, between regions, with its reason in the plan."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.linalg.inv(x @ x.T + torch.eye(16)) @ x) * 2

    x = torch.randn(16, 16)
    torch.testing.assert_close(compiled(fn)(x), fn(x), rtol=1e-3, atol=1e-4)
    plan = torch_hybrid_backend.explain(fn, x).plans[0]
    refused = [node for node in plan.nodes if node.refusals]
    assert any("inv" in node.operator and node.refusals[0].code == "library" for node in refused)
    assert "test_semantics.py" in next(node.source for node in refused)


def test_explain_forms() -> None:
    """explain() prints regions and shares, and gives JSON that reads back to the same plan."""
    import json

    from torch_hybrid_backend.core.plan import Plan

    with torch.no_grad():
        explanation = torch_hybrid_backend.explain(models.convolutional(), models.images())
    (plan,) = explanation.plans
    assert [region.engine for region in plan.regions] == ["tvm"]
    assert "tvm" in str(explanation)
    assert "convolution" in str(explanation)
    assert Plan.from_json(json.dumps(json.loads(explanation.to_json())["plans"][0])) == plan
    assert "<html" in explanation.to_html()


@pytest.mark.parametrize("grad", [False, True])
def test_dropout_of_everything(grad: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Dropout with p = 1 is computed by kernels without a warning, and leaves the generator as it is, as in eager; its gradient is 0."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin(), 1.0, training=True).cos()

    x = torch.randn(8, 16, requires_grad=grad)
    state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        (plan, *_) = torch_hybrid_backend.explain(function, x).plans
        answer = torch.compile(function, backend="hybrid")(x)
    assert torch.equal(answer, torch.ones(8, 16))
    assert torch.equal(torch.get_rng_state(), state)
    assert {region.engine for region in plan.regions} == {"tvm"}
    assert not caplog.records
    if grad:
        answer.sum().backward()
        assert x.grad is not None
        assert not x.grad.any()
