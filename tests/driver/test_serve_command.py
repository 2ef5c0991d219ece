"""The command `hybrid serve`, as a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST
from tests.serve.conftest import free_port
from torch_hybrid_backend import cli
from torch_hybrid_backend.driver.export import export
from torch_hybrid_backend.driver.serve_command import set_safe_defaults
from torch_hybrid_backend.errors import unreachable

_COMMAND = (sys.executable, "-m", "torch_hybrid_backend.cli", "serve")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--replicas", "0"), "--replicas is '0'; it must be a number, at least 1, or a range such as 1..4"),
        (("--replicas", "3..2"), "--replicas is '3..2'"),
        (("--threads", "0"), "--threads is 0; it must be a whole number from 1 to"),
        (("--threads", "1000000"), "--threads is 1000000; it must be a whole number from 1 to "),
        (
            ("--replicas", "1..1000000"),
            "--replicas 1..1000000 with --threads 1 needs 1000000 threads; this machine has ",
        ),
        (("--port", "0"), "--port is 0"),
        ((), "there is no file"),
    ],
)
def test_wrong_arguments(given: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs the extra serve")
    assert cli.main(["serve", str(tmp_path / "none.hybrid"), *given]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("", (), "is a folder; name a file that `hybrid export` wrote"),
        ("one.hybrid", ("--host", "300.1.1.1"), "--host 300.1.1.1 cannot be served on"),
    ],
)
def test_what_cannot_be_served(
    name: str, given: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder, and an address of no machine."""
    pytest.importorskip("ray", reason="needs the extra serve")
    (tmp_path / "one.hybrid").touch()
    assert cli.main(["serve", str(tmp_path / name), *given]) == 1
    assert said in capsys.readouterr().err


def test_a_cluster_without_its_token_is_one_line() -> None:
    exceptions = pytest.importorskip("ray.exceptions", reason="needs the extra serve")
    error = unreachable("--address h:1", exceptions.AuthenticationError("No token was found. See a page."))
    told = str(error)
    assert told.startswith("--address h:1 is no Ray cluster that can be reached: No token was found")
    assert told.endswith("; set RAY_AUTH_TOKEN to the cluster's token")
    assert "\n" not in told


def test_settings_of_ray_are_safe() -> None:
    """A new Ray asks for a token, listens on loopback unless its metrics are read from elsewhere, and takes no more of /dev/shm than is
    there; what the user set stays."""
    loopback, store = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"
    chosen: dict[str, str] = {}
    set_safe_defaults(chosen, is_new=True)
    assert (chosen["RAY_AUTH_MODE"], chosen[loopback]) == ("token", "0")
    assert 75 * 2**20 <= int(chosen[store]) <= max(75 * 2**20, shutil.disk_usage("/dev/shm").total)
    read: dict[str, str] = {}
    set_safe_defaults(read, is_new=True, on_loopback=False)
    assert loopback not in read
    joined: dict[str, str] = {}
    set_safe_defaults(joined, is_new=False)
    assert {loopback, store, "RAY_AUTH_TOKEN"}.isdisjoint(joined)
    users = {loopback: "1", store: "100000000", "RAY_AUTH_MODE": "disabled"}
    kept = dict(users)
    set_safe_defaults(kept, is_new=True)
    assert users.items() <= kept.items()


@pytest.mark.full
def test_a_server_from_start_to_end(tmp_path: Path) -> None:
    """A server answers on loopback alone, tells no usage, has no dashboard, and ends within seconds of SIGTERM. A bad file is one line."""
    pytest.importorskip("ray", reason="needs the extra serve")
    export(nn.Linear(2, 2).eval(), (torch.zeros(1, 2),), tmp_path / "model.hybrid", options=FAST)
    port = free_port()
    unsafe = {name for name in os.environ if name.startswith("RAY_")}
    environment = {name: value for name, value in os.environ.items() if name not in unsafe}
    with subprocess.Popen(
        [*_COMMAND, str(tmp_path / "model.hybrid"), "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        said = server.stdout.readline()
        assert f"http://127.0.0.1:{port}/" in said
        body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}]}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/model/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.loads(answer.read())["outputs"][0]["shape"] == [1, 2]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    (tmp_path / "bad.hybrid").write_bytes(b"none")
    done = subprocess.run(
        [*_COMMAND, str(tmp_path / "bad.hybrid"), "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 1
    assert "bad.hybrid" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("hybrid: ")
