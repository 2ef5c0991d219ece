"""Facts about the machine that a record holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_hybrid_backend.bench import machine


def test_what_figures_depend_on() -> None:
    """The description has processor, threads, instructions and versions. Absent packages are left out."""
    found = machine.describe()
    assert found["threads"] == torch.get_num_threads()
    assert found["cpu"]
    assert found["versions"] == machine.versions()
    assert machine.versions()["torch"] == torch.__version__
    assert "no-such-package" not in machine.versions(["no-such-package"])


def test_versions_in_a_folder_below_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Versions are also found in the folder of a clone's peers."""
    about = tmp_path / "peers" / "some_peer-1.5.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-peer\nVersion: 1.5\n")
    monkeypatch.setattr(machine.sys, "prefix", str(tmp_path))
    assert machine.versions(["some-peer"])["some-peer"] == "1.5"


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment are recorded, but not the cache's folder."""
    monkeypatch.setenv("HYBRID_VERIFY", "always")
    monkeypatch.setenv("HYBRID_CACHE_DIR", "/somewhere")
    found = machine.hybrid_settings()
    assert found["HYBRID_VERIFY"] == "always"
    assert "HYBRID_CACHE_DIR" not in found
