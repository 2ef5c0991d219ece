"""Models beside shared caches: whoever comes second compiles nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Nursery
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
