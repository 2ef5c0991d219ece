"""A cluster of two nodes, whose processes are killed under load: every answer is right or an error, and none hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serve.conftest import free_port, small_network
from tests.serve.load_for_tests import Load, pids
from torch_hybrid_backend.serve import deployment

pytestmark = pytest.mark.full
_CLIENTS = 4
_NODE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
# A part of the names of processes -> the most requests that may fail when one is killed: those that are in the replica, and in the proxy of a
# node. None: all proxies are killed, and connections are refused until there is another.
_PARTS = {"SERVE_REPLICA": _CLIENTS, "SERVE_PROXY": None, "SERVE_CONTROLLER": 0, "raylet": 2 * _CLIENTS}
# Seconds until another process answers at the latest. A replica takes five on a machine that has nothing else to do.
_REPLACED_S = 60


@dataclass(frozen=True)
class _Outcome:
    """Answers from the kill on."""

    answers: Counter[str]
    errors: int


@pytest.fixture(scope="module")
def outcomes(models: Path) -> dict[str, _Outcome]:
    """The outcome of each kill, from a process of its own: a process joins one cluster."""
    pytest.importorskip("ray", reason="needs the extra serve")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_kill_each, models / "dynamic.hybrid").result(timeout=900)


@pytest.mark.fault(
    "a replica, the proxies, the controller or the raylet of a node is killed (SIGKILL) while it serves",
    "requests that are in the process fail; no answer is wrong, none hangs, and another process takes over",
)
@pytest.mark.parametrize("part", _PARTS)
def test_a_process_is_killed(outcomes: dict[str, _Outcome], part: str) -> None:
    outcome, most_errors = outcomes[part], _PARTS[part]
    assert not outcome.answers["wrong"], outcome
    assert not outcome.answers["hung"], outcome
    assert most_errors is None or outcome.errors <= most_errors, outcome


def _kill_each(file: Path) -> dict[str, _Outcome]:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args=_NODE)
    try:
        worker = nodes.add_node(**_NODE)
        ray.init(nodes.address, log_to_driver=False)
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployment(file, model="network", replicas=2, max_replicas_per_node=1), route_prefix="/app")
        outcomes = {}
        for part, most_errors in _PARTS.items():
            if part == "raylet":
                killed, awaited = [worker.all_processes["raylet"][0].process.pid], "SERVE_REPLICA"
            else:
                killed, awaited = pids(part), part
            count = len(pids(awaited))
            if most_errors is not None:
                killed = killed[-1:]
            with Load(f"127.0.0.1:{port}/app", [small_network()], _CLIENTS).running() as load:
                load.wait_for(50)
                before = load.answers.copy(), load.errors
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                if part == "raylet":
                    load.wait_for(50)
                    nodes.remove_node(worker, allow_graceful=False)
                    worker = nodes.add_node(**_NODE)
                deadline = time.monotonic() + _REPLACED_S
                while len(set(pids(awaited)) - set(killed)) < count:
                    assert time.monotonic() < deadline, (part, count, pids(awaited))
                    time.sleep(0.1)
                load.wait_for(200)
            outcomes[part] = _Outcome(load.answers - before[0], load.errors - before[1])
        return outcomes
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
