"""The runner's command line and files; the comparison itself is tested in test_compare.py."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from benchmarks.compare import Effort
from benchmarks.roofline import Peak
from torch_hybrid_backend.bench.peers import Peer

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]
_OPTIONS = [
    "--models",
    "lstm,unet",
    "--peers",
    "eager,hybrid,openvino",
    "--batch",
    "1",
    "--no-overhead",
    "--size",
    "small",
]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The rows that were compared; figures are made up, OpenVINO has none."""
    rows: list[tuple[str, int]] = []

    def compare(
        model: str, size: str, batch: int, peers: Sequence[Peer], effort: Effort, log: Path, say: Say
    ) -> list[dict[str, Any]]:
        rows.append((model, batch))
        say("made up")
        figures = {
            "median_ms": 2.0,
            "p90_ms": 3.0,
            "items_per_s": 500.0,
            "compile_cold_s": 1.0,
            "gflop": 0.1,
            "samples_ms": [2.0],
        }
        return [
            {
                "model": model,
                "batch": batch,
                "peer": peer.name,
                **({"gap": "no rule"} if peer.name == "openvino" else figures),
            }
            for peer in peers
        ]

    monkeypatch.setattr(run, "compare", compare)
    monkeypatch.setattr(run, "peak", lambda threads: Peak(threads, 500.0, {}, {"vpdpbusd": 900.0}))
    return rows


