"""The benchmark for a GPU, tried on the CPU: what it asks of its workers is real, the times mean nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import device, kernels, models, work
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.report import report
from benchmarks.gpu.rows import Row, rows
from torch_hybrid_backend.bench.process import WorkerError, WorkerProcess
from torch_hybrid_backend.bench.worker import State

_CPU = ["--device", "cpu", "--size", "small", "--seconds", "0.01", "--peers", "eager"]
_PEERS = ("eager", "hybrid")


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()


def _main(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["--out", str(out), *_CPU, *arguments])
    return status, json.loads((out / "gpu.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line, and its status is not 0; nothing is written."""
    assert main(["--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "there is no GPU" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rows_are_kept_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is in the record when it is measured; --resume leaves out those that are there, and a budget those that there is no time for."""
    status, record = _main(tmp_path, "--rows", "kernels/gemv/bf16")
    assert status == 0
    assert record["done"] == ["kernels/gemv/bf16/1"]
    assert [(entry["model"], entry["peer"]) for entry in record["kernels"]] == [("one_row bf16", "eager")]
    assert record["kernels"][0]["median_ms"] > 0
    assert record["machine"]["device"] == "cpu"
    assert "one_row bf16" in (tmp_path / "gpu.md").read_text()
    before = record["kernels"]
    more = ["--resume", "--rows", "kernels/gemv/bf16,models/gpt2_decode/bf16/1,models/llama"]
    status, record = _main(tmp_path, *more, "--budget", "29")
    assert status == 0
    assert record["kernels"] == before
    assert "--resume" in capsys.readouterr().out
    assert "models/gpt2_decode/bf16/1" not in record["done"]


def test_a_peer_that_dies_costs_only_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured in another process, as far as there is time."""
    asked: list[str] = []

    def ask(self: WorkerProcess, message: object, within_s: float) -> Any:
        match message:
            case work.PreparePeer(peer):
                asked.append(peer)
                if peer == "inductor":
                    raise WorkerError("the process ended by SIGSEGV")
                return {"compile_s": 1.0}
            case work.TimePeers():
                return {peer: {"median_ms": 2.0} for peer in asked[-2:]}
        return {}

    monkeypatch.setattr(WorkerProcess, "ask", ask)
    arguments = ["--rows", "models/llama_block/bf16/1", "--peers", "eager,inductor,hybrid"]
    status, record = _main(tmp_path, *arguments)
    first = {entry["peer"]: entry for entry in record["results"] if entry["model"] == "llama_block bf16"}
    assert first["inductor"]["gap"] == "the process ended by SIGSEGV"
    assert "median_ms" not in first["inductor"]
    assert first["eager"]["median_ms"] == first["hybrid"]["median_ms"] == 2.0
    assert asked[:4] == ["eager", "inductor", "eager", "hybrid"]
    assert status == 0  # ours has its figures


def test_a_row_that_time_ran_out_for_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that time ran out for has no figure, and --resume measures it."""

    def ask(self: WorkerProcess, message: object, within_s: float) -> Any:
        time.sleep(1.1)
        raise WorkerError("no answer within 1 s")

    monkeypatch.setattr(WorkerProcess, "ask", ask)
    monkeypatch.setattr("benchmarks.gpu.__main__.rows", lambda: (Row("overhead", least_s=0.1),))
    status, record = _main(tmp_path, "--budget", "1")
    assert status == 1
    assert record["gaps"] == {"overhead": "no answer within 1 s"}
    assert record["done"] == []


def test_a_wrong_result_is_no_figure() -> None:
    """By dtype: what is further from the exact result than the dtype's rounding, or than three times eager's error."""
    torch.manual_seed(0)
    exact = torch.randn(1000)
    rounded = exact.bfloat16()
    assert device.mistake([rounded], [exact], [rounded], "bf16") == ""
    assert "off by" in device.mistake([rounded], [exact], [rounded * 1.1], "bf16")
    assert "off by" in device.mistake([exact], [exact.double()], [exact * 1.01], "fp32")
    assert "wrong answer" in device.mistake([exact], [exact], [rounded], "fp32")
    assert "wrong answer" in device.mistake([exact], [exact], [exact.where(exact < 2, torch.nan)], "fp32")
    assert "differs" in device.mistake([torch.tensor([1])], [torch.tensor([1])], [torch.tensor([2])], "fp32")


def test_what_workers_answer() -> None:
    """A kernel, and what the host takes for one; a model, checked and timed; the ceilings."""
    state = State()
    # PyTorch's own test tools, which other tests import, forbid to set what a worker sets for its whole process.
    with torch.no_grad(), torch.backends.__allow_nonbracketed_mutation():
        ceilings = work.Rooflines("cpu", "small", 0.01).answer(state)
        assert min(ceilings[name] for name in ("copy_gbytes", "launch_us")) > 0
        eager, ours = work.KernelRow("softmax", _PEERS, "fp32", "cpu", "small", ceilings, 0.01).answer(state)
        assert ours["engines"] == ["tvm"] or ours["engines"] == ["eager"]
        assert min(eager["median_ms"], ours["median_ms"], ours["gbytes"]) > 0
        host = work.HostOverhead("cpu", kernels=20, rounds=3).answer(state)
        assert host["bare_launch_us"] > 0
        work.Build("llama_block", 1, "fp32", "cpu", "small").answer(state)
        assert "gap" not in work.PreparePeer("eager").answer(state)
        times = work.TimePeers(0.01).answer(state)
    assert times["eager"]["median_ms"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", models.CASES)
def test_every_model(name: str) -> None:
    """Eager, inductor and ours agree on each, in the dtypes that it is measured in."""
    for dtype in ("fp32", "bf16"):
        state = State()
        with torch.no_grad():
            work.Build(name, 2, dtype, "cpu", "small").answer(state)
            for peer in ("eager", "inductor", "hybrid"):
                assert "gap" not in work.PreparePeer(peer).answer(state)


@pytest.mark.full
@pytest.mark.parametrize("case", [case.name for case in kernels.CASES])
def test_every_kernel(case: str) -> None:
    """Likewise."""
    for dtype in ("fp32", "bf16"):
        with torch.no_grad():
            peers = ("eager", "inductor", "hybrid")
            for entry in work.KernelRow(case, peers, dtype, "cpu", "small", {}, 0.01).answer(State()):
                assert "gap" not in entry


def test_rows_come_in_the_order_of_what_they_tell() -> None:
    """Ceilings, tests and the host, then kernels and models in bfloat16, then all else; names are unique."""
    names = [row.name for row in rows()]
    assert names[:4] == ["rooflines", "tests", "overhead", "kernels/pointwise/bf16/1"]
    assert len(set(names)) == len(names)
    later = names.index("models/resnet50/bf16/1/max-autotune")
    assert names.index("models/training/bf16/8") < later < names.index("models/resnet50/fp16/1")
    assert names.index("models/resnet50/fp16/1") < names.index("models/resnet50/bf16/64")


def _entry(model: str, peer: str, ms: float, **more: object) -> dict[str, object]:
    return {"model": model, "batch": 1, "peer": peer, "median_ms": ms, **more}


def test_the_report_tells_who_wins_and_what_was_missed() -> None:
    """Geometric means over the rows that both have, and the goals."""
    kernel = {"kind": "softmax", "gbytes": 4000.0}
    record = {
        "machine": {"device": "a GPU", "versions": {"torch": "2.11"}},
        "rooflines": {"copy_gbytes": 4300.0},
        "host": {"bare_launch_us": 1.5, "above_bare_us": 0.4, "fixed_us": 12.0},
        "kernels": [
            _entry("softmax bf16", "eager", 0.2, kind="softmax"),
            _entry("softmax bf16", "hybrid", 0.1, **kernel, share=0.85),
            _entry("square bf16", "eager", 1.0, kind="matmul"),
            _entry("square bf16", "hybrid", 1.2, kind="matmul", tflops=600.0),
        ],
        "results": [
            _entry("resnet50 bf16", "eager", 4.0, peak_mib=100.0),
            _entry("resnet50 bf16", "inductor", 2.0, peak_mib=120.0),
            _entry("resnet50 bf16", "hybrid", 1.0, peak_mib=110.0),
            {"model": "vit_b16 bf16", "batch": 1, "peer": "hybrid", "gap": "wrong answer"},
        ],
        "gaps": {"tests": "not done within 90 s"},
    }
    text = report(record)
    assert "inductor / hybrid 2.000 (geometric mean, goal 1.1), ahead in 100% of 1 rows" in text
    assert "below their goal (90% of a copy's bandwidth, GEMV 80%): softmax bf16 85%" in text
    assert "below 95% of eager's speed: square bf16" in text
    assert "host: above the goal" in text
    assert "than 1.05 times eager's: resnet50 bf16 batch 1" in text
    assert "no figure: vit_b16 bf16 batch 1 hybrid: wrong answer" in text
    assert "no figure: tests: not done within 90 s" in text
