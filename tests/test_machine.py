"""The machine as texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.machine import cpuinfo, fingerprint


def test_the_fingerprint_names_threads_and_versions() -> None:
    """Timings with another number of threads or another torch are other timings."""
    assert f"threads {torch.get_num_threads()}" in fingerprint(CPU)
    assert torch.__version__ in fingerprint(CPU)


def test_the_fingerprint_is_that_of_the_moment() -> None:
    """Threads or the precision of matrix products set anew make other timings."""
    before, threads = fingerprint(CPU), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert fingerprint(CPU) != before
    finally:
        torch.set_num_threads(threads)
    assert fingerprint(CPU) == before
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert fingerprint(CPU) != before
    finally:
        torch.set_float32_matmul_precision(precision)
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        assert fingerprint(CPU) != before


def test_cpuinfo_is_of_the_first_processor(tmp_path: Path) -> None:
    """Names in lower case; what later processors say is left out; a system without the file says so."""
    with pytest.raises(FileNotFoundError):
        cpuinfo(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nModel name\t: One: a\nrubbish\n\nprocessor : 1\nflags : x\n")
    assert cpuinfo(tmp_path) == {"processor": "0", "model name": "One: a"}
