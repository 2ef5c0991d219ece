"""`hybrid bench`: real runtimes on a small model, and user errors as one sentence."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend import cli
from torch_hybrid_backend.bench import command
from torch_hybrid_backend.bench.peers import Peer, by_name

MODELS = """
import time
import torch
from dataclasses import dataclass
from torch import nn

@dataclass
class Output:
    logits: torch.Tensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    def forward(self, x, *, shift):
        return Output(self.layers(x) + shift)

def make():
    return Model().eval(), (torch.randn(2, 3, 4, 4),), {"shift": torch.ones(2, 5)}

def with_batch(batch=1):
    return nn.Linear(3, 3), (torch.randn(batch, 3), torch.randn(7))[:1]

def of_two_sizes():
    return nn.Bilinear(3, 3, 3), (torch.randn(2, 3), torch.randn(5, 3))

def differing():
    torch.seed()
    return nn.Linear(3, 3), (torch.randn(2, 3),)

def failing():
    return nn.Linear(3, 3), (torch.randn(2, 4),)

def drawing():
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout()), (torch.randn(64, 3),)

def slow():
    time.sleep(600)
"""
_QUICK = ["--seconds", "0.2", "--rounds", "2", "--threads", "1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "models_for_bench.py"
    path.write_text(MODELS)
    return path


def _planted(name: str, *packages: tuple[str, str]) -> Peer:
    """A test runtime in tests/benchmarks/planted/."""
    return Peer(name, name, f"tests.benchmarks.planted.{name}", packages)


# Eager in the place of hybrid, for tests of what the command says: eager needs no compilation.
_EAGER_AS_HYBRID = {"hybrid": Peer("hybrid", "hybrid", "torch_hybrid_backend.bench.peers.eager")}


def _run(*arguments: str, known: dict[str, Peer] | None = None) -> tuple[int, str]:
    out = io.StringIO()
    return command.run(cli.parser().parse_args(["bench", *arguments]), out, known), out.getvalue()


@pytest.mark.slow
def test_a_model_beside_other_runtimes(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager, inductor and hybrid have figures. A wrong runtime, one that cannot convert the model, and one that is not installed have a line
    with the reason. The files say the same."""
    # tests/benchmarks/test_compare.py has one that dies, too.
    doubles = [_planted("wrong"), _planted("refusing"), _planted("absent", ("no_such", "no-such"))]
    known = {name: by_name()[name] for name in ("eager", "hybrid", "inductor")} | {peer.name: peer for peer in doubles}
    files = {kind: tmp_path / f"bench.{kind}" for kind in ("json", "html", "log")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    status, text = _run(f"{models}:make", "--batch", "3", *_QUICK, *options, known=known)
    assert status == 0
    assert capsys.readouterr().err == ""  # no terminal: no progress
    for name in ("eager", "hybrid", "inductor"):
        assert f"\n| {name} " in text
    assert "batch 3, as-written" in text
    assert "no result: wrong: wrong answer: up to 0.5 from eager's" in text
    assert "no result: refusing: NotImplementedError: no rule for aten.sigmoid\n" in text
    assert "no result: absent: not installed: pip install no-such" in text
    found = json.loads(files["json"].read_text())
    rows = {row["peer"]: row for row in found["results"]}
    assert list(rows) == ["hybrid", "eager", "inductor", "wrong", "refusing", "absent"]
    assert {(row["batch"], row["precision"]) for row in rows.values()} == {(3, "as-written")}
    for name in ("eager", "hybrid", "inductor"):
        assert rows[name]["median_ms"] > 0
        assert rows[name]["rms_error"] < 1e-5
        assert rows[name]["first_call_s"] > 0
        assert rows[name]["running_mib"] > 50  # torch alone takes more
    assert rows["eager"]["speedup"] == 1.0
    assert rows["hybrid"]["graphs"] == 1
    assert "median_ms" not in rows["wrong"]
    assert found["machine"]["versions"]["torch"]
    page = files["html"].read_text()
    assert page.count("<rect") == 3
    assert "no rule for aten.sigmoid" in page
    assert "the whole graph" in files["log"].read_text()


@pytest.mark.full
def test_a_batch_that_the_factory_takes(models: Path, tmp_path: Path) -> None:
    """The factory gets the batch size; each batch size has a table."""
    out = tmp_path / "out.json"
    status, text = _run(f"{models}:with_batch", "--batch", "2,4", "--against", "eager", *_QUICK, "--json", str(out))
    assert status == 0
    assert [row["batch"] for row in json.loads(out.read_text())["results"]] == [2, 2, 4, 4]
    assert "The model is in training mode" in text


def test_steps_of_training(models: Path) -> None:
    """Only runtimes that can train are timed and named."""
    status, text = _run(f"{models}:with_batch", "--train", "--against", "eager", *_QUICK)
    assert status == 0
    assert "training step" in text
    assert "| hybrid" in text


def test_random_numbers_are_said_to_hinder_the_comparison(models: Path) -> None:
    """A model with dropout in training mode draws other random numbers in each runtime: a note says that results were not compared."""
    status, text = _run(f"{models}:drawing", *_QUICK, known=_EAGER_AS_HYBRID)
    assert status == 0
    assert "The model draws random numbers, so results were not compared with eager's." in text


def test_hybrid_without_a_result_is_a_failure(models: Path) -> None:
    """The command fails, but shows the other figures."""
    ours = Peer("hybrid", "hybrid", "tests.benchmarks.planted.refusing")
    status, text = _run(f"{models}:make", *_QUICK, known={"hybrid": ours, "eager": by_name()["eager"]})
    assert status == 1
    assert "hybrid has no result, so nothing can be compared with it." in text
    assert "no result: hybrid: NotImplementedError" in text


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("of_two_sizes", ["--batch", "4"], r"their shapes are (2, 3), (5, 3); give the factory a parameter `batch`"),
        (
            "failing",
            [],
            "does not run in eager (--log FILE tells more): RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
        ("absent", [], "has no callable named 'absent'"),
        ("make", ["--against", "eagre"], "--against eagre is unknown (did you mean eager?); it must be one of eager,"),
        ("make", ["--precision", "fp8"], "--precision fp8 is unknown; it must be one of as-written, bf16,"),
        ("make", ["--train", "--precision", "int8"], "--train measures in as-written and bf16, not in int8"),
        ("make", ["--train", "--against", "openvino"], "openvino cannot train a model: name some of eager, inductor"),
        ("make", ["--json", "/no/such/folder/file"], "cannot write /no/such/folder/file: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(
    models: Path, factory: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user error gives exit status 1 and one sentence without a traceback."""
    assert cli.main(["bench", f"{models}:{factory}", *_QUICK, *options], out=io.StringIO()) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_factory_that_makes_another_model_each_time(models: Path) -> None:
    """Results cannot be compared: each runtime has this reason."""
    status, text = _run(f"{models}:differing", *_QUICK, known=_EAGER_AS_HYBRID)
    assert status == 1
    assert "hybrid: two processes made different models or inputs, so results cannot be compared" in text


@pytest.mark.parametrize(
    ("option", "value"), [("--batch", "0"), ("--rounds", "x"), ("--seconds", "-1"), ("--threads", "99999999999")]
)
def test_numbers_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong number gives argparse's error and exit status 2."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "module:make", option, value])
    assert f"argument {option}: '{value}' must be a" in capsys.readouterr().err


def _workers(folder: Path) -> list[str]:
    """Process ids of the workers that have the folder's name in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # the process has ended
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(models: Path, tmp_path: Path, number: signal.Signals) -> None:
    """An interrupt ends a working worker, and so does the end of the command itself."""
    environment: dict[str, Any] = {**os.environ, "MARK": str(tmp_path)}
    arguments = ["bench", f"{models}:slow", "--against", "eager"]
    running = subprocess.Popen(
        [sys.executable, "-m", "torch_hybrid_backend.cli", *arguments],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a shell has its background jobs ignore it
    )
    deadline = time.monotonic() + 120
    while len(_workers(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_workers(tmp_path)) >= 2
    running.send_signal(number)
    assert running.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    while _workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _workers(tmp_path)
