"""Lightning: a Trainer over a compiled module."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ecosystem.training import assert_trained_alike, batches, network, plain_loop

lightning = pytest.importorskip("pytorch_lightning")


class Classifier(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Cross entropy and SGD; `model` may be compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _trainer(folder: Path) -> Any:
    return lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "whole", [pytest.param(False, id="network"), pytest.param(True, id="module", marks=pytest.mark.full)]
)
def test_trainer(whole: bool, tmp_path: Path) -> None:
    """Training and validation, with the network compiled or the whole LightningModule, follow a plain loop in eager."""
    model = network()
    fast = functools.partial(torch.compile, backend="hybrid")
    module = fast(Classifier(model)) if whole else Classifier(fast(model))
    trainer = _trainer(tmp_path)
    trainer.fit(module, batches())
    assert_trained_alike(model, trainer.lightning_module.losses, plain_loop())
    (metrics,) = trainer.validate(module, batches(), verbose=False)
    assert metrics["accuracy"] > 0.34
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