def test_results_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compared: list[Any]
) -> None:
    """JSON with machine, settings and summary; the same tables on standard output and beside it; gaps are no failure."""
    out = tmp_path / "below" / "zoo.json"
    assert run.main([*_OPTIONS, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["machine"]["versions"]["torch"]
    assert record["settings"]["size"] == "small"
    assert [r["peer"] for r in record["results"]] == ["eager", "hybrid", "openvino"] * 2
    assert record["results"][0]["peak_share"] == 0.1  # 0.1 GFLOP in 2 ms, of 500 GFLOP/s
    assert "samples_ms" not in record["results"][0]
    assert record["summary"]["eager"] == {"rows": 2, "geometric_mean": 1.0, "share_ahead": 1.0}
    printed = capsys.readouterr()
    assert "| LSTM classifier |     1 |     2.00 |      2.00 |           - |          1.00 |" in printed.out
    assert "OpenVINO: no rule (LSTM classifier 1, U-Net 1)" in printed.out
    assert out.with_suffix(".md").read_text().strip() in printed.out
    assert "U-Net, batch 1: eager 2 ms, hybrid 2 ms, openvino -" in printed.err


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt keeps complete rows, and they are not measured again."""
    out = tmp_path / "zoo.json"
    whole = run.compare

    def interrupted(model: str, *rest: Any) -> list[dict[str, Any]]:
        if model == "unet":
            raise KeyboardInterrupt
        return whole(model, *rest)

    monkeypatch.setattr(run, "compare", interrupted)
    assert run.main([*_OPTIONS, "--out", str(out)]) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.setattr(run, "compare", whole)
    assert run.main([*_OPTIONS, "--out", str(out), "--resume"]) == 0
    assert compared == [("lstm", 1), ("unet", 1)]
    assert len(json.loads(out.read_text())["results"]) == 6


def test_rows_are_measured_again_in_their_place(tmp_path: Path, compared: list[Any]) -> None:
    """The named ones only; a row that the file has not had comes last."""
    out = tmp_path / "zoo.json"
    names = ["--peers", "eager", "--no-overhead", "--size", "small", "--out", str(out)]
    run.main(["--models", "lstm,unet", "--batch", "1,8", *names])
    compared.clear()
    assert run.main(["--models", "lstm,minilm", "--batch", "1", "--again", *names]) == 0
    assert compared == [("lstm", 1), ("minilm", 1)]
    found = [(r["model"], r["batch"]) for r in json.loads(out.read_text())["results"]]
    assert found == [("lstm", 1), ("lstm", 8), ("unet", 1), ("unet", 8), ("minilm", 1)]


@pytest.mark.parametrize(
    ("given", "warm"),
    [([], {"hybrid", "inductor"}), (["--no-warm"], set()), (["--warm", "inductor_freezing"], {"inductor_freezing"})],
)
def test_second_processes_are_started_for_the_peers_named(
    tmp_path: Path, compared: list[Any], monkeypatch: pytest.MonkeyPatch, given: list[str], warm: set[str]
) -> None:
    """Warm compile times cost a process each: by default those of hybrid and inductor are measured."""
    asked: list[frozenset[str]] = []
    whole = run.compare

    def noted(*rest: Any) -> list[dict[str, Any]]:
        asked.append(rest[4].warm)
        return whole(*rest)

    monkeypatch.setattr(run, "compare", noted)
    run.main([*_OPTIONS, "--out", str(tmp_path / "zoo.json"), *given])
    assert asked == [warm, warm]


def test_a_precision_has_its_own_file_and_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager and hybrid in float32 are timed beside the peers, and are none themselves: the best of the others is of the precision asked for."""
    monkeypatch.setattr(run.table, "RESULTS", tmp_path)
    assert run.main([*_OPTIONS, "--precision", "int8"]) == 0
    [out] = tmp_path.glob("*/zoo-int8.json")
    record = json.loads(out.read_text())
    assert record["settings"]["precision"] == "int8"
    names = ["eager_float32", "hybrid_float32", "eager", "hybrid", "openvino"]
    assert [r["peer"] for r in record["results"]] == names * 2
    assert record["overhead"] == []
    assert record["machine"]["peak_gflops"] == 900.0
    assert "hybrid, float32 ms" in capsys.readouterr().out
    assert run.main([*_OPTIONS, "--precision", "int8", "--resume"]) == 0
    assert len(compared) == 2  # nothing was left to do
    assert run.main([*_OPTIONS, "--precision", "bf16", "--resume", "--out", str(out)]) == 2
    assert "another precision" in capsys.readouterr().err


def test_resuming_refuses_another_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compared: list[Any]
) -> None:
    """Figures of two machines, or of two settings, are never mixed in one file."""
    out = tmp_path / "zoo.json"
    run.main([*_OPTIONS, "--out", str(out)])
    assert run.main([*_OPTIONS, "--out", str(out), "--resume", "--size", "full"]) == 2
    assert "another size" in capsys.readouterr().err


def test_ours_without_a_result_is_a_failure(
    tmp_path: Path, compared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's gap is shown; one of this package's also is the exit status."""
    monkeypatch.setattr(run, "compare", lambda model, size, batch, peers, *_: [
        {"model": model, "batch": batch, "peer": peer.name, "gap": "wrong answer"} for peer in peers
    ])  # fmt: skip
    assert run.main([*_OPTIONS, "--out", str(tmp_path / "zoo.json")]) == 1


@pytest.mark.parametrize("text", ["resnet51", ""])
def test_unknown_names_are_refused_with_the_legal_ones(text: str) -> None:
    """A misspelt model is an error, not an empty benchmark."""
    with pytest.raises(argparse.ArgumentTypeError, match="must be among resnet50, bert_base"):
        run._listed(["resnet50", "bert_base"])(text)


def test_an_instruction_set_holds_for_the_whole_run(tmp_path: Path) -> None:
    """--isa reaches every peer's process, PyTorch's own part included, and names the place of the results."""
    code = (
        "import os, torch\n"
        "from benchmarks import run\n"
        "run.compare = lambda *rest: print(torch.backends.cpu.get_cpu_capability(), os.environ['ONEDNN_MAX_CPU_ISA']) or []\n"
        "run.write = lambda out, record: print(out, record['machine']['capability'])\n"
        "run.peak = lambda threads: __import__('benchmarks.roofline').roofline.Peak(threads, 500.0, {})\n"
        "raise SystemExit(run.main(['--models', 'lstm', '--batch', '1', '--isa', 'avx2', '--no-overhead']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "AVX2 AVX2_VNNI\n" in done.stdout
    assert re.search(r"-avx2/zoo.json AVX2\n", done.stdout)
