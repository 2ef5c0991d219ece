"""The conditions under which the engine is there, and for which device."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.engines.triton.engine import TritonEngine
from torch_hybrid_backend.errors import HybridError


def test_the_cpu_is_served_where_it_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_INTERPRET alone is for the user's own kernels."""

    def served(config: Config) -> Collection[str]:
        engine = dict(session.ENGINES)["triton"](config, services(tmp_path))
        assert engine.name == "triton"
        return engine.devices if engine.available() else ()

    named = dataclasses.replace(Config(), engines=("triton",))
    on_gpus = {"cuda"} if torch.cuda.is_available() else ()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert served(named) == {"cpu"}
    assert served(Config()) == on_gpus
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert served(named) == on_gpus
    assert TritonEngine(named, services(tmp_path)).devices == {"cuda"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_said_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Users of CPUs need not know of it, under `strict` either; who names it is told."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(session, "_sessions", {})
    config = dataclasses.replace(Config(), strict=True, cache=False)
    assert "triton" not in [engine.name for engine in session.open_session(config).engines]
    assert not caplog.records
    with pytest.raises(HybridError, match="the engine triton cannot run here: there is no GPU"):
        session.open_session(dataclasses.replace(config, engines=("triton",)))
