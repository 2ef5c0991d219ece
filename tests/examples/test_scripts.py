"""The scripts of examples/, as a reader runs them: each in a process of its own, with its small model. No time is asserted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
_FASTER = r"eager [\d.]+ (ms|tokens/s), hybrid [\d.]+ (ms|tokens/s): [\d.]+ times as fast"


def _run(name: str, *arguments: str) -> str:
    """Return what a script prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    # Engines are chosen by estimates: of a small model's times other load decides.
    chosen = {"HYBRID_PLACEMENT": "estimate", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment = {**os.environ, **chosen}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "largest"),
    # The script only hands the precision on: docs/guides/quantization.md's blocks have it in `make test`.
    [("as-written", 1e-5), pytest.param("int8", 0.2, marks=pytest.mark.full)],
)
def test_vision(precision: str, largest: float) -> None:
    """The example shows the plan, in which the engine runs everything, how much faster it is, and an error that the precision allows."""
    printed = _run("vision.py", "--small", "--batch", "2", "--precision", precision)
    assert re.search(r"tvm runs \d+ \(100", printed)
    assert re.search(_FASTER, printed)
    assert float(printed.rpartition("relative error ")[2]) < largest


@pytest.mark.slow
def test_generation() -> None:
    """In float32 the same tokens are generated as in eager."""
    printed = _run("generation.py", "--small", "--tokens", "12")
    assert re.search(_FASTER, printed)
    assert "12 of 12 tokens are eager's" in printed


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of the server, which is ended as a terminal ends it, and has to end well."""
    pytest.importorskip("fastapi", reason="the example needs FastAPI and uvicorn: pip install fastapi uvicorn")
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCH_LOGS": "recompiles"}
    command = [sys.executable, str(EXAMPLES / "server.py"), "--port", "0"]
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as server:
        try:
            end = time.monotonic() + 300
            while (found := re.search(r"running on (http://[\d.:]+)", log.read_text())) is None:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.2)
            assert re.search(_FASTER, log.read_text())
            compiled = log.read_text().count("Recompiling")
            yield found[1]
            assert log.read_text().count("Recompiling") == compiled, "a request was compiled"
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0, log.read_text()
        finally:
            server.kill()


def _ask(address: str, texts: list[str]) -> torch.Tensor:
    body = json.dumps({"texts": texts}).encode()
    request = Request(f"{address}/embed", body, {"content-type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return torch.tensor(json.load(answer))


@pytest.mark.full  # half a minute for the real encoder; docs/guides/servers.md has the same server with a small model in `make test`
def test_server(address: str) -> None:
    """Requests of any number and length are answered without another compilation, each text alike alone and among others."""
    texts = ["A ferry crosses the strait every forty minutes in summer.", "The boat goes over the water.", "Rye bread."]
    together = _ask(address, texts)
    assert together.shape == (3, 384)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3), rtol=1e-4, atol=1e-4)
    for text, expected in zip(texts, together, strict=True):
        torch.testing.assert_close(_ask(address, [text])[0], expected, rtol=1e-3, atol=1e-4)
    likeness = together @ together[0]
    assert likeness[1] > likeness[2]
    with pytest.raises(HTTPError, match="422"):
        _ask(address, [])
