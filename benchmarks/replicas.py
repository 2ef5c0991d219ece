"""Replicas of a server: how soon a new one answers, its memory, how soon a killed one is replaced, and what a swap of the file costs requests.

    python -m benchmarks.replicas --models resnet50,bert_base,minilm --out build/replicas.json

Two clients ask all the while. Private memory is what a process shares with no other (Linux's smaps_rollup), less that of a replica of Serve
that imports torch and returns the body. Swaps are by `user_config`, to a copy of the file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import PORT, ROOT, Cluster, echo, exported, request_of

_APPLICATION = "measured"
_CLIENTS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each model, write the file and print a line after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="resnet50,bert_base,minilm")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="of load before the swap, and from the swap on")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "replicas.json")
    arguments = parser.parse_args(argv)
    from benchmarks import machine

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    with tempfile.TemporaryDirectory() as folder, Cluster(arguments.threads) as _:
        bare_mib = _bare_mib()
        for model in arguments.models.split(","):
            file = exported(model, arguments.size, arguments.batch, Path(folder))
            found = {"model": model, **_measured(file, arguments, bare_mib)}
            record["results"].append(found)
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
            print(json.dumps(found), flush=True)
    return 0


def _measured(file: Path, arguments: argparse.Namespace, bare_mib: float) -> dict[str, float]:
    from ray import serve

    _deploy(file, arguments, replicas=2, artifact=file.name)
    pids = _replicas(_APPLICATION)
    with _Clients(file) as clients:
        time.sleep(3)
        private_mib = [_private_mib(pid) - bare_mib for pid in pids]
        _deploy(file, arguments, replicas=1, artifact=file.name)
        clients.taken()
        time.sleep(arguments.seconds)
        before = clients.taken()
        swap = time.time()
        other = shutil.copy(file, file.with_stem(f"{file.stem}_other"))
        _deploy(file, arguments, replicas=1, artifact=Path(other).name)
        while not _maps(pids := _replicas(_APPLICATION), Path(other)) or _maps(pids, file):
            if time.time() > swap + 60:
                raise RuntimeError(f"{other} is not served")
            time.sleep(0.02)
        swapped_s = time.time() - swap
        time.sleep(max(0.0, arguments.seconds - swapped_s))
        amid = clients.taken()
        swap_failures = len(clients.failures)
        (pid,) = _replicas(_APPLICATION)
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # answers that are under way
        replaced = clients.next_answer()
        # Ray may have begun the process before the other was killed, to have one at hand.
        started_s = min(replaced - killed, time.time() - max(map(_began, _replicas(_APPLICATION))))
        kill_failures = clients.failures[swap_failures:]
    serve.delete(_APPLICATION)
    return {
        "start_s": started_s,
        "private_mib": max(private_mib),
        "p99_ms": before["p99_ms"],
        "p99_amid_swap_ms": amid["p99_ms"],
        "swap_s": swapped_s,
        "swap_failures": swap_failures,
        "replaced_s": replaced - killed,
        "kill_failures": len(kill_failures),
    }


def _deploy(file: Path, arguments: argparse.Namespace, replicas: int, artifact: str) -> None:
    """Deploy as a configuration file of Serve does, which changes replicas in place, and wait until it is done."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    model = {
        "name": "model",
        "user_config": {"artifact": artifact},
        "num_replicas": replicas,
        "health_check_period_s": 1,
    }
    application = {
        "name": _APPLICATION,
        "route_prefix": "/",
        "import_path": "torch_hybrid_backend.serve:application",
        "args": {"path": str(file), "model": file.stem, "max_batch": arguments.batch, "threads": arguments.threads},
        "deployments": [model],
    }
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))
    time.sleep(0.3)  # until the controller has taken it
    while (told := serve.status().applications[_APPLICATION]).status != "RUNNING":
        if told.status == "DEPLOY_FAILED":
            raise RuntimeError(str(told))
        time.sleep(0.05)
    while len(_replicas(_APPLICATION)) != replicas:
        time.sleep(0.05)


class _Clients:
    """Clients that ask one request after the other until the end, and whose connections outlive failures."""

    def __init__(self, file: Path) -> None:
        self._body, self._headers = request_of(file)
        self._path = f"/v2/models/{file.stem}/infer"
        self._times: list[float] = []
        self._last = 0.0
        self._is_over = False
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(_CLIENTS)]

    def __enter__(self) -> _Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def taken(self) -> dict[str, float]:
        """p50 and p99 in milliseconds of the answers since the last call."""
        from torch_hybrid_backend.serve.metrics import percentiles  # imports Ray, which reads its settings then

        times, self._times = self._times, []
        return percentiles(times)

    def next_answer(self) -> float:
        """The time of the next right answer, waited for."""
        last = self._last
        while self._last == last:
            time.sleep(0.005)
        return self._last

    def _ask(self) -> None:
        while not self._is_over:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
            try:
                while not self._is_over:
                    start = time.perf_counter()
                    connection.request("POST", self._path, self._body, self._headers)
                    answer = connection.getresponse()
                    text = answer.read()
                    if answer.status != 200:
                        raise http.client.HTTPException(f"{answer.status}: {text[:200]!r}")
                    self._last = time.perf_counter()
                    self._times.append(self._last - start)
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(str(error))
                time.sleep(0.02)


def _bare_mib() -> float:
    from ray import serve

    serve.run(echo(), name="echo", route_prefix="/echo")
    (pid,) = _replicas("echo")
    found = _private_mib(pid)
    serve.delete("echo")
    return found


def _replicas(application: str) -> list[int]:
    """The processes of an application's replicas, by their titles."""
    titles = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()}
    return [int(pid) for pid, title in titles.items() if title.startswith(f"ray::ServeReplica:{application}:".encode())]


def _maps(pids: Sequence[int], file: Path) -> bool:
    """True if a process has the file in its memory."""
    return any(f"{file}\n" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def _began(pid: int) -> float:
    """The time at which a process began, in seconds of `time.time`."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _private_mib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1024


if __name__ == "__main__":
    sys.exit(main())
