"""The operator benchmark: its table of shapes, and that what it times is the operator."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.operators import __main__ as command
from benchmarks.operators import shapes, tables
from benchmarks.operators.ours import EPILOGUES, Bench, problem
from benchmarks.operators.peers import peers
from benchmarks.operators.results import Result, standing
from benchmarks.operators.selection import representative
from benchmarks.operators.shapes import Case, Tensor
from benchmarks.operators.work import work
from torch_hybrid_backend.storage.store import Store


def _convolution(x: tuple[int, ...], w: tuple[int, ...], stride: int, groups: int = 1) -> Case:
    pad = w[2] // 2
    tensors = (Tensor(x, "float32"), Tensor(w, "float32", constant=True), Tensor(w[:1], "float32", constant=True))
    numbers = ((stride, stride), (pad, pad), (1, 1), False, (0, 0), groups)
    kind = "conv" if groups == 1 else "depthwise"
    return Case(kind, "aten.convolution.default", x[0], (*tensors, *numbers), (), (("unet", 2),))


_LINEAR = Case(
    "linear",
    "aten.addmm.default",
    1,
    (Tensor((5,), "float32", (), True), Tensor((7, 12), "float32"), Tensor((12, 5), "float32", (1, 12), True)),
    (),
    (("lstm", 3), ("unet", 1)),
)
_SOFTMAX = Case("softmax", "aten._softmax.default", 1, (Tensor((3, 33), "float32"), -1, False), (), (("lstm", 1),))
_CASES = (
    _convolution((1, 16, 9, 9), (24, 16, 3, 3), 1),
    _convolution((2, 16, 9, 9), (16, 16, 3, 3), 1),
    _convolution((1, 24, 9, 9), (24, 1, 3, 3), 2, groups=24),
    _convolution((1, 3, 9, 9), (16, 3, 3, 3), 2),
    _LINEAR,
    _SOFTMAX,
)


def test_results_and_those_of_every_peer_are_atens(tmp_path: Path) -> None:
    """Alone, with relu and with a residual: what is timed computes what ATen computes, inside blocked layouts as outside."""
    bench = Bench(Store(tmp_path))
    for case in _CASES:
        for epilogue in EPILOGUES:
            made = problem(case, epilogue)
            expected = made.eager()()
            ours = bench.ours(made, bench.kernels(made))
            torch.testing.assert_close(ours.result(), expected, atol=1e-4, rtol=1e-4)
            assert "onednn" in peers(made, inductor=False) or case is _SOFTMAX
            assert ("mkl" in peers(made, inductor=False)) == (case is _LINEAR)
            for call in peers(made, inductor=False).values():
                torch.testing.assert_close(call().contiguous(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_inductors_generated_code_computes_what_aten_does() -> None:
    """A product by its template, more operators than one function may be recompiled for; convolutions it hands to oneDNN."""
    for rows in range(3, 15):
        case = dataclasses.replace(_SOFTMAX, arguments=(Tensor((rows, 33), "float32"), -1, False))
        made = problem(case, "none")
        torch.testing.assert_close(peers(made, inductor=True)["inductor"](), made.eager()())
    for epilogue in EPILOGUES:
        made = problem(_LINEAR, epilogue)
        torch.testing.assert_close(peers(made, inductor=True)["inductor"](), made.eager()())
    assert "inductor" not in peers(problem(_CASES[0], "none"), inductor=True)


def test_the_table_holds_operators_of_every_kind_of_model() -> None:
    """The committed table can be read, has the published shapes, and what is written is read back."""
    table = shapes.load()
    assert {case.kind for case in table} >= {"conv", "depthwise", "linear", "attention", "norm", "pool"}
    resnet = [case for case in table if ("resnet50", 3) in case.counts and case.kind == "conv" and case.batch == 1]
    assert "1x64x56x56 -> 64 k3x3" in {case.title for case in resnet}
    assert all(shapes._decode(shapes._encode(case)) == case for case in (*table[:50], *_CASES))


def test_tensors_have_the_strides_they_had_in_the_model() -> None:
    """Transposed ones, and expanded ones whose elements share memory."""
    generator = torch.Generator().manual_seed(0)
    for strides in ((1, 5), (0, 1), (2, 0)):
        made = Tensor((5, 2), "float32", strides).make(generator)
        assert (made.shape, made.stride()) == ((5, 2), strides)
        assert made.unique().numel() == 10 // (1 if 0 not in strides else made.shape[strides.index(0)])


def test_equal_operators_are_counted_together() -> None:
    """Each distinct operator has one entry, with its count in every model."""
    once, again = _convolution((1, 16, 9, 9), (24, 16, 3, 3), 1), _convolution((1, 16, 9, 9), (24, 16, 3, 3), 1)
    (merged, linear) = shapes.merged([once, _LINEAR, again])
    assert (merged.counts, linear.counts) == ((("unet", 4),), _LINEAR.counts)


def test_work_is_counted_once() -> None:
    """A multiply-add is two operations; every tensor enters or leaves once."""
    flops, size_bytes = work(_convolution((1, 16, 8, 8), (24, 16, 3, 3), 2))
    assert flops == 2 * 24 * 4 * 4 * 16 * 9
    assert size_bytes == 4 * (16 * 64 + 24 * 16 * 9 + 24 + 24 * 16)


def test_time_lost_is_ranked_by_model() -> None:
    """Slower than the best other, times the count in the model; where we are faster, nothing is lost."""

    def result(case: Case, ours: float, onednn: float) -> Result:
        us = {"ours": ours, "aten": 99.0, "onednn": onednn}
        return Result.of(case, "none", flops=1e6, size_bytes=1e6, peak_share=0.5, microseconds=us)

    results = [result(_LINEAR, 10.0, 8.0), result(_CASES[0], 5.0, 6.0), result(_CASES[2], 9.0, 8.0)]
    lines = tables.losses(results, ["lstm", "unet"]).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| 6", "lstm"], ["| 2", "unet"], ["| 2", "unet"]]
    assert "| 1.25 (onednn) |" not in tables.table(results)
    assert "| 0.80 (onednn) |" in tables.table(results)


def test_a_kind_stands_for_its_operators_by_geometric_means() -> None:
    """Half and twice the time are even; an operator with an error counts nowhere; a side counts where it has a time."""
    us = ({"ours": 2.0, "aten": 1.0}, {"ours": 1.0, "aten": 2.0, "mkl": 3.0})
    results = [Result.of(_LINEAR, "none", peak_share=0.25, microseconds=times) for times in us]
    found = standing([*results, Result.of(_LINEAR, "relu", error="no kernel")])
    assert (found.operators, found.ahead, found.peak_share) == (2, 0.5, 0.25)
    assert found.best == pytest.approx(1.0)
    assert found.ratios == pytest.approx({"aten": 1.0, "mkl": 3.0})


def test_the_representative_operators_are_from_many_models() -> None:
    """A small model's heaviest operator comes before a large model's second; of each kind and batch size as many as asked."""
    large = [_convolution((1, 64, 64, 64), (64 + i, 64, 3, 3), 1) for i in range(10)]
    small = dataclasses.replace(_CASES[0], counts=(("lstm", 1),))
    chosen = representative([*large, small, _LINEAR, _CASES[1]], 2)
    assert chosen == [large[9], small, _LINEAR, _CASES[1]]
    assert representative([*large, small], 3) == [large[8], large[9], small]


def test_a_run_in_pieces_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in the file are not measured again, and are read as they were written; another setting is refused."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "load", lambda: [_LINEAR, _SOFTMAX])
    out = tmp_path / "operators.json"
    some = ["--epilogues", "none", "--budget-s", "0.01", "--out", str(out), "--resume"]
    assert command.main([*some, "--stop-after-s", "-1"]) == 0
    assert not out.exists()
    assert command.main([*some, "--only", "linear"]) == 0
    first = out.read_text()
    assert command.main(some) == 0
    (linear, softmax), (before,) = (json.loads(text)["results"] for text in (out.read_text(), first))
    assert (linear, softmax["kind"]) == (before, "softmax")
    assert Result.read(linear).row() == linear
    assert "| linear | 1 |" in out.with_suffix(".md").read_text()
    assert command.main([*some, "--budget-s", "0.02"]) == 2


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt kind is an error that names the legal ones."""
    with pytest.raises(SystemExit):
        command.main(["--only", "conf"])
    assert "'conv'" in capsys.readouterr().err
