"""A Ray cluster for all tests of serving, and small models in files."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST
from torch_hybrid_backend.driver.export import export
from torch_hybrid_backend.driver.serve_command import set_safe_defaults
from torch_hybrid_backend.serve.rpc import ADDER

# Ray reads them once, when it is imported by the first test that does.
set_safe_defaults(os.environ, is_new=True)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files of one small network: `dynamic` (1 to 16 rows), `sizes` (1 or 4), `fixed` (4), and `mixed`, whose rows depend on
    each other. The folder also has `other`, the network with other weights."""
    folder = tmp_path_factory.mktemp("served")
    network = small_network()
    rows = torch.export.Dim("rows", min=1, max=16)
    _export(network, (torch.randn(3, 8),), folder / "dynamic.hybrid", dynamic_shapes=({0: rows},))
    _export(small_network(seed=1), (torch.randn(3, 8),), folder / "other.hybrid", dynamic_shapes=({0: rows},))
    calls = {"one": ((torch.randn(1, 8),), {}), "four": ((torch.randn(4, 8),), {})}
    _export(network, calls, folder / "sizes.hybrid")
    _export(network, (torch.randn(4, 8),), folder / "fixed.hybrid")
    _export(_Mixed(), (torch.randn(4, 8),), folder / "mixed.hybrid")
    return folder


def small_network(seed: int = 0) -> nn.Module:
    """A network from (n, 8) to (n, 4)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


class _Mixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 0)


def _export(model: nn.Module, args: Any, path: Path, **given: Any) -> None:
    export(model, args, path, options=FAST, **given)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster on loopback. `run` deploys applications under a name, which is also their prefix."""

    port: int
    metrics_port: int
    grpc_port: int

    def run(self, application: Any, name: str = "app") -> str:
        """Deploy, wait until it answers, and return the address without "http://"."""
        from ray import serve

        serve.run(application, name=name, route_prefix=f"/{name}")
        return f"127.0.0.1:{self.port}/{name}"

    def configure(
        self, path: Path, user_config: dict[str, Any] | None, name: str, *, status: str = "RUNNING", **args: Any
    ) -> str:
        """Deploy as `serve run config.yaml` does, and wait for this status."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "torch_hybrid_backend.serve:application",
            "args": {"path": str(path), "model": "network", **args},
            "deployments": [{"name": "model", "user_config": user_config}],
        }
        _get_global_client().deploy_apps(ServeDeploySchema(applications=[application]))
        deadline = time.monotonic() + 60
        time.sleep(0.5)  # until the controller has taken the configuration
        while serve.status().applications[name].status != status:
            assert time.monotonic() < deadline, serve.status()
            time.sleep(0.1)
        return f"127.0.0.1:{self.port}/{name}"

    def delete(self, name: str) -> None:
        from ray import serve

        serve.delete(name)


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ray and Serve, with token authentication, until the tests of the session have run."""
    ray = pytest.importorskip("ray", reason="needs the extra serve")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
        from ray import serve

    port, metrics_port, grpc_port = free_port(), free_port(), free_port()
    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _metrics_export_port=metrics_port,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        rpc = {"port": grpc_port, "grpc_servicer_functions": [ADDER], "enable_reflection": False}
        serve.start(http_options={"host": "127.0.0.1", "port": port}, grpc_options=rpc)
        yield Cluster(port, metrics_port, grpc_port)
    finally:
        serve.shutdown()
        ray.shutdown()
