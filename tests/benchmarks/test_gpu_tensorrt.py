"""`benchmarks.gpu --tensorrt`, tried on the CPU: where TensorRT does not run nothing is claimed; what it would measure is asked for rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import tensorrt, work
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import report
from benchmarks.gpu.rows import rows, tensorrt_rows
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess
from torch_hybrid_backend.bench.worker import State

_CPU = ["--tensorrt", "--device", "cpu", "--size", "small", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()


def test_rows_begin_with_the_probe_and_have_names_of_their_own() -> None:
    """Beside those of the other table; training steps are not among them."""
    found = tensorrt_rows()
    assert found[0].part == tensorrt.PART
    assert all(row.peers == tensorrt.PEERS and row.name.endswith("/tensorrt") for row in found[1:])
    names = [row.name for row in (*found, *rows())]
    assert len(set(names)) == len(names)
    assert not any("training" in row.name for row in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_it_does_not_run_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exact error, in the record and in the report; no row is measured, whichever were asked for."""
    assert main(["--out", str(tmp_path), *_CPU, "--rows", "models/llama"]) == 1
    record = json.loads((tmp_path / "gpu-tensorrt.json").read_text())
    why = record["tensorrt"]["gap"]
    assert "TensorRT" in why or "there is no GPU" in why
    assert record["results"] == []
    out = capsys.readouterr().out
    assert f"TensorRT does not run here, and nothing else is measured: {why}" in out
    assert f"no figure: tensorrt: {why}" in out
    assert "hybrid above" not in out


def test_a_row_asks_each_peer_and_then_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that build engines are started warm, each in a process of its own; one that raises there keeps its other figures."""
    asked: list[tuple[str, int]] = []
    workers: list[int] = []

    def ask(self: WorkerProcess, message: object, within_s: float) -> Any:
        workers.append(id(self))
        match message:
            case tensorrt.Probe():
                return {"installed": "TensorRT-RTX", "build_s": 1.0, "engine_us": 9.0, "eager_us": 11.0}
            case work.PreparePeer(peer):
                return {"compile_s": 1.0, "operators_compiled": 0.5}
            case work.TimePeers():
                return {peer: {"median_ms": 2.0} for peer in tensorrt.PEERS}
            case tensorrt.WarmStart(peer):
                asked.append((peer, id(self)))
                if peer == "tensorrt":
                    raise WorkerError("the process ended by SIGSEGV")
                return {"warm_s": 2.0, "warm_builds": 0}
        return None

    monkeypatch.setattr(WorkerProcess, "ask", ask)
    monkeypatch.setattr(WorkerProcess, "__init__", lambda self, *_: None)
    monkeypatch.setattr(WorkerProcess, "end", lambda self: None)
    assert main(["--out", str(tmp_path), *_CPU, "--rows", "models/llama_block/bf16/1"]) == 0
    record = json.loads((tmp_path / "gpu-tensorrt.json").read_text())
    found = {entry["peer"]: entry for entry in record["results"]}
    assert list(found) == ["eager", "inductor", "torch_tensorrt", "triton", "tensorrt", "hybrid"]
    assert {entry["model"] for entry in record["results"]} == {"llama_block bf16 tensorrt"}
    assert [peer for peer, _ in asked] == ["tensorrt", "hybrid tensorrt"]
    assert found["hybrid"]["warm_builds"] == 0
    assert found["tensorrt"]["warm_gap"] == "the process ended by SIGSEGV"
    assert found["tensorrt"]["median_ms"] == 2.0
    assert "better engine / hybrid" in (tmp_path / "gpu-tensorrt.md").read_text()


def test_peers_have_the_engines_that_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engines are chosen by the setting `engines`; Torch-TensorRT's own is no engine of ours."""
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        work, "compile_graph", lambda gm, inputs, config, on_plan: given.append(config.engines) or gm.forward
    )
    for peer in tensorrt.ENGINES:
        torch._dynamo.reset()
        work.compile_with(peer, [])(lambda x: x + 1)(torch.ones(2))
    assert given == [("triton", "eager"), ("tensorrt", "eager"), ("tensorrt", "triton", "eager")]
    with pytest.raises(ValueError, match="must be one of hybrid, eager, inductor, torch_tensorrt, triton"):
        work.compile_with("tensorflow", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_workers_answer() -> None:
    """On the CPU TensorRT takes no part: the figures are there, and say that no engine ran."""
    state = State()
    with torch.no_grad(), torch.backends.__allow_nonbracketed_mutation():
        work.Build("llama_block", 1, "fp32", "cpu", "small").answer(state)
        work.PreparePeer("eager").answer(state)
        figures = work.PreparePeer("tensorrt").answer(state)
        assert "gap" not in figures
        assert (figures["engines"], figures["operators_compiled"]) == ([], 0.0)
        assert figures["build_s"] >= 0
        warm = tensorrt.WarmStart("tensorrt").answer(state)
        assert warm["warm_builds"] == 0
        assert warm["warm_s"] > 0


def _entry(peer: str, ms: float, **more: object) -> dict[str, object]:
    return {"model": "resnet50 bf16 tensorrt", "batch": 1, "peer": peer, "median_ms": ms, **more}


def test_the_report_tells_what_falls_short() -> None:
    """By row: the better engine alone, whole models, memory with what engines hold outside PyTorch's allocator, warm starts."""
    record: dict[str, Any] = {
        "machine": {"device": "a GPU", "versions": {}},
        "kernels": [],
        "results": [
            _entry("eager", 4.0, peak_mib=100.0, outside_mib=0.0),
            _entry("inductor", 2.0),
            _entry("torch_tensorrt", 1.5),
            _entry("triton", 1.2, compile_s=10.0),
            _entry("tensorrt", 1.0, operators_compiled=0.9, warm_gap="the process ended by SIGSEGV"),
            _entry(
                "hybrid", 1.1, compile_s=500.0, peak_mib=90.0, outside_mib=40.0, build_s=12.5, warm_s=2.0, warm_builds=1
            ),
        ],
        "gaps": {},
        "tensorrt": {"installed": "TensorRT-RTX 1.5", "engine_us": 12.0, "eager_us": 11.0},
    }
    text = report(record)
    title = "resnet50 bf16 tensorrt batch 1"
    assert "TensorRT: installed TensorRT-RTX 1.5, engine_us 12.0, eager_us 11.0" in text
    assert f"1.02 times the better of TensorRT and Triton alone: {title} (1.10)" in text
    assert f"does not take whole, on which hybrid is not ahead: {title}" in text
    assert f"memory above 1.1 times eager's: {title} (1.30)" in text
    assert f"warm starts that build, or take above 3 s: {title} (1 builds, 2.0 s)" in text
    assert f"longer than with Triton alone: {title} (490.0 s)" in text
    assert "no warm start: resnet50 bf16 tensorrt batch 1 tensorrt: the process ended by SIGSEGV" in text
    assert "0.91; 100 / - / - / - / - / 130; 12.5, 2.0 (1)" in text
    assert "models: " not in text  # the other table's means are of its own rows
