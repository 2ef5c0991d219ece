"""The name of a record."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks import machine
from torch_hybrid_backend.bench import machine as told_by

_END = f"{os.cpu_count()}core-{torch.backends.cpu.get_cpu_capability().lower()}"


@pytest.mark.parametrize(
    ("name", "family", "model", "expected"),
    [
        ("AMD EPYC", "25", "17", "amd-epyc-25-17"),  # a virtual machine's name: of any generation
        ("AMD EPYC", "26", "2", "amd-epyc-26-2"),
        ("Intel(R) Xeon(R) Processor @ 2.40GHz", "6", "143", "intel-xeon-6-143"),
        ("AMD EPYC 9554 64-Core Processor", "25", "17", "amd-epyc-9554-64-core"),
    ],
)
def test_folders_of_two_generations_differ(
    name: str, family: str, model: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record would otherwise mix the rows of both: `benchmarks.run --again` replaces some and keeps others."""
    told = {"model name": name, "cpu family": family, "model": model}
    monkeypatch.setattr(told_by, "_cpu_info", lambda: told)
    assert machine.slug() == f"{expected}-{_END}"


def test_a_system_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The architecture names the folder there."""
    monkeypatch.setattr(told_by, "_cpu_info", dict)
    monkeypatch.setattr(told_by.platform, "machine", lambda: "riscv")
    assert machine.slug() == f"riscv-{_END}"
