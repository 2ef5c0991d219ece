"""Processes killed, files swapped and queues filled under load: every answer is right or an error, and none hangs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.conftest import Cluster, small_network
from torch_hybrid_backend.serve import deployment

triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
pytestmark = pytest.mark.full

# Seconds after which a request counts as hanging.
_HANGS_S = 30


class _Load:
    """Clients that ask one after the other. `answers`: "right", "wrong", "hung", or the status of an error."""

    def __init__(self, address: str, seeds: tuple[int, ...] = (0,), clients: int = 3) -> None:
        self.answers: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._address = address
        self._networks = [small_network(seed) for seed in seeds]
        self._clients = clients
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[_Load]:
        with ThreadPoolExecutor(self._clients) as threads:
            asking = [threads.submit(self._ask_on, number) for number in range(self._clients)]
            try:
                yield self
            finally:
                self._ended.set()
            for each in asking:
                each.result()

    def wait_for(self, count: int) -> None:
        """Wait for so many more right answers."""
        wanted, deadline = self.answers["right"] + count, time.monotonic() + 60
        while self.answers["right"] < wanted:
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.02)

    def _ask_on(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        client = triton.InferenceServerClient(self._address, connection_timeout=_HANGS_S, network_timeout=_HANGS_S)
        while not self._ended.is_set():
            x = torch.randn(1 + number % 2, 8, generator=generator)
            tensor = triton.InferInput("input", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x.numpy())
            start = time.perf_counter()
            try:
                got = client.infer("network", [tensor]).as_numpy("output0")
                right = any(np.allclose(got, network(x).detach().numpy(), atol=1e-5) for network in self._networks)
                told = "right" if right else "wrong"
            except Exception as error:  # its HTTP library has errors of its own for connections that end
                status = getattr(error, "status", None)
                told = str(status() if status is not None else type(error).__name__)
                time.sleep(0.05)  # as a client that tries again
            took = time.perf_counter() - start
            self.seconds.append(took)
            self.answers["hung" if took > _HANGS_S - 1 else told] += 1
        client.close()


def _pids(part: str) -> list[int]:
    """The processes of this cluster's actors whose names have a part."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    actors = [ray.get_actor(each["name"], each["namespace"]) for each in named if part in each["name"]]
    pids: list[int] = ray.get([actor.__ray_call__.remote(_own_pid) for actor in actors], timeout=30)
    return pids


def _own_pid(_: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize("part", ["SERVE_REPLICA::killed#", "SERVE_PROXY", "SERVE_CONTROLLER"])
def test_a_process_is_killed(cluster: Cluster, models: Path, part: str) -> None:
    """Only requests that were under way fail, and another process takes over."""
    address = cluster.run(deployment(models / "dynamic.hybrid", model="network", replicas=2), "killed")
    with _Load(address).running() as load:
        load.wait_for(50)
        killed = _pids(part)[0]
        os.kill(killed, signal.SIGKILL)
        load.wait_for(200)
        deadline = time.monotonic() + 60
        while killed in (pids := _pids_or_none(part)) or len(pids) < (2 if "REPLICA" in part else 1):
            assert time.monotonic() < deadline, pids
            time.sleep(0.2)
        load.wait_for(50)
    assert not load.answers["wrong"], load.answers
    assert not load.answers["hung"], load.answers
    cluster.delete("killed")


def _pids_or_none(part: str) -> list[int]:
    import ray

    try:
        return _pids(part)
    except (ray.exceptions.RayError, ValueError):
        return []  # it is being started


def test_swaps_under_load(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """No request fails while ten files come in turn, every other one bad."""
    for name in ("dynamic", "other"):
        shutil.copy(models / f"{name}.hybrid", tmp_path / f"{name}.hybrid")
    good = (tmp_path / "other.hybrid").read_bytes()
    damaged = [b"", b"none", good[:100], good[:-4096], good[:5000] + b"\xff" + good[5001:]]
    for number, content in enumerate(damaged):
        (tmp_path / f"bad{number}.hybrid").write_bytes(content)
    address = cluster.configure(tmp_path / "dynamic.hybrid", {"artifact": "dynamic.hybrid"}, "swapped")
    with _Load(address, seeds=(0, 1)).running() as load:
        for number in range(5):
            for artifact in (f"bad{number}.hybrid", "dynamic.hybrid" if number % 2 else "other.hybrid"):
                cluster.configure(tmp_path / "dynamic.hybrid", {"artifact": artifact}, "swapped")
                load.wait_for(20)
    assert set(load.answers) == {"right"}, load.answers
    cluster.delete("swapped")


def test_more_load_than_it_can_take(cluster: Cluster, models: Path) -> None:
    """Requests above the limit are refused, memory stays, and afterwards all are answered."""
    settings: dict[str, Any] = {"max_batch": 1, "batch_wait_ms": 0, "max_queue": 2, "max_ongoing_requests": 1}
    address = cluster.run(deployment(models / "dynamic.hybrid", model="network", **settings), "loaded")
    (pid,) = _pids("SERVE_REPLICA::loaded#")
    with _Load(address, clients=1).running() as load:
        load.wait_for(200)
    before = _resident_mib(pid)
    with _Load(address, clients=24).running() as load:
        time.sleep(20)
    assert set(load.answers) == {"right", "503"}, load.answers
    assert _resident_mib(pid) - before < 32
    with _Load(address, clients=1).running() as load:
        load.wait_for(50)
    assert set(load.answers) == {"right"}, load.answers
    cluster.delete("loaded")


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
