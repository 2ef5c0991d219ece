"""The subcommands about `.hybrid` files, from the shell's point of view."""

from __future__ import annotations

import importlib
import io
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_hybrid_backend
from tests.artifact.decoder_for_tests import exported_decoder
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


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of a small Llama, and a tokenizer of letters and a few pairs."""
    return exported_decoder(tmp_path_factory.mktemp("generation"))


def test_generate(decoder: tuple[Path, Path]) -> None:
    """The tokens of `generate`, as ids or as text, and one line with the speed of both parts."""
    file, tokenizer = decoder
    loaded = torch_hybrid_backend.load(file)
    read = importlib.import_module("tokenizers").Tokenizer.from_file(str(tokenizer))
    prompt = "the cat é"
    ids = read.encode(prompt).ids
    expected = list(loaded.generate(ids, 12, temperature=1.0, top_k=50, top_p=0.9, seed=3))
    sampling = ("--max-new-tokens", 12, "--temperature", 1, "--top-k", 50, "--top-p", 0.9, "--seed", 3)
    status, told = _run("generate", file, "--ids", ",".join(map(str, ids)), *sampling)
    assert status == 0
    lines = told.splitlines()
    assert lines[0].split() == [str(token) for token in expected]
    speed = rf"{len(ids)} prompt tokens, [\d.]+ tokens/s; {len(expected)} new tokens, [\d.]+ tokens/s"
    assert re.fullmatch(speed, lines[1])
    status, told = _run("generate", file, "--tokenizer", tokenizer, "--prompt", prompt, *sampling)
    assert status == 0
    text = told.rpartition("\n")[0].rpartition("\n")[0]
    assert read.decode(expected).rstrip("\ufffd").startswith(text)
    assert text
    status, told = _run("generate", file, "--ids", "5,6", "--max-new-tokens", 1)
    assert told.endswith("; 1 new tokens\n")
    greedy = next(loaded.generate([5, 6], 1))
    for stop in (greedy, read.id_to_token(greedy)):
        status, told = _run("generate", file, "--ids", "5,6", "--tokenizer", tokenizer, "--stop", stop)
        assert told.endswith("; 1 new tokens\n")
    assert "generates text of at most 32 tokens with the prompt; stops behind 1" in _run("inspect", file)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "the"), "--prompt needs --tokenizer"),
        (("--prompt", "", "--tokenizer", "TOKENIZER"), "the prompt has no tokens"),
        (("--ids", "1,a"), "--ids is '1,a'"),
        (("--ids", "1", "--stop", "</s>"), "--stop </s> needs --tokenizer"),
        (("--ids", "1", "--stop", "xyz", "--tokenizer", "TOKENIZER"), "is no token of the tokenizer"),
        (("--ids", "1", "--tokenizer", "missing.json"), "no tokenizer.json that can be read"),
        (("--ids", "1", "--top-k", "5"), "temperature 0 draws none"),
        (("--ids", "9999"), "the model knows 0 to"),
    ],
)
def test_mistakes_in_generation(
    arguments: tuple[str, ...], said: str, decoder: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file, tokenizer = decoder
    given = [str(tokenizer) if each == "TOKENIZER" else each for each in arguments]
    assert _run("generate", file, *given)[0] == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


_DECODER = """
import torch, transformers
def make():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval(), ()
"""


def test_export_of_a_decoder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "decoder_for_files.py").write_text(_DECODER)
    path = tmp_path / "decoder.hybrid"
    status, told = _run("export", f"{tmp_path / 'decoder_for_files.py'}:make", "-o", path, "--max-length", 16)
    assert status == 0
    assert "prefill, decode" in told
    assert len(list(torch_hybrid_backend.load(path).generate([1, 2], stop_tokens=()))) == 14


def test_generate_takes_a_decoder(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("generate", file, "--ids", "1")[0] == 1
    assert "export_generation" in capsys.readouterr().err


def test_export_for_many_sizes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file serves every batch of the range; what --dynamic cannot mean is refused."""
    script, path = file.parent / "script_for_files.py", tmp_path / "any.hybrid"
    assert _run("export", f"{script}:make", "-o", path, "--dynamic", "input:0=2..64")[0] == 0
    for rows in (2, 64):
        np.save(tmp_path / "x.npy", np.ones((rows, 4), np.float32))
        assert _run("run", path, "--input", tmp_path / "x.npy", "--output", tmp_path / "out")[0] == 0
        assert np.load(tmp_path / "out" / "output0.npy").shape == (rows, 2)
    for given, said in [
        ("input", "must be INPUT:DIM"),
        ("x:0", "no tensor x with a dimension 0; it has input (2 dimensions)"),
        ("input:2", "no tensor input with a dimension 2"),
        ("input:0=9..3", "the least size is above the most"),
        ("input:0=20..30", "example has the size 3 there, outside of the range"),
    ]:
        assert _run("export", f"{script}:make", "-o", path, "--dynamic", given)[0] == 1
        assert said in capsys.readouterr().err


