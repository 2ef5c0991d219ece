"""Models made by a user's factory, as work for the peers."""

from __future__ import annotations

import inspect
import random
import sys
from dataclasses import dataclass

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import FunctionModule, Inputs
from torch_hybrid_backend.bench.worker import Work
from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.factory import Factory


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryModel(Work):
    """The model that `factory` returns.

    A batch size is passed to the factory if the factory has a parameter `batch`. Otherwise the inputs are repeated or cut along dimension 0.
    """

    factory: Factory

    @property
    def key(self) -> str:
        return f"{self.factory.target}-{self.batch}".replace("/", "_")

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model and its inputs. Raises ArgumentError if the factory, its inputs or the batch size cannot be used."""
        import numpy as np

        sys.path.insert(0, self.factory.folder)  # not undone: the model may import modules when it is called
        make = self.factory.load()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        takes_batch = "batch" in inspect.signature(make).parameters
        model, args, kwargs = make(batch=self.batch) if takes_batch and self.batch is not None else make()
        inputs = Inputs(tuple(args), kwargs)
        if self.batch is not None and not takes_batch:
            inputs = inputs.batched(self.batch)
        module = model if isinstance(model, nn.Module) else FunctionModule(model)
        made = (*module.parameters(), *module.buffers(), *inputs.tensors())
        if devices := {value.device.type for value in made} - {"cpu"}:
            raise ArgumentError(
                f"{self.factory.target} returned tensors on {', '.join(sorted(devices))}; hybrid bench measures on the CPU: return them there"
            )
        return module, inputs

    def calibration(self, inputs: Inputs) -> list[Inputs]:
        """The inputs themselves, as the factory returns no others."""
        return [inputs]
