"""accelerate: its prepared model, optimizer and loader, compiled by its dynamo plugin or before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ecosystem.training import assert_trained_alike, batches, network, plain_loop

accelerate = pytest.importorskip("accelerate")


def _train(accelerator: Any, model: nn.Module, original: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(original.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is original
    return losses


def test_compiled_model_is_prepared() -> None:
    """A model compiled before `prepare` trains as a plain loop does in eager."""
    model = network()
    losses = _train(accelerate.Accelerator(cpu=True), torch.compile(model, backend="hybrid"), model)  # type: ignore[arg-type]
    assert_trained_alike(model, losses, plain_loop())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@pytest.mark.full
def test_gradient_accumulation() -> None:
    """Gradients accumulated over two batches of a compiled model give the weights that eager gives."""

    def train(backend: str | None) -> nn.Module:
        model = network()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        run = torch.compile(model, backend=backend) if backend else model
        run, optimizer, loader = accelerator.prepare(run, torch.optim.SGD(model.parameters(), lr=0.05), batches())
        for images, labels in loader:
            with accelerator.accumulate(run):
                accelerator.backward(nn.functional.cross_entropy(run(images), labels))
                optimizer.step()
                optimizer.zero_grad()
        return model

    ours, theirs = train("hybrid").state_dict(), train(None).state_dict()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
