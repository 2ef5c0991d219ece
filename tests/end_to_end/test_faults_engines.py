"""Faults of a third party's engine, found through its real entry point. Each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Done, Nursery

fault = pytest.mark.fault

_ENGINE = """
import os, time
import torch
from torch_hybrid_backend.core.engine import CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.verdict import Supported

FAULT = os.environ["FAULT"]
if FAULT == "import":
    raise ImportError("libstranger is missing")

class Region(CompiledRegionBase):
    def __init__(self, graph_module):
        self.graph_module, self.calls = graph_module, 0

    def __call__(self, inputs):
        self.calls += 1
        if FAULT == "first run" or (FAULT == "later run" and self.calls > 1):
            raise ValueError("the stranger cannot run")
        outputs = [o.clone() for o in self.graph_module(*inputs)]
        return {
            "numbers": lambda: [o + 1 for o in outputs],
            "one number": lambda: [torch.where(torch.arange(o.numel()).view(o.shape) == 3, 9.0, o) for o in outputs],
            "nan": lambda: [o * float("nan") for o in outputs],
            "shape": lambda: [o[:1] for o in outputs],
            "dtype": lambda: [o.double() for o in outputs],
            "outputs": lambda: outputs[:-1],
            "none": lambda: None,
        }.get(FAULT, lambda: outputs)()

class Stranger(EngineBase):
    name = "stranger"

    def available(self):
        if FAULT == "available":
            raise OSError("no device")
        return Supported()

    def supports(self, node):
        if FAULT == "supports":
            raise ValueError("cannot say")
        return Supported()

    def compile(self, regions, deadline):
        if FAULT == "hangs":
            time.sleep(10_000)
        if FAULT == "compile":
            raise ValueError("the stranger cannot compile")
        if FAULT == "too few":
            return []
        return [Region(region.graph_module) for region in regions]

def make(config, services):
    if FAULT == "make":
        raise RuntimeError("the stranger cannot be made")
    return Stranger()

if FAULT == "old form":
    def make(config):
        return Stranger()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the installed package of an engine called "stranger"."""
    information = tmp_path / "packages" / "stranger-1.0.dist-info"
    information.mkdir(parents=True)
    (information.parent / "stranger.py").write_text(_ENGINE)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[torch_hybrid_backend.engines]\nstranger = stranger:make\n")
    return tmp_path


def run(nursery: Nursery, folder: Path, kind: str, calls: str = "check(6)", **settings: str) -> Done:
    script = f"sys.path.insert(0, {str(folder / 'packages')!r})\n{calls}"
    return nursery.run(script, folder, FAULT=kind, HYBRID_ENGINES="stranger", **settings)


def test_without_fault(nursery: Nursery, folder: Path) -> None:
    """The stranger is found, takes the region and runs it: what the faults are compared with."""
    done = run(nursery, folder, "")
    assert (done.answers, done.warnings, done.status) == (["stranger"], [], 0), done


@fault(
    "an engine hangs past HYBRID_COMPILE_DEADLINE_S in its own code",
    "one warning `deadline`; that region falls back to eager",
)
def test_hangs(nursery: Nursery, folder: Path) -> None:
    """Nobody waits for it: not the compilation, nor the end of the process."""
    done = run(nursery, folder, "hangs", HYBRID_COMPILE_DEADLINE_S="0.5")
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "deadline" in warning
    assert "stranger" in warning


@fault(
    "an engine returns wrong numbers, one wrong number, NaN, or outputs of another shape, dtype or count",
    "one warning `accuracy`; falls back to eager",
)
@pytest.mark.parametrize(
    "kind",
    ["one number", *(pytest.param(k, marks=pytest.mark.full) for k in ("numbers", "nan", "shape", "dtype", "outputs"))],
)
def test_wrong_outputs(kind: str, nursery: Nursery, folder: Path) -> None:
    """The gate catches them: the caller never sees them, not even in the first call."""
    done = run(nursery, folder, kind)
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert "accuracy" in warning


@fault(
    "an engine raises in its first call, in a later call or while it compiles, or returns something invalid",
    "one warning; that region falls back to eager",
)
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("later run", "runtime_error"),
        pytest.param("first run", "runtime_error", marks=pytest.mark.full),
        pytest.param("none", "runtime_error", marks=pytest.mark.full),
        pytest.param("compile", "compile_failed", marks=pytest.mark.full),
        pytest.param("too few", "compile_failed", marks=pytest.mark.full),
        pytest.param("supports", "", marks=pytest.mark.full),
    ],
)
def test_raises(kind: str, code: str, nursery: Nursery, folder: Path) -> None:
    """The answer is right, in the very call that failed too; every later call is eager's."""
    calls = """
x = torch.randn(6, 24)
fast, plans = compiled(model)
with torch.no_grad():
    for _ in range(4):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
say(plans[-1].regions[0].engine if plans[-1].regions else "eager")
"""
    done = run(nursery, folder, kind, calls)
    assert (done.answers, done.status) == (["eager"], 0), done
    (warning,) = done.warnings
    assert code in warning


@fault(
    "an engine's package cannot be imported, its constructor fails, or it fails when asked whether it can run",
    "one warning; the other engines work",
)
@pytest.mark.parametrize(
    "kind", ["import", "old form", *(pytest.param(k, marks=pytest.mark.full) for k in ("make", "available"))]
)
def test_does_not_load(kind: str, nursery: Nursery, folder: Path) -> None:
    """A broken package that somebody installed costs its own engine."""
    done = run(nursery, folder, kind)
    assert (done.answers in (["eager"], [""]), done.status) == (True, 0), done
    (warning,) = done.warnings
    assert "the engine stranger cannot run here" in warning


@pytest.mark.full
@fault("an engine fails, HYBRID_STRICT=1", "RegionError or HybridError that names the engine and the reason")
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("numbers", "accuracy"),
        pytest.param("first run", "cannot run", marks=pytest.mark.full),
        pytest.param("import", "libstranger is missing", marks=pytest.mark.full),
        pytest.param("hangs", "deadline", marks=pytest.mark.full),
    ],
)
def test_strict(kind: str, word: str, nursery: Nursery, folder: Path) -> None:
    """Under strict the fault reaches the caller instead."""
    done = run(nursery, folder, kind, HYBRID_STRICT="1", HYBRID_COMPILE_DEADLINE_S="0.5")
    assert done.status == 1
    assert word in done.err
    assert "stranger" in done.err
    assert not done.answers
