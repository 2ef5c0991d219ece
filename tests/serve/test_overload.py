"""More requests than a server can take: memory stays, the rest is refused, and afterwards everything is as before."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

from tests.artifact.exported_for_tests import FAST
from tests.serve.conftest import Cluster
from tests.serve.load_for_tests import Load, pids
from torch_hybrid_backend.driver.export import export
from torch_hybrid_backend.serve import deployment

pytestmark = pytest.mark.full
_SECONDS = 60
_RECOVERED_S = 30
_CLIENTS = 24


class _Slow(nn.Module):
    """A network from (1, 8) to (1, 4) that takes a core tens of milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.first(input).expand(64, 1024)
        for _ in range(16):
            x = torch.relu(self.layer(x)) + x
        return torch.tanh(self.last(x).mean(0, keepdim=True))


@pytest.mark.fault(
    "a server is asked at three times its capacity for a minute",
    "503 with Retry-After for what is too much, right answers for the rest; memory stays, and seconds later times are as before",
)
def test_three_times_the_capacity(cluster: Cluster, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = _Slow().eval()
    export(network, (torch.randn(1, 8),), tmp_path / "slow.hybrid", options=FAST)
    bound = deployment(
        tmp_path / "slow.hybrid", model="network", max_batch=1, batch_wait_ms=0, max_queue=4, max_ongoing_requests=2
    )
    address = cluster.run(bound, "loaded")
    processes = [*pids("SERVE_REPLICA::loaded#"), *pids("SERVE_PROXY")]
    assert len(processes) == 2

    def seconds() -> float:
        with Load(address, [network], clients=1).running() as load:
            load.wait_for(50)
        assert set(load.answers) == {"right"}, load.answers
        return median(load.seconds)

    seconds()  # the first requests take memory that stays
    before, resident = seconds(), [_resident_mib(pid) for pid in processes]
    with Load(address, [network], _CLIENTS).running() as load:
        time.sleep(_SECONDS)
    assert set(load.answers) == {"right", "503"}, load.answers
    assert load.answers.total() >= 3 * load.answers["right"], load.answers
    assert set(load.retry_after) == {"1"}, load.retry_after
    grown = [_resident_mib(pid) - mib for pid, mib in zip(processes, resident, strict=True)]
    assert max(grown) < 32, grown
    deadline = time.monotonic() + _RECOVERED_S
    while seconds() > 3 * before:
        assert time.monotonic() < deadline, before
    assert processes == [*pids("SERVE_REPLICA::loaded#"), *pids("SERVE_PROXY")]
    cluster.delete("loaded")


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
