"""Metrics: times in percentiles, and everything that the dashboard shows, in a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Cluster, free_port
from torch_hybrid_backend.serve import deployment

_DASHBOARD = Path(__file__).parents[2] / "examples" / "serving" / "grafana.json"


def test_percentiles() -> None:
    pytest.importorskip("ray", reason="needs the extra serve")
    from torch_hybrid_backend.serve.metrics import percentiles

    assert percentiles([]) == {"count": 0}
    assert percentiles([0.001]) == {"count": 1}
    told = percentiles([n / 1000 for n in range(101)])
    assert told == {"count": 101, "p50_ms": pytest.approx(50), "p99_ms": pytest.approx(99)}


def _panels() -> list[tuple[str, str]]:
    panels = json.loads(_DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def test_the_dashboard_shows_every_metric() -> None:
    """Expressions of the dashboard and the names in serve/metrics.py agree."""
    source = (Path(__file__).parents[2] / "torch_hybrid_backend" / "serve" / "metrics.py").read_text()
    named = set(re.findall(r'"(hybrid_\w+)"', source))
    shown = {
        re.sub(r"_(total|bucket|sum|count)$", "", name)
        for _, e in _panels()
        for name in re.findall(r"ray_(hybrid_\w+)", e)
    }
    assert shown == named


@pytest.mark.full
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_prometheus_has_what_the_dashboard_shows(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """After some requests, wrong ones among them, each expression has values, and those that can be known are right."""
    address = cluster.run(deployment(models / "dynamic.hybrid"), "measured")
    port = free_port()
    scraped = {"job_name": "ray", "static_configs": [{"targets": [f"127.0.0.1:{cluster.metrics_port}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraped]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]

    def value(expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
            found: list[Any] = json.loads(answer.read())["data"]["result"]
        return [each for each in found if each["value"][1] != "NaN"]

    def ask(number: int) -> None:
        wide = 8 if number % 10 else 7
        body = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, wide], "data": [0.0] * wide}]}
        request = urllib.request.Request(f"http://{address}/v2/models/dynamic/infer", json.dumps(body).encode())
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30).close()

    with subprocess.Popen(command) as prometheus, ThreadPoolExecutor(4) as threads:
        try:
            missing = dict(_panels())
            deadline = time.monotonic() + 60
            asked = 0
            while missing and time.monotonic() < deadline:
                list(threads.map(ask, range(20)))
                asked += 20
                time.sleep(1)
                try:
                    missing = {title: expression for title, expression in _panels() if not value(expression)}
                except urllib.error.URLError:
                    continue  # it has not begun to listen
            assert not missing
            time.sleep(5)  # until the last counts have been exported and read
            of_it = 'ray_hybrid_requests_total{application="measured"}'
            counted = {each["metric"]["status"]: float(each["value"][1]) for each in value(of_it)}
            assert counted == {"200": asked * 0.9, "400": asked * 0.1}
        finally:
            prometheus.terminate()
    cluster.delete("measured")
