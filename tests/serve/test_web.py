"""Routes, with a service that answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend._version import __version__
from torch_hybrid_backend.serve.protocol import Tensors
from torch_hybrid_backend.serve.served_model import ServedModel

testclient = pytest.importorskip("starlette.testclient", reason="needs the extra serve")


class _Echo:
    """A service that returns its inputs."""

    max_body_bytes = 1000

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.statuses: list[int] = []

    def answered(self, status: int) -> None:
        self.statuses.append(status)

    def latency(self) -> dict[str, float]:
        return {"count": 0}

    async def infer(self, model: ServedModel, request: Tensors) -> Tensors:
        if "boom" in request.tensors:
            raise ZeroDivisionError("of the service")
        return request


@pytest.fixture
def service(models: Path) -> _Echo:
    return _Echo(ServedModel(models / "dynamic.hybrid"))


@pytest.fixture
def client(service: _Echo) -> Any:
    from torch_hybrid_backend.serve.web import application

    return testclient.TestClient(application(service), raise_server_exceptions=False)


_INPUT = {"name": "x", "datatype": "INT8", "shape": [2], "data": [1, 2]}


def test_what_a_server_tells_of_itself(client: Any) -> None:
    told = client.get("/v2").json()
    assert told == {"name": "torch_hybrid_backend", "version": __version__, "extensions": ["binary_tensor_data"]}
    metadata = client.get("/v2/models/dynamic").json()
    version = metadata["versions"][0]
    assert client.get(f"/v2/models/dynamic/versions/{version}").json() == metadata
    ready = [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/dynamic/ready",
        f"/v2/models/dynamic/versions/{version}/ready",
    ]
    assert [client.get(path).json()["ready"] for path in ready] == [True] * 4
    assert client.get("/v2/models/else").status_code == 404
    assert client.get("/v2/models/dynamic/versions/0/ready").status_code == 404


def test_answers_are_json_or_bytes(client: Any) -> None:
    path = "/v2/models/dynamic/infer"
    said = client.post(path, json={"inputs": [_INPUT]})
    assert said.headers["content-type"] == "application/json"
    assert said.json()["outputs"] == [{**_INPUT}]
    got = client.post(path, json={"inputs": [_INPUT], "parameters": {"binary_data_output": True}})
    assert got.content[int(got.headers["inference-header-content-length"]) :] == b"\x01\x02"


def test_errors_are_json(client: Any, service: _Echo) -> None:
    """Also those of the service, and of a body without a length that does not end."""
    path = "/v2/models/dynamic/infer"
    asked = {
        404: client.post("/v2/models/else/infer", json={"inputs": []}),
        400: client.post(path, content=b"no"),
        405: client.get(path),
        413: client.post(path, content=(b"0" * 100 for _ in range(1000))),
        415: client.post(path, content=b"", headers={"content-encoding": "gzip"}),
        500: client.post(path, json={"inputs": [{**_INPUT, "name": "boom"}]}),
    }
    assert {status: answer.status_code for status, answer in asked.items()} == {status: status for status in asked}
    assert all(set(answer.json()) == {"error"} for answer in asked.values())
    assert service.statuses == [404, 400, 413, 415, 500]
