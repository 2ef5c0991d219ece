"""`hybrid bench model.hybrid`: a file beside what other runtimes saved of the same model, and user errors as one sentence."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.bench.file_for_tests import MODELS, exported_to
from torch_hybrid_backend import cli
from torch_hybrid_backend.bench import command, files, saving
from torch_hybrid_backend.bench.factory_model import FactoryModel
from torch_hybrid_backend.bench.process import WorkerError
from torch_hybrid_backend.errors import ArgumentError, ArtifactError
from torch_hybrid_backend.factory import Factory

_QUICK = ["--rounds", "1", "--seconds", "0.2", "--threads", "1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "models_for_files.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def file(models: Path) -> Path:
    return exported_to(models.parent)


def _run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return command.run(cli.parser().parse_args(["bench", *arguments]), out), out.getvalue()


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WorkerError after the time limit; the process is gone."""
    program, number = tmp_path / "program", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {number}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(WorkerError, match="no answer within 1 s"):
        files._answers("hybrid", tmp_path / "model.hybrid", tmp_path, files.Effort(1, timeout_s=1.0))
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


@pytest.mark.full
def test_a_file_beside_aotinductor(file: Path, models: Path, tmp_path: Path) -> None:
    """All have figures and the same answer: the file in Python and in the runner, and a package that is made of the model."""
    record = tmp_path / "bench.json"
    status, text = _run(
        str(file), "--model", f"{models}:make", "--against", "aotinductor", *_QUICK, "--json", str(record)
    )
    assert status == 0, text
    for title in ("hybrid", "hybrid, runner", "AOTInductor"):
        assert f"\n| {title} " in text
    results = {each["format"]: each for each in json.loads(record.read_text())["results"]}
    assert list(results) == ["hybrid", "runner", "aotinductor"]
    for form in ("hybrid", "aotinductor"):
        figures = results[form]
        assert figures["error"] < 1e-5
        assert figures["call_ms"] > 0
        assert figures["process_s"] > figures["import_s"] + figures["answer_s"] > 0
        assert figures["private_mib"] > 0
    assert results["hybrid"]["file_mb"] == results["runner"]["file_mb"] == file.stat().st_size / 1e6
    assert 0 < results["runner"]["process_s"] < results["hybrid"]["process_s"]


@pytest.mark.full
@pytest.mark.parametrize("form", ["openvino", "onnxruntime"])
def test_formats_of_other_runtimes(form: str, file: Path, models: Path, tmp_path: Path) -> None:
    """A model that was saved gives the answer of the file's sample; so does one by its path. Another model is a gap."""
    if why := saving.missing(form):
        pytest.skip(why)
    effort = files.Effort(1, processes=1, seconds=0.2, rounds=1)
    work = FactoryModel(factory=Factory(f"{models}:make"), threads=1, folder=tmp_path)
    *_, found = files.compare(file, {form: work}, tmp_path / "made", effort, tmp_path / "log")
    assert "gap" not in found, (found, (tmp_path / "log").read_text())
    assert found["error"] < 1e-5
    own = {"openvino": "openvino/model.xml", "onnxruntime": "onnxruntime/exported.onnx"}[form]
    *_, again = files.compare(file, {form: tmp_path / "made" / own}, tmp_path / "given", effort, tmp_path / "log")
    assert again["error"] < 1e-5
    assert again["file_mb"] > 0
    other = FactoryModel(factory=Factory(f"{models}:other"), threads=1, folder=tmp_path)
    *_, wrong = files.compare(file, {form: other}, tmp_path / "other", effort, tmp_path / "log")
    assert wrong["gap"].startswith("wrong answer: off by 2 times the sample's root mean square")
    assert wrong["gap"].endswith("is it the model that was exported, with the same weights?")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["FILE", "--batch", "8"], "--batch is for models"),
        (["FILE", "--precision", "bf16"], "--precision is for models"),
        (["FILE", "--train"], "--train is for models"),
        (["FILE", "--html", "page.html"], "--html is for models"),
        (["FILE", "--against", "openvin"], "openvin names no saved format. Did you mean 'openvino'"),
        (["FILE", "--against", "zentorch"], "zentorch names no saved format"),
        (
            ["FILE", "--against", "aotinductor"],
            "needs the model that was exported: name its factory, --model module:factory",
        ),
        (["FILE", "--against", "missing.pt2"], "there is no such file"),
        (["m.py:make", "--model", "m.py:make"], "--model is for a .hybrid file"),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], said: str, file: Path) -> None:
    """ArgumentError that says what to do, before anything is measured."""
    with pytest.raises(ArgumentError, match=said):
        _run(*(str(file) if each == "FILE" else each for each in arguments))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """ArtifactError, as where it is loaded."""
    path = tmp_path / "model.hybrid"
    path.write_bytes(b"no model")
    with pytest.raises(ArtifactError, match=r"model\.hybrid"):
        _run(str(path))


@pytest.mark.slow
def test_formats_that_lack_the_model(file: Path) -> None:
    """Without --model the file alone is measured; each other format says what it needs."""
    status, text = _run(str(file), *_QUICK)
    assert status == 0
    assert "\n| hybrid " in text
    assert "no result: AOTInductor: needs the model that was exported (--model module:factory), or its own file" in text
