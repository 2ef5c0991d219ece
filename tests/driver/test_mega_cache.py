"""Entries of the cache in PyTorch's portable form, between processes that share no folder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend.driver import mega_cache
from torch_hybrid_backend.driver.mega_cache import HybridCacheArtifact
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.torch_private import CacheArtifactManager

# Calls a model and says what had to be made for it. A second argument is a blob to load first, a third one to save.
_PROGRAM = """
import json, sys
import torch
{imports}
from torch import nn
loaded = torch.compiler.load_cache_artifacts(open(sys.argv[1], "rb").read()) if sys.argv[1] else None
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).eval()
x = torch.randn(16, 64)
told = {{"loaded": None if loaded is None else sorted(loaded.artifacts)}}
if {runs}:
    from torch_hybrid_backend.capture import aot
    from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
    compile, trace, compiled, traced = KernelCompiler.compile, aot.trace, [], []
    KernelCompiler.compile = lambda self, jobs, *rest: (compiled.extend(jobs), compile(self, jobs, *rest))[1]
    aot.trace = lambda *args, **kwargs: (traced.append(args), trace(*args, **kwargs))[1]
    fast = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    told.update(compiled=len(compiled), traced=len(traced))
if sys.argv[2]:
    open(sys.argv[2], "wb").write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps(told))
"""


def _run(cache: Path, load: str = "", save: str = "", *, imports: bool = True, runs: bool = True) -> dict[str, Any]:
    program = _PROGRAM.format(imports="import torch_hybrid_backend" if imports else "", runs=runs)
    environment = {**os.environ, "HYBRID_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", program, load, save],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**told, "warnings": done.stderr}


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of everything that a process compiled."""
    folder = tmp_path_factory.mktemp("saved")
    told = _run(folder / "cache", save=str(folder / "blob"))
    assert told["compiled"] > 0
    assert told["traced"] > 0
    return folder / "blob"


def test_a_process_that_loads_what_was_saved_compiles_nothing(blob: Path, tmp_path: Path) -> None:
    """Kernels, traced graphs and timings are used in a folder that was empty."""
    told = _run(tmp_path / "cache", load=str(blob))
    assert mega_cache.TYPE in told["loaded"]
    assert (told["compiled"], told["traced"]) == (0, 0)
    kinds = {usage.kind for usage in Store(tmp_path / "cache").usage()}
    assert kinds >= {"kernels", "captures", "graphs"}  # placements, where timings were certain enough
    assert "failed-builds" not in kinds


def test_a_process_that_did_not_import_the_package_loads_nothing(blob: Path, tmp_path: Path) -> None:
    """PyTorch warns and goes on, and nothing is written."""
    told = _run(tmp_path / "cache", load=str(blob), imports=False, runs=False)
    assert told["loaded"] is None
    assert "not registered" in told["warnings"]
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    mega_cache.register()
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(mega_cache, "_loaded", set())
    return Store(tmp_path / "cache")


def test_an_entry_of_the_cache_stays_and_the_last_that_was_loaded_counts(store: Store) -> None:
    """Nothing that this machine measured is replaced; timings that were taken twice before they were saved are the later ones."""
    store.put("times", "mine", b"1", ".json")
    for data in (b"2", b"3"):
        HybridCacheArtifact("times/mine/json", data).populate_cache()
        HybridCacheArtifact("times/other/json", data).populate_cache()
    assert (store.get("times", "mine"), store.get("times", "other")) == (b"1", b"3")


def test_large_entries_are_not_kept_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch holds what is recorded until the process ends. The store has them all the same."""
    monkeypatch.setattr(mega_cache, "_MOST_BYTES", 100)
    with CacheArtifactManager.with_fresh_cache():
        store.put("engines", "small", b"0" * 100)
        store.put("engines", "large", b"0" * 101)
        assert store.get("engines", "large") == b"0" * 101
        saved = CacheArtifactManager.serialize()
    assert saved is not None
    assert saved[1].artifacts[mega_cache.TYPE] == ["engines/small/bin"]


@pytest.mark.parametrize(
    "key", ["kernels", "kernels/../so", "../x/so", "kernels/key/so/x", "kernels/key/so~", "/etc/key/so"]
)
def test_a_key_that_names_no_entry_is_a_warning(
    key: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys never become paths unchecked."""
    with caplog.at_level(logging.WARNING):
        HybridCacheArtifact(key, b"data").populate_cache()
    assert "is not used" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_cache_that_is_switched_off_takes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CACHE", "0")
    HybridCacheArtifact("kernels/key/so", b"data").populate_cache()
    assert store.get("kernels", "key") is None
