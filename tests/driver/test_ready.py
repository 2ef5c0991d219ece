"""The line that says that a model is ready."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import CallDecision, Cost, Plan
from torch_hybrid_backend.driver.ready import Ready, in_words

ROOT = Path(__file__).parents[2]
_PLAN = Plan("Net", "inference", (), ())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).softmax(-1)


def _call(engine: str, planned: float, eager: float, kind: str = "measured") -> Plan:
    costs = (Cost("plan", planned, kind), Cost("eager", eager, kind))
    return Plan("Net", "inference", (), (), CallDecision(engine, costs, ()))


def test_one_line_says_what_was_gained(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first call of a real model, and by no later one."""
    monkeypatch.setenv("HYBRID_PLACEMENT", "measure")
    torch._dynamo.reset()
    model = torch.compile(Net().eval(), backend="hybrid")
    with caplog.at_level(logging.INFO, "torch_hybrid_backend.driver.ready"), torch.no_grad():
        for _ in range(3):
            model(torch.randn(64, 256))
    told = [record.getMessage() for record in caplog.records if record.name == "torch_hybrid_backend.driver.ready"]
    assert len(told) == 1
    assert re.fullmatch(
        r"hybrid: Net ready in \d+\.\d s: (\d.*x eager \(tvm runs \d+ of \d+ operators.*\)|eager keeps the call: .*)",
        told[0],
    )


def test_training_has_a_line_for_each_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Whole calls are not timed there, so no gain is claimed."""
    model = torch.compile(Net(), backend="hybrid")
    with caplog.at_level(logging.INFO, "torch_hybrid_backend.driver.ready"):
        for _ in range(2):
            model(torch.randn(64, 256)).sum().backward()
    told = [record.getMessage() for record in caplog.records if record.name == "torch_hybrid_backend.driver.ready"]
    assert [re.sub(r"\d+(\.\d)?", "N", line.split(":")[1]) for line in told] == [
        " Net (training, forward) ready in N s",
        " Net (training, backward) ready in N s",
    ]


def test_what_the_line_says() -> None:
    """The line tells of a gain, of a plan that was not faster, and of a time taken beside other load."""
    assert in_words("Net", _call("plan", 100.0, 230.0), 9.21) == (
        "hybrid: Net ready in 9.2 s: 2.3x eager (eager runs all operators)"
    )
    assert in_words("Net", _call("eager", 101.0, 62.0), 1.0) == (
        "hybrid: Net ready in 1.0 s: eager keeps the call: it takes 62.0 us, the plan 101.0 us"
    )
    assert in_words("Net", _call("plan", 100.0, 230.0, "disturbed"), 1.0).endswith(
        "(eager runs all operators; measured beside other load, so it may be far off)"
    )
    assert in_words("Net", _PLAN, 1.0) == "hybrid: Net ready in 1.0 s: eager runs all operators"


def test_work_within_work_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    """The line comes when the outermost is over, and only once."""
    ready = Ready("Net", Config())
    with caplog.at_level(logging.INFO, "torch_hybrid_backend.driver.ready"):
        with ready.working():
            pass
        assert caplog.records == []
        for _ in range(2):
            with ready.working(), ready.working():
                ready.telling()(_PLAN)
                assert len([r for r in caplog.records if r.name.endswith("ready")]) < 2
    assert len(caplog.records) == 1


_PROGRAM = """
import logging, sys, torch
{setup}
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval(), backend="hybrid")
with torch.no_grad():
    model(torch.randn(8, 64))
"""


def _on_terminal(setup: str, **environment: str) -> str:
    """Standard error of a program on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(setup=setup)],
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed: Linux's way to say so
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert process.wait() == 0, found
    return found.decode()


@pytest.mark.slow
def test_a_terminal_shows_it_by_default() -> None:
    """Unless the program has logging of its own."""
    assert _on_terminal("").count("hybrid: Sequential ready in ") == 1
    assert "ready in" not in _on_terminal("logging.basicConfig(level=logging.WARNING)")


@pytest.mark.full  # two processes that take the same path as those before
def test_a_terminal_shows_what_was_asked_for() -> None:
    """No line if progress is switched off; a program whose logging shows information has the line there."""
    assert "ready in" not in _on_terminal("", HYBRID_PROGRESS="0")
    assert (
        _on_terminal("logging.basicConfig(level=logging.INFO)").count("INFO:torch_hybrid_backend.driver.ready:hybrid: ")
        == 1
    )


@pytest.mark.slow
def test_a_file_shows_nothing() -> None:
    """Standard error that is no terminal stays empty."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(setup="")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stderr == ""
