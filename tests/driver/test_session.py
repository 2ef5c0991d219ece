"""Sessions: what graphs compiled under equal settings share, and what becomes of engines and caches that cannot be used."""

from __future__ import annotations

import dataclasses
import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from tests.partition.engines_for_tests import FakeEngine, trace
from tests.services_for_tests import services
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.engine import Engine
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.driver.session import Session, open_session
from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.services import Services
from torch_hybrid_backend.storage.sources import sources_version


@pytest.fixture(autouse=True)
def no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that other tests have left, and none for them."""
    monkeypatch.setattr(session, "_sessions", {})


def test_equal_settings_share_a_session(tmp_path: Path) -> None:
    """Graphs under equal settings share one session, however they were given; any other setting is another session: an engine may read each."""
    config = Config(cache_dir=tmp_path / "a")
    assert open_session(config) is open_session(dataclasses.replace(config, explicit=frozenset({"cache_dir"})))
    assert open_session(config) is not open_session(dataclasses.replace(config, measure_budget_s=9.0))
    assert open_session(config) is not open_session(dataclasses.replace(config, cache_dir=tmp_path / "b"))


def test_the_driver_s_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver's library is told where it is set; else the C++ runtime need not even be loaded."""
    told: list[str] = []
    monkeypatch.setattr(session, "use_cuda_driver", told.append)
    open_session(Config(cache_dir=tmp_path))
    assert not told
    open_session(Config(cache_dir=tmp_path, cuda_driver="/lib/another.so"))
    assert told == ["/lib/another.so"]


def test_strict_takes_no_session_that_lacks_something(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that cannot be used is a warning; under strict an error, also where a session without it is open."""
    (tmp_path / "file").write_text("")
    config = Config(cache_dir=tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        open_session(config)
    assert "cannot be made" in caplog.text
    with pytest.raises(HybridError, match="cannot be made"):
        open_session(dataclasses.replace(config, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these engines may run")
def test_engines_of_gpus_are_missed_only_where_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU nobody is warned of Triton or TensorRT, and strict sessions open; who names TensorRT is told why it is not there."""
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        found = open_session(Config(cache_dir=tmp_path, strict=True))
    assert not caplog.text
    assert {"triton", "tensorrt"}.isdisjoint(engine.name for engine in found.engines)
    named = Config(cache_dir=tmp_path, engines=("tensorrt", "eager"))
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        open_session(named)
    assert "the engine tensorrt cannot run here" in caplog.text
    with pytest.raises(HybridError, match="the engine tensorrt cannot run here"):
        open_session(dataclasses.replace(named, strict=True))


def test_engine_that_cannot_get_ready(caplog: pytest.LogCaptureFixture) -> None:
    """An error of a third party's `prepare` is one warning; the other engines get ready."""

    class Unready(FakeEngine):
        def prepare(self, operators: int) -> None:
            raise ValueError("no licence")

    class Ready(FakeEngine):
        operators = 0

        def prepare(self, operators: int) -> None:
            self.operators = operators

    ready = Ready("ready")
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        Session((Unready("unready"), ready), services()).prepare(7)
    assert ready.operators == 7
    (record,) = caplog.records
    assert "unready" in record.message
    assert "no licence" in record.message


def test_codebooks_are_kept_packed_where_an_engine_for_their_device_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Engines of other devices are not asked; an error of a third party's engine is one warning, and such weights are made ahead."""

    class Keeping(FakeEngine):
        def keeps_packed(self, weights: torch.fx.Node) -> bool:
            return True

    class Broken(FakeEngine):
        def keeps_packed(self, weights: torch.fx.Node) -> bool:
            raise ValueError("no licence")

    keeping, elsewhere = Keeping("keeping"), Keeping("elsewhere")
    elsewhere.devices = frozenset({"cuda"})
    graph = trace(lambda table, q: table.index_select(0, q), torch.rand(4), torch.zeros(8, dtype=torch.int64)).graph
    (weights,) = graph.find_nodes(op="call_function", target=torch.ops.aten.index_select.default)
    assert Session((keeping,), services()).keeps_packed(weights)
    assert not Session((FakeEngine("plain"), elsewhere), services()).keeps_packed(weights)
    with caplog.at_level(logging.WARNING, "torch_hybrid_backend"):
        assert not Session((Broken("broken"),), services()).keeps_packed(weights)
    assert "no licence" in caplog.text


def test_timings_belong_to_the_engine_and_to_what_runs_its_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """Timings are kept under the engine's own version and that of the runtime. They are not kept of an engine without a version, of one that
    cannot tell it (one warning), or on a device that it does not serve."""

    class Versioned(FakeEngine):
        def version(self, device: Device) -> str:
            return f"7 on {device}"

    class Broken(FakeEngine):
        def version(self, device: Device) -> str:
            raise ValueError("no driver")

    engines = [kind(name, devices=["cpu"]) for name, kind in (("versioned", Versioned), ("broken", Broken))]
    opened = Session((*engines, FakeEngine("plain")), services())
    assert opened.versions(CPU) == {"versioned": f"7 on cpu {sources_version(*session.TIMING_SOURCES)}"}
    (record,) = caplog.records
    assert "broken cannot tell its version" in record.message
    assert opened.versions(Device("cuda")) == {}


def _installed(folder: Path, monkeypatch: pytest.MonkeyPatch, factory: str) -> Engine:
    """The engine "stranger" as its package in `folder`, whose entry point names `factory`, brings it."""
    information = folder / "stranger-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[torch_hybrid_backend.engines]\nstranger = {__name__}:{factory}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    return session.engine_factories()["stranger"](Config(), services())


class Stranger(FakeEngine):
    """Keeps what it was given."""

    def __init__(self, config: Config, services: Services) -> None:
        super().__init__("stranger")
        self.given = config, services


def _one_argument(config: Config) -> Engine:
    raise AssertionError("it must be called with two")


def _with_a_bug(config: Config, services: Services) -> Engine:
    return _one_argument()  # type: ignore[call-arg]


def _misnamed(config: Config, services: Services) -> Engine:
    return FakeEngine("fremd")


def _no_engine(config: Config, services: Services) -> object:
    return EntryPoint(name="stranger", value="", group="")


def test_a_third_party_gets_what_ours_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factory that an entry point names is called with the settings and the services."""
    engine = _installed(tmp_path, monkeypatch, "Stranger")
    assert isinstance(engine, Stranger)
    config, given = engine.given
    assert config == Config()
    assert isinstance(given, Services)


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("_one_argument", "_one_argument must be a callable engine(config, services) that returns an Engine"),
        ("_with_a_bug", "TypeError: _one_argument() missing 1 required positional argument"),
        ("_misnamed", "_misnamed made an engine called 'fremd'; it must be called 'stranger'"),
        (
            "_no_engine",
            "type EntryPoint, which must be an Engine, and lacks devices, keep_ops, draws, keeps_deadline, available",
        ),
        ("_absent", "has no attribute '_absent'"),
    ],
)
def test_a_factory_of_the_wrong_form(factory: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cannot run here, and the reason says what the factory must be; what fails inside it is told as it is."""
    verdict = _installed(tmp_path, monkeypatch, factory).available()
    assert isinstance(verdict, Refused)
    assert why in verdict.why
