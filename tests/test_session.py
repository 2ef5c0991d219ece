"""Sessions: what graphs compiled under equal settings share, and what becomes of engines and caches that cannot be used."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from tests.partition.engines_for_tests import FakeEngine
from torch_hybrid_backend import session
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.session import Session, open_session
from torch_hybrid_backend.sources import sources_version
from torch_hybrid_backend.store import Store


@pytest.fixture(autouse=True)
def no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that other tests have left, and none for them."""
    monkeypatch.setattr(session, "_sessions", {})


def test_equal_settings_share_a_session(tmp_path: Path) -> None:
    """One for all graphs under equal settings; another cache is another session."""
    config = Config(cache_dir=tmp_path / "a")
    assert open_session(config) is open_session(dataclasses.replace(config, measure_budget_s=9.0))
    assert open_session(config) is not open_session(dataclasses.replace(config, cache_dir=tmp_path / "b"))


def test_strict_takes_no_session_that_lacks_something(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that cannot be used is a warning; under strict an error, also where a session without it is open."""
    (tmp_path / "file").write_text("")
    config = Config(cache_dir=tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        open_session(config)
    assert "cannot be made" in caplog.text
    with pytest.raises(HybridError, match="cannot be made"):
        open_session(dataclasses.replace(config, strict=True))


def test_engine_that_cannot_get_ready(caplog: pytest.LogCaptureFixture) -> None:
    """What a third party's `prepare` raises is one warning; the other engines get ready."""

    class Unready(FakeEngine):
        def prepare(self, operators: int) -> None:
            raise ValueError("no licence")

    class Ready(FakeEngine):
        operators = 0

        def prepare(self, operators: int) -> None:
            self.operators = operators

    ready = Ready("ready")
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        Session((Unready("unready"), ready), Store.temporary()).prepare(7)
    assert ready.operators == 7
    (record,) = caplog.records
    assert "unready" in record.message
    assert "no licence" in record.message


def test_timings_belong_to_the_engine_and_to_what_runs_its_kernels() -> None:
    """Timings are kept under the engine's own version and that of the runtime; those of an engine without a version are not kept."""

    class Versioned(FakeEngine):
        version = "7"

    versions = Session((Versioned("versioned"), FakeEngine("plain")), Store.temporary()).versions()
    assert versions == {"versioned": f"7 {sources_version(*session.TIMING_SOURCES)}"}
