"""The subcommands about `.hybrid` files, from the shell's point of view."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torch_hybrid_backend.cli import main

_SCRIPT = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval(), (torch.ones(3, 4),)
"""


def _run(*arguments: object) -> tuple[int, str]:
    out = io.StringIO()
    return main([str(each) for each in arguments], out=out), out.getvalue()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    script, path = folder / "script_for_files.py", folder / "model.hybrid"
    script.write_text(_SCRIPT)
    status, told = _run("export", f"{script}:make", "-o", path)
    assert status == 0
    assert "runner" in told
    return path


def test_run(file: Path, tmp_path: Path) -> None:
    """The results of an array in a file, by name or in order, printed and written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    np.save(tmp_path / "x.npy", x.numpy())
    for given in (tmp_path / "x.npy", f"input={tmp_path / 'x.npy'}"):
        status, told = _run("run", file, "--input", given, "--output", tmp_path / "out")
        assert status == 0
        assert told.startswith("output0: float32 (3, 2) = ")
        np.testing.assert_allclose(
            np.load(tmp_path / "out" / "output0.npy"), model(x).detach().numpy(), rtol=1e-4, atol=1e-5
        )


def test_bench(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --input the sample's inputs are taken."""
    monkeypatch.setattr("torch_hybrid_backend.driver.file_commands._BENCH_S", 0.01)
    threads = torch.get_num_threads()
    try:
        status, told = _run("run", file, "--threads", 1, "--bench")
    finally:
        torch.set_num_threads(threads)
    assert status == 0
    assert "calls with 1 threads: median" in told


def test_inspect(file: Path) -> None:
    status, told = _run("inspect", file)
    assert status == 0
    for part in (
        "Sequential",
        "takes input: float32 (3, 4)",
        "gives output0: float32 (3, 2)",
        "not signed",
        "for linux on ",
    ):
        assert part in told
    assert json.loads(_run("inspect", file, "--json")[1])["model"] == "Sequential"


def test_explain(file: Path, tmp_path: Path) -> None:
    """The plan of a file, as text and as a page; it has no times of kernels."""
    assert "tvm runs" in _run("explain", file)[1]
    assert _run("explain", file, "--html", tmp_path / "plan.html")[0] == 0
    assert "Sequential" in (tmp_path / "plan.html").read_text()
    assert _run("explain", file, "--profile")[0] == 1


def test_sign(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signed = tmp_path / "signed.hybrid"
    signed.write_bytes(file.read_bytes())
    signed.chmod(0o644)
    key, public = tmp_path / "key.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    assert _run("run", signed, "--key", public)[0] == 1
    assert "signed by nobody" in capsys.readouterr().err
    assert _run("sign", signed, "--key", key)[0] == 0
    assert _run("run", signed, "--key", public)[0] == 0
    assert "signed by " in _run("inspect", signed)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "missing.hybrid"), "missing.hybrid"),
        (("run", "FILE", "--input", "y=x.npy"), "no such input; it takes input"),
        (("run", "FILE", "--input", "missing.npy"), "no array that can be read"),
        (("run", "FILE", "--entry", "decode"), "no entry 'decode'; it has 'forward'"),
        (("run", "FILE", "--threads", "0"), "at least 1"),
        (("sign", "FILE", "--key", "missing.pem"), "no private key in PEM"),
    ],
)
def test_mistakes_are_one_clear_line(
    arguments: tuple[str, ...], said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*(file if each == "FILE" else each for each in arguments))[0] == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
