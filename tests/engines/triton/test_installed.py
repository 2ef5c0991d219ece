"""Messages about Triton where its engine is not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torch_hybrid_backend.engines.triton.installed import NO_GPU, described, version

_COMPILES = """
import sys, torch
torch.compile(torch.nn.ReLU(), backend="hybrid", options={"engines": "tvm,eager"})(torch.ones(2))
assert not [name for name in sys.modules if name.startswith("torch_hybrid_backend.engines.triton.b")]
"""


def test_what_doctor_prints() -> None:
    """The version, and each GPU or that there is none."""
    assert described()[1:] == (("GPU", "none"),)
    assert described(["cuda:0: sm_90", "cuda:1: sm_80"])[1:] == (("GPU", "cuda:0: sm_90"), ("GPU", "cuda:1: sm_80"))
    assert described()[0] == ("triton", version() or "not installed")
    assert "no GPU" in NO_GPU.why


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_engine_is_not_imported_where_it_cannot_serve() -> None:
    """Every process would wait for it."""
    subprocess.run([sys.executable, "-c", _COMPILES], check=True, timeout=120)