_SIZES = """
import torch
class Sizes(torch.nn.Module):
    def forward(self, x, y):
        return x + y, x.shape[0], torch.complex(x, y)
class Branch(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.shape[0] > 4 else x - 1
class Data(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 4 else x - 1
def sizes(): return Sizes().eval(), (torch.ones(6, 4), torch.ones(6, 4))
def branch(): return Branch().eval(), (torch.ones(6, 4),)
def data(): return Data().eval(), (torch.ones(6, 4),)
def single(): return Branch().eval(), (torch.ones(1, 4),)
"""


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    script = tmp_path / "sizes_for_files.py"
    script.write_text(_SIZES)
    return script


def test_ranges_begin_and_end_as_asked(sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two inputs of one size share the range of both; a call's results are told in its own sizes."""
    path = tmp_path / "sizes.hybrid"
    status, told = _run("export", f"{sizes}:sizes", "-o", path, "--dynamic", "x:0=1..64", "--dynamic", "y:0=1..64")
    assert status == 0
    assert "serves x with 1 to 64 in dimension 0" in told
    assert "--dynamic" not in capsys.readouterr().err
    for rows in (1, 64):
        np.save(tmp_path / "x.npy", np.full((rows, 4), 2, np.float32))
        status, told = _run("run", path, "--input", tmp_path / "x.npy", "--input", tmp_path / "x.npy")
        assert status == 0
        assert told.splitlines() == [
            f"output0: float32 ({rows}, 4) = 4, 4, 4, 4{', ...' if rows > 1 else ''}",
            f"output1: {rows}",
            f"output2: complex64 ({rows}, 4) = 2+2j, 2+2j, 2+2j, 2+2j{', ...' if rows > 1 else ''}",
        ]


def test_narrowed_ranges_are_told(sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("export", f"{sizes}:branch", "-o", tmp_path / "branch.hybrid", "--dynamic", "x:0=1..64")[0] == 0
    assert "--dynamic x:0=1..64 was asked for, and the file serves 5..64" in capsys.readouterr().err


def test_examples_of_one_element_cannot_vary(sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("export", f"{sizes}:single", "-o", tmp_path / "one.hybrid", "--dynamic", "x:0=1..64")[0] == 1
    assert "give an example of at least 2" in capsys.readouterr().err


def test_what_cannot_be_traced_is_told_in_full(sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the line of the model, below the first line of PyTorch's text."""
    assert _run("export", f"{sizes}:data", "-o", tmp_path / "data.hybrid")[0] == 1
    error = capsys.readouterr().err.splitlines()[-1]  # PyTorch shows the graph above
    assert error.startswith("hybrid: torch.export cannot trace Data: ")
    assert "sizes_for_files.py" in error
    assert "x.sum() > 4" in error


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
    assert _run("sign", signed, "--key", key)[0] == 0
    assert _run("run", signed, "--key", public)[0] == 0
    assert _run("inspect", signed)[1].count("signed by ") == 1  # a key has one signature


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "missing.hybrid"), "missing.hybrid"),
        (("explain", "missing.hybrid"), "missing.hybrid: it cannot be opened: No such file"),
        (("run", "FILE", "--input", "y=x.npy"), "no such input; it takes input"),
        (("run", "FILE", "--input", "missing.npy"), "no array that can be read"),
        (("run", "FILE", "--entry", "decode"), "no entry 'decode'; it has 'forward'"),
        (
            ("run", "FILE", "--input", "a.npy", "--input", "b.npy"),
            "--input is given 2 times without a name, and forward takes 1 array: input",
        ),
        (("run", "FILE", "--threads", "0"), "--threads is 0; it must be a whole number from 1 to "),
        (("run", "FILE", "--threads", "99999999999"), "--threads is 99999999999; it must be a whole number from 1 to "),
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
