"""`hybrid tune` on the cluster that the tests of this folder share; tests/tuning/test_cluster.py has clusters of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serve.conftest import Cluster
from tests.tuning.cluster_for_tests import tuning
from tests.tuning.test_local import later


@pytest.mark.full  # two processes for ten seconds; tests/tuning/test_shared_tuner.py and test_local.py have the parts in `make test`
def test_a_few_rounds(cluster: Cluster, tmp_path: Path) -> None:
    """The budget ends it, and a later process neither compiles nor times."""
    ray = pytest.importorskip("ray")
    run = tuning(ray.get_runtime_context().gcs_address, tmp_path, budget_s=10.0)
    out, error = run.communicate(timeout=200)
    assert run.returncode == 0, error
    found = json.loads(out.splitlines()[-1])
    assert found["settled"]
    assert not found["notes"]
    assert found["kernels"] == 2
    assert len(found["entries"]) == 2  # also where no round began in the time
    assert not later(tmp_path)["new"]
