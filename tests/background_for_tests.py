"""Engines that compile when they are told to, and models compiled with them alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, FakeRegion
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import CompiledRegion, PendingRegion
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.driver.session import Session, open_services
from torch_hybrid_backend.engines.eager import EagerEngine


class SlowEngine(FakeEngine):
    """Takes everything, and compiles as often as it was told it may; counts the calls of its regions."""

    def __init__(self, name: str = "slow") -> None:
        super().__init__(name)
        self.may = threading.Semaphore(0)
        self.compiling = 0
        self.calls = 0
        self.threads: set[str] = set()

    def version(self, device: Device) -> str:
        return "1"

    def compile(
        self, regions: Sequence[Region], deadline: Deadline
    ) -> Sequence[CompiledRegion | PendingRegion | Exception]:
        self.compiling += 1
        self.may.acquire()

        def counted(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.calls += 1
            self.threads.add(threading.current_thread().name)
            return outputs

        return [FakeRegion(region, counted) for region in regions]


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds, for at most a minute."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.002)


def compiled_with(
    engine: FakeEngine, model: Callable[..., Any], patch: pytest.MonkeyPatch, folder: Path, **options: object
) -> Callable[..., Any]:
    """The model compiled off the call, by one engine; which wins, as costs are estimated, unless `options` say otherwise."""
    config = Config(cache_dir=folder).with_options({"placement": "estimate", "background": True, **options}, None)
    session = Session((engine, EagerEngine()), open_services(config))
    patch.setattr(backend, "open_session", lambda _: session)
    compiled: Callable[..., Any] = torch.compile(
        model, backend=lambda gm, inputs: backend.compile_graph(gm, inputs, config)
    )
    return compiled
