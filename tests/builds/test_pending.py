"""A region whose bytes a build makes. tests/driver/test_pending_builds.py tests graphs with one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from torch_hybrid_backend.builds.builds import Builds
from torch_hybrid_backend.builds.pending import BuildingRegion
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, PendingRegion
from torch_hybrid_backend.errors import BuildCancelledError, CompileError
from torch_hybrid_backend.storage.store import Store


class _Loaded(CompiledRegionBase):
    program = None

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(inputs)


def test_a_region_is_loaded_once_when_it_is_built(tmp_path: Path) -> None:
    """The region is loaded from the build's bytes. An error of loading is raised by `result`."""
    store = Store(tmp_path)
    store.put("engines", "key", b"an engine")
    build = Builds(store, "engines").start("key", "no:builder", b"", 60)
    loads: list[bytes] = []

    def load(data: bytes) -> CompiledRegion:
        loads.append(data)
        return _Loaded(data)

    region = BuildingRegion(build, load)
    assert isinstance(region, PendingRegion)
    called = threading.Event()
    region.when_done(called.set)
    assert called.is_set()
    assert region.done
    assert region.result() is region.result()
    assert loads == [b"an engine"]

    def fails(data: bytes) -> CompiledRegion:
        raise CompileError("the bytes are no engine")

    with pytest.raises(CompileError, match="no engine"):
        BuildingRegion(build, fails).result()


def test_a_region_that_nobody_wants(tmp_path: Path) -> None:
    """Cancelling the region cancels its build."""
    builds = Builds(Store(tmp_path), "engines")
    build = builds.start("key", "time:sleep", b"", 60)
    region = BuildingRegion(build, _Loaded)
    region.cancel()
    with pytest.raises(BuildCancelledError):
        build.result(60)
    assert region.done
    builds.close()
