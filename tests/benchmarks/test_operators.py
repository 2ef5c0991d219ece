"""The operator benchmark: its table of shapes, and that what it times is the operator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.operators import __main__ as command
from benchmarks.operators import shapes
from benchmarks.operators.ours import EPILOGUES, Bench, problem
from benchmarks.operators.peers import peers
from benchmarks.operators.shapes import Case, Tensor
from benchmarks.operators.work import work
from torch_hybrid_backend.store import Store


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
            for call in peers(made, inductor=False).values():
                torch.testing.assert_close(call().contiguous(), expected, atol=1e-4, rtol=1e-4)


def test_the_table_holds_operators_of_every_kind_of_model() -> None:
    """The committed table can be read, has the published shapes, and what is written is read back."""
    table = shapes.load()
    assert {case.kind for case in table} >= {"conv", "depthwise", "linear", "attention", "norm", "pool"}
    resnet = [case for case in table if ("resnet50", 3) in case.counts and case.kind == "conv" and case.batch == 1]
    assert "1x64x56x56 -> 64 k3x3" in {case.title for case in resnet}
    assert all(shapes._decode(shapes._encode(case)) == case for case in (*table[:50], *_CASES))


def test_equal_operators_are_counted_together() -> None:
    """One entry for each distinct operator, with its count in every model."""
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

    def result(case: Case, ours: float, onednn: float) -> command.Result:
        return command.Result(case, "none", {"ours": ours, "aten": 99.0, "onednn": onednn}, 1e6, 1e6, 0.5)

    results = [result(_LINEAR, 10.0, 8.0), result(_CASES[0], 5.0, 6.0), result(_CASES[2], 9.0, 8.0)]
    lines = command.losses(results, ["lstm", "unet"]).splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| 6", "lstm"], ["| 2", "unet"], ["| 2", "unet"]]
    assert "| 1.25 (onednn) |" not in command.table(results)
    assert "| 0.80 (onednn) |" in command.table(results)


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt kind is an error that names the legal ones."""
    with pytest.raises(SystemExit):
        command.main(["--only", "conf"])
    assert "'conv'" in capsys.readouterr().err
