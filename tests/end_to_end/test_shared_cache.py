"""Models beside shared caches: whoever comes second compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.end_to_end.fault_processes import Nursery
from torch_hybrid_backend.artifact.manifest import Manifest
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.runtime.native.ops import Artifact
from torch_hybrid_backend.storage.shared import location_of, push
from torch_hybrid_backend.storage.store import Store

_COUNTED = """
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
compile, jobs = KernelCompiler.compile, []
KernelCompiler.compile = lambda self, more, *rest: (jobs.extend(more), compile(self, more, *rest))[1]
check(6)
check(7)
say(len(jobs))
"""


@pytest.fixture
def place(filled_cache: Path, tmp_path: Path) -> Path:
    """A shared cache with the entries of `filled_cache`."""
    push(Store(filled_cache), location_of(str(tmp_path / "place")))
    return tmp_path / "place"


def test_the_second_user_compiles_nothing(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """Kernels, traced graphs and timings come from the shared cache, into an empty local one."""
    done = nursery.run(_COUNTED, tmp_path, HYBRID_PLACEMENT="measure", HYBRID_CACHE_SHARED=str(place))
    assert (done.answers[-1], done.warnings, done.status) == ("0", [], 0), done
    alone = nursery.run(_COUNTED, tmp_path, HYBRID_PLACEMENT="measure")
    assert alone.answers == done.answers


def test_a_read_only_mount(nursery: Nursery, place: Path, tmp_path: Path) -> None:
    """No entry is written back, so the shared cache may be mounted read-only."""
    target = tmp_path / "mounted"
    target.mkdir()
    script = f"""
namespace(0)
system("mount", {os.fsencode(place)!r}, {os.fsencode(target)!r}, None, 0x1000, None)  # MS_BIND
system("mount", None, {os.fsencode(target)!r}, None, 0x1000 | 0x20 | 0x1, None)  # MS_REMOUNT | MS_RDONLY
{_COUNTED}
"""
    done = nursery.run(script, tmp_path, HYBRID_PLACEMENT="measure", HYBRID_CACHE_SHARED=str(target))
    assert (done.answers[-1], done.warnings, done.status) == ("0", [], 0), done


# Levels differ in the target alone: of what the wider one is made, golden kernels tell.
@pytest.mark.parametrize("level", ["x86-64-v3", pytest.param("x86-64-v4", marks=pytest.mark.full)])
def test_machines_of_one_level_share_kernels(level: str, nursery: Nursery, tmp_path: Path) -> None:
    """Another processor of that level compiles nothing, and takes times of its own. Kernels use no wider registers than the level has."""
    if not set(Target.named(level).features) <= set(Target.host().features):
        pytest.skip(f"this processor is below {level}")
    settings = {"HYBRID_PLACEMENT": "measure", "HYBRID_TARGET": level}
    done = nursery.run(_COUNTED, tmp_path, **settings)
    assert (int(done.answers[-1]) > 0, done.answers[0], done.warnings, done.status) == (True, "tvm", [], 0), done
    timed = len(Store(tmp_path / "cache").keys("placements"))
    disguise = """
import dataclasses
from torch_hybrid_backend import machine
from torch_hybrid_backend.artifact.manifest import Manifest
from torch_hybrid_backend.engines.cpu.target import Target
host = Target.host()
Target.host = staticmethod(lambda: dataclasses.replace(host, cpu="another", cores=64, l1_bytes=1 << 16, l2_bytes=1 << 22))
machine.processor = lambda: "another"
"""
    again = nursery.run(disguise + _COUNTED, tmp_path, **settings)
    assert (again.answers[-1], again.warnings, again.status) == ("0", [], 0), again
    store = Store(tmp_path / "cache")
    assert len(store.keys("placements")) > timed
    libraries = [store.path_of("kernels", key) for key in store.keys("kernels")]
    objdump = shutil.which("objdump")
    if objdump is not None:
        told = [
            subprocess.run([objdump, "-d", str(each)], capture_output=True, text=True, check=True) for each in libraries
        ]
        assert any("zmm" in each.stdout for each in told) == (level == "x86-64-v4")
        assert any("ymm" in each.stdout or "zmm" in each.stdout for each in told)


def test_a_file_for_a_level_runs_on_every_machine_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`export` takes the setting, and the file asks for the level's features alone."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    model, x = nn.Sequential(nn.Linear(24, 16), nn.GELU()).eval(), torch.randn(6, 24)
    path = tmp_path / "model.hybrid"
    torch_hybrid_backend.export(model, (x,), path, options={"target": "x86-64-v3"})
    (target,) = Manifest.from_json(Artifact(path, share=False).manifest).targets
    assert target.features == Target.named("x86-64-v3").features
    with torch.no_grad():
        torch.testing.assert_close(torch_hybrid_backend.load(path)(x), model(x), rtol=1e-4, atol=1e-5)
