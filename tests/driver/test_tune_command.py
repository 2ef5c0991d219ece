"""The command `hybrid tune`: what it refuses, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_hybrid_backend import cli

_COMMAND = (sys.executable, "-m", "torch_hybrid_backend.cli", "tune")
_FACTORY = f"{Path(__file__).parents[1] / 'tuning' / 'factory_for_tests.py'}:make"

# SIGINT raises KeyboardInterrupt, also where a shell started pytest in the background and thus with it ignored.
_INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from torch_hybrid_backend.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--budget-s", "0"), "--budget-s is 0; it must be a number of seconds above 0"),
        (("--budget-s", "nan"), "--budget-s is nan"),
        (("--budget-s", "inf"), "--budget-s is inf"),
        (("--threads", "0"), "--threads is 0; it must be a whole number from 1 to"),
        (("--fingerprint", "EPYC"), "--fingerprint is for --ray"),
    ],
)
def test_wrong_arguments(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", _FACTORY, *given]) == 1
    assert said in capsys.readouterr().err


def test_the_cache_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HYBRID_CACHE", "0")
    assert cli.main(["tune", _FACTORY]) == 1
    assert "HYBRID_CACHE=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "names no factory"),
        ("no_such_file.py:make", "there is no file"),
        (_FACTORY.replace(":make", ":maek"), "Did you mean 'make'?"),
    ],
)
def test_no_factory(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path))
    assert cli.main(["tune", target]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise FileNotFoundError('no weights')", "the factory failed: FileNotFoundError: no weights"),
        ("raise SystemExit(0)", "the factory ended the program: SystemExit: 0"),
        (
            "return nn.Linear(8, 8), (torch.ones(2, 8), 3)",
            "the model fails on these inputs: TypeError: Linear.forward() takes",
        ),
        ("return nn.Linear(8, 8), (torch.ones(2, 7),)", "the model fails on these inputs: RuntimeError: mat1 and mat2"),
    ],
)
def test_faults_of_the_user_are_one_line(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tvm")
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "fault_of_a_user.py"
    script.write_text(f"import torch\nfrom torch import nn\ndef make():\n    {body}\n")
    assert cli.main(["tune", f"{script}:make"]) == 1
    assert f"hybrid: {script}:make: {said}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.full
def test_no_cluster_at_the_address(tmp_path: Path) -> None:
    """The command ends, in one line."""
    pytest.importorskip("ray", reason="needs the extra tune")
    environment = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path)}
    command = [*_COMMAND, _FACTORY, "--ray", "127.0.0.1:1"]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert made.returncode == 1
    assert "hybrid: --ray 127.0.0.1:1 is no Ray cluster that can be reached" in made.stderr


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends it with a summary."""
    pytest.importorskip("tvm")
    environment = {**os.environ, "HYBRID_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _INTERRUPTIBLE, "tune", _FACTORY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        while not list(tmp_path.glob("variants/*/*.json")):
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=120)
    assert run.returncode == 0
    assert "variants are left: the same command goes on from here" in out
