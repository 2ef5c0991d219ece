"""Replicas on a real cluster, asked by tritonclient."""

from __future__ import annotations

import http.client
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.conftest import Cluster, small_network
from torch_hybrid_backend.serve import deployment

triton = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")


@pytest.fixture(scope="module")
def address(cluster: Cluster, models: Path) -> Iterator[str]:
    """The address of a server of `dynamic`."""
    yield cluster.run(deployment(models / "dynamic.hybrid", max_body_mib=0.1, batch_wait_ms=1), "dynamic")
    cluster.delete("dynamic")


def _input(x: torch.Tensor, binary: bool) -> Any:
    tensor = triton.InferInput("input", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x.numpy(), binary_data=binary)
    return tensor


def _post(address: str, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    host, _, prefix = address.partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", f"/{prefix}{path}", body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_gets_what_eager_computes(address: str, binary: bool) -> None:
    """Answers as bytes and as JSON, for one row and for several, with the version that the metadata names."""
    client = triton.InferenceServerClient(address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("dynamic")
    told = client.get_model_metadata("dynamic")
    assert told["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 8]}]
    (version,) = told["versions"]
    asked = [triton.InferRequestedOutput("output0", binary_data=binary)]
    for rows in (1, 3, 16):
        x = torch.randn(rows, 8)
        answer = client.infer("dynamic", [_input(x, binary)], version, outputs=asked, request_id=f"r{rows}")
        assert answer.get_response()["id"] == f"r{rows}"
        torch.testing.assert_close(torch.tensor(answer.as_numpy("output0")), small_network()(x).detach())
    client.close()


def test_requests_at_once_get_their_own_answers(address: str) -> None:
    """Joined requests of different numbers of rows, one of them wrong: each gets its own answer, and only the wrong one an error."""
    network = small_network()

    def ask(seed: int) -> bool:
        client = triton.InferenceServerClient(address)
        x = torch.randn(1 + seed % 3, 8, generator=torch.Generator().manual_seed(seed))
        if seed % 7 == 3:
            with pytest.raises(triton.InferenceServerException, match=r"FP32 \[1, 5\]; expected FP32 \[-1, 8\]"):
                client.infer("dynamic", [_input(x[:1, :5].contiguous(), True)])
            return True
        got = client.infer("dynamic", [_input(x, True)]).as_numpy("output0")
        client.close()
        return bool(np.allclose(got, network(x).detach().numpy(), atol=1e-5))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(64)))


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v2/models/other/infer", b"{}", 404, "there is no model 'other'; this server has 'dynamic'"),
        ("/v2/models/dynamic/versions/1/infer", b"{}", 404, "no version '1'"),
        ("/v2/nothing", b"", 404, "Not Found"),
        ("/v2/models/dynamic/infer", b"{", 400, "the body is no JSON"),
        ("/v2/models/dynamic/infer", b'{"inputs": []}', 400, "the input 'input' is missing"),
        ("/v2/models/dynamic/infer", b"0" * 200_000, 413, "takes at most 104857"),
    ],
)
def test_wrong_requests(address: str, path: str, body: bytes, status: int, said: str) -> None:
    got, answer = _post(address, path, body)
    assert (got, said in answer["error"]) == (status, True), answer


def test_a_file_that_cannot_be_served_is_named_in_the_status(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """A file that nobody signed where keys are set fails the deployment. tests/serve/test_rollouts.py has the other bad files."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from ray import serve

    public = Ed25519PrivateKey.generate().public_key()
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(pem)
    with pytest.raises(RuntimeError, match="failed"):
        cluster.run(deployment(models / "dynamic.hybrid", keys=[tmp_path / "key.pem"]), "unsigned")
    told = serve.status().applications["unsigned"].deployments["model"]
    assert (told.status, "is signed by nobody" in told.message) == ("DEPLOY_FAILED", True), told.message
    cluster.delete("unsigned")


@pytest.mark.full
def test_the_command_deploys_to_a_cluster_that_is_there(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """`hybrid serve --address` returns, and what it deployed goes on, also where the same command with a bad file fails."""
    ray: Any = importlib.import_module("ray")
    (tmp_path / "bad.hybrid").write_bytes(b"none")

    def command(file: Path) -> tuple[int, str]:
        words = [sys.executable, "-m", "torch_hybrid_backend.cli", "serve", str(file), "--name", "network"]
        words += ["--address", ray.get_runtime_context().gcs_address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr

    status, said = command(models / "dynamic.hybrid")
    assert status == 0, said
    assert _served(f"127.0.0.1:{cluster.port}") == "dynamic"
    status, said = command(tmp_path / "bad.hybrid")
    assert (status, "bad.hybrid: it is no .hybrid file" in said.splitlines()[-1]) == (1, True), said
    assert _served(f"127.0.0.1:{cluster.port}") == "dynamic"
    cluster.delete("hybrid")


def _served(address: str) -> str:
    """The file whose network answers, told by its results."""
    x = torch.randn(1, 8)
    got = triton.InferenceServerClient(address).infer("network", [_input(x, True)]).as_numpy("output0")
    for name, seed in (("dynamic", 0), ("other", 1)):
        if np.allclose(got, small_network(seed)(x).detach().numpy(), atol=1e-5):
            return name
    return "none"


def test_a_full_queue_is_told(cluster: Cluster, models: Path) -> None:
    """Requests above the limit get 503 and Retry-After at once; those in the queue are answered."""
    settings = {"max_batch": 1, "batch_wait_ms": 0, "max_queue": 1, "max_ongoing_requests": 1}
    address = cluster.run(deployment(models / "dynamic.hybrid", **settings), "full")
    body = json.dumps({"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 8], "data": [0.0] * 8}]}).encode()

    def ask(_: int) -> tuple[int, str | None]:
        host, _, prefix = address.partition("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("POST", f"/{prefix}/v2/models/dynamic/infer", body)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("Retry-After")

    with ThreadPoolExecutor(24) as threads:
        got = set(threads.map(ask, range(240)))
    assert got == {(200, None), (503, "1")}
    assert ask(0) == (200, None)
    cluster.delete("full")
