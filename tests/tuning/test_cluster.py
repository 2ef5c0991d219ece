"""Tuning on a real cluster of two nodes on loopback: shared out, killed, resumed.

Both nodes are one host. In some tests the second one says that it is another.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import free_port
from tests.tuning.cluster_for_tests import FACTORY, processes, tuning
from tests.tuning.test_local import later, tuned
from torch_hybrid_backend.codegen.search import ALONE
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.tuning import cluster as cluster_module
from torch_hybrid_backend.tuning.local import Request

_ROOT = Path(__file__).parents[2]

# Python runs it when it starts: a process believes that it is on another host.
_ANOTHER_HOST = """
import torch_hybrid_backend.tuning.host_lock as lock
lock.host = lambda: "another"
lock.HostLock.__init__.__defaults__ = (lock._NAME + ".another",)
"""


# The same of a node without the package.
_NO_PACKAGE = """
import sys
sys.modules["torch_hybrid_backend"] = None
"""


class _Nodes:
    """A cluster; `cache`: that of its nodes. `second`: what Python runs when it starts on the second node."""

    def __init__(self, folder: Path, second: str) -> None:
        from ray.cluster_utils import Cluster

        self.cache = folder / "nodes"
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "sitecustomize.py").write_text(second)
        environment = {"HYBRID_CACHE_DIR": str(self.cache), "PYTHONPATH": str(_ROOT)}
        self._cluster = Cluster()
        given = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        self._cluster.add_node(**given, gcs_server_port=free_port(), env_vars=environment)
        if second:
            environment = {**environment, "PYTHONPATH": f"{elsewhere}:{_ROOT}"}
        self._cluster.add_node(**given, env_vars=environment)
        self.address = self._cluster.address

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module", autouse=True)
def token() -> None:
    """Ray reads them when its processes start."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., _Nodes]]:
    pytest.importorskip("ray", reason="needs the extra tune")
    pytest.importorskip("tvm")
    made: list[_Nodes] = []

    def make(second: str = "") -> _Nodes:
        made.append(_Nodes(tmp_path, second))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, error = process.communicate(timeout=500)
    assert process.returncode == 0, error
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _killed(title: str, nodes: _Nodes, process: subprocess.Popen[str]) -> int:
    """Kill the first process with a title, as soon as there is one."""
    while not (found := processes(title, nodes.cache)):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def _assert_equal(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> None:
    """Times of two processes meet by a ratio, which rounds. Those of operators alone are no variants': first calls take them, as they are."""

    def of_variants(times: dict[str, float]) -> dict[str, float]:
        return {name: us for name, us in times.items() if not name.endswith(ALONE)}

    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert of_variants(found[key]) == pytest.approx(of_variants(times))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"pip install 'torch-hybrid-backend\[tune\]'"):
        cluster_module.check_installed()


@pytest.mark.full
def test_two_runs_on_two_nodes_of_one_host(nodes: Callable[..., _Nodes], tmp_path: Path) -> None:
    """A single process at a time has the host for itself, though two commands tune at once, with one process each that times. Both find the
    same winners as tuning in one process, and a later process compiles nothing and times nothing."""
    there = nodes()
    runs = [tuning(there.address, tmp_path / name) for name in ("one", "two")]
    found = [_result(run) for run in runs]
    assert [each["hosts"] for each in found] == [1, 1]
    intervals = sorted((i["began"], i["ended"], i["worker"]) for each in found for i in each["intervals"])
    assert len(intervals) > 4
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))
    alone = tuned(tmp_path / "alone")
    for each in found:
        assert each["settled"]
        assert not each["notes"]
        assert each["left"] == 0
        assert each["entries"] == alone["entries"]
    winners = later(tmp_path / "one")
    assert not winners["new"]
    assert winners["variants"] == later(tmp_path / "alone")["variants"]


@pytest.mark.full
@pytest.mark.fault(
    "a process of `hybrid tune --ray` is killed",
    "another goes on: one round of timings is repeated, or one kernel compiled again; the summary says so",
)
def test_two_hosts_share_the_work_and_one_process_is_killed(nodes: Callable[..., _Nodes], tmp_path: Path) -> None:
    """Both time. Another process goes on where the killed one was, and what is found is the same."""
    there = nodes(_ANOTHER_HOST)
    run = tuning(there.address, tmp_path / "driver")
    _killed("TimingWorker.tune", there, run)
    found = _result(run)
    assert found["hosts"] == 2
    assert found["left"] == 0
    assert "its round is tried again" in found["notes"][0]
    assert len(found["notes"]) == 1
    for host in {interval["host"] for interval in found["intervals"]}:
        own = sorted((i["began"], i["ended"]) for i in found["intervals"] if i["host"] == host)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    alone = tuned(tmp_path / "alone")
    _assert_equal(found["entries"], alone["entries"])
    assert not later(tmp_path / "driver")["new"]


@pytest.mark.full
def test_a_process_that_compiles_is_killed_and_the_rest_is_resumed(
    nodes: Callable[..., _Nodes], tmp_path: Path
) -> None:
    """Ray starts the task anew: no kernel is missing. The budget ends the run; a second one goes on, and takes no time twice."""
    there = nodes()
    run = tuning(there.address, tmp_path / "driver", budget_s=25.0)
    _killed("compile_here", there, run)
    first = _result(run)
    assert not first["notes"]
    second = _result(tuning(there.address, tmp_path / "driver"))
    assert second["left"] == 0
    alone = tuned(tmp_path / "alone")
    _assert_equal(second["entries"], alone["entries"])
    for key, times in first["entries"].items():
        assert times.items() <= second["entries"][key].items()
    assert not later(tmp_path / "driver")["new"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"factory": FACTORY.replace(":make", ":broken")}, "FileNotFoundError: no weights here"),
        ({"factory": FACTORY.replace(":make", ":maek")}, "Did you mean 'make'?"),
        ({"factory": "no_such_module:make"}, "cannot import no_such_module"),
    ],
)
def test_factories_with_faults(nodes: Callable[..., _Nodes], tmp_path: Path, given: dict[str, Any], said: str) -> None:
    """The command says what the factory says, and where."""
    run = tuning(nodes().address, tmp_path / "driver", **given)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 1
    assert said in error.splitlines()[-1]


@pytest.mark.full
def test_no_machine_of_the_fingerprint(nodes: Callable[..., _Nodes], tmp_path: Path) -> None:
    """The error lists the fingerprints that are there, and the nodes that are left out, with the reason."""
    run = tuning(nodes(_NO_PACKAGE).address, tmp_path / "driver", 1e9, FACTORY, "no such processor")
    _, error = run.communicate(timeout=300)
    assert run.returncode == 1
    said = error.splitlines()[-1]
    assert "no node has the fingerprint 'no such processor'; --fingerprint takes one of those that are there" in said
    assert "|threads " in said
    assert "is left out: the package cannot be imported there" in said


def test_addresses_of_ray_client_are_refused() -> None:
    """The driver must be on a node: it keeps what it is told at once."""
    with pytest.raises(ArgumentError, match="run the command on a node of the cluster"):
        cluster_module.tune_on_cluster("ray://127.0.0.1:10001", Request("a:b", ".", Config()), Progress("tuning"))
