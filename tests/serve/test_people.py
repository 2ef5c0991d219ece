"""The page for people, as text and in a real browser that a script drives."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.artifact.decoder_for_tests import exported_decoder
from tests.serve.conftest import Cluster, free_port
from torch_hybrid_backend.serve import deployment
from torch_hybrid_backend.serve.people import page, sample_request
from torch_hybrid_backend.serve.protocol import decode
from torch_hybrid_backend.serve.served_model import ServedModel

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def test_names_do_not_become_html(models: Path, tmp_path: Path) -> None:
    """A file's name is whatever its owner chose."""
    name = "</script><img src=x>"
    path = tmp_path / "a&b.hybrid"
    shutil.copy(models / "dynamic.hybrid", path)
    model = ServedModel(path)
    text = page(model, {"name": name, "inputs": [], "outputs": []}, "/app/")
    assert "<title>a&amp;b</title>" in text
    assert '<base href="/app/">' in text
    assert name not in text
    assert "{{" not in text


def test_the_sample_is_a_request(models: Path) -> None:
    model = ServedModel(models / "dynamic.hybrid")
    work = model.work(decode(sample_request(model)).tensors)
    assert work.rows == 1
    assert "<svg" in model.picture


class _Tab:
    """A tab of a browser, by Chrome's debugging protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0

    def do(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(timeout=30))).get("id") != self._number:
            pass
        return answer["result"]

    def value(self, expression: str) -> Any:
        """The value of an expression on the page."""
        result = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression as soon as it is true."""
        deadline = time.monotonic() + 30
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, (expression, self.value("document.body.innerText"))
            time.sleep(0.1)
        return value


@contextmanager
def _browser(address: str, profile: Path) -> Iterator[_Tab]:
    from websockets.sync.client import connect

    port = free_port()
    switches = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        f"--remote-debugging-port={port}",
    ]
    command = [str(_BROWSER), *switches, "--window-size=1200,1000", address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            deadline = time.monotonic() + 60
            tabs: list[Any] = []
            while not tabs:
                assert time.monotonic() < deadline
                time.sleep(0.2)
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=5) as answer:
                        tabs = [each for each in json.loads(answer.read()) if each["type"] == "page"]
                except OSError:
                    continue  # it has not begun to listen
            with connect(tabs[0]["webSocketDebuggerUrl"], max_size=2**26) as socket:
                yield _Tab(socket)
        finally:
            browser.terminate()
            browser.wait(30)


@pytest.mark.full
@pytest.mark.skipif(_BROWSER is None, reason="needs a browser: chromium")
def test_somebody_sends_a_request(cluster: Cluster, models: Path, tmp_path: Path) -> None:
    """The form sends the sample, then a wrong shape, then values of the user's; latency and plan are shown."""
    pytest.importorskip("websockets", reason="needs the extra serve")
    address = cluster.run(deployment(models / "dynamic.hybrid"), "seen")
    with _browser(f"http://{address}", tmp_path / "profile") as tab:
        tab.wait_for("document.readyState === 'complete' && document.querySelector('textarea') !== null")
        assert tab.value("document.getElementById('name').textContent") == "dynamic"
        assert "FP32 [any, 8]" in tab.value("document.getElementById('tensors').textContent")
        send = "document.querySelector('button').click()"
        tab.value(send)
        assert "output0: FP32 [1, 4] = [" in tab.wait_for("document.getElementById('answer').textContent")
        assert tab.value("document.getElementById('took').textContent").endswith("ms, status 200")
        tab.value(f"document.querySelector('input').value = '[1, 7]'; {send}")
        tab.wait_for("document.getElementById('answer').className === 'wrong'")
        assert "must be a list of 7 elements" in tab.value("document.getElementById('answer').textContent")
        tab.value(
            "document.querySelector('input').value = '[2, 8]';"
            f"document.querySelector('textarea').value = JSON.stringify(Array(16).fill(1.5)); {send}"
        )
        assert "[2, 4]" in tab.wait_for("document.getElementById('answer').textContent")
        assert "p99" in tab.wait_for(
            "document.getElementById('latency').textContent.startsWith('p50') && document.getElementById('latency').textContent"
        )
        tab.value("document.getElementById('plan').open = true")
        tab.wait_for("document.querySelector('iframe')?.contentDocument?.querySelector('svg, .box') !== null")
    cluster.delete("seen")


@pytest.mark.full
@pytest.mark.skipif(_BROWSER is None, reason="needs a browser: chromium")
def test_somebody_continues_a_text(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("websockets", reason="needs the extra serve")
    file, tokenizer = exported_decoder(tmp_path)
    address = cluster.run(deployment(file, tokenizer=tokenizer), "told")
    with _browser(f"http://{address}", tmp_path / "profile") as tab:
        tab.wait_for("document.readyState === 'complete' && document.querySelector('textarea') !== null")
        for prompt, status in (("[1, 2]", 200), ("the cat", 200), ("[-1]", 400)):
            tab.value(
                f"document.querySelector('textarea').value = '{prompt}'; document.querySelector('button').click()"
            )
            tab.wait_for("document.getElementById('answer').textContent")
            assert tab.value("document.getElementById('took').textContent").endswith(f"status {status}")
    cluster.delete("told")
