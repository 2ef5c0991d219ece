"""What each peer makes of a precision. Peers in the folder apart run in processes of their own, where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.compare import Effort, compare
from benchmarks.peers import BASELINES, PRECISIONS, Setting, by_name, title
from torch_hybrid_backend.partition.deviation import relative_error

# Peer -> precisions that it lacks, which its gap says.
_LACKING = {
    "eager": ("int8", "int8+bf16"),
    "inductor": ("int8", "int8+bf16"),
    "onnxruntime": ("bf16", "fp16", "int8+bf16"),
    "zentorch": ("int8-weights", "int4-weights"),
}
# zentorch's integer products of a transformer are wrong (2.13.0.2), which is a gap as well.
_WRONG = {("zentorch", "int8"), ("zentorch", "int8+bf16")}
_TOLERANCES = {"bf16": 0.01, "fp16": 0.01, "int8": 0.05, "int8+bf16": 0.05, "int8-weights": 0.02, "int4-weights": 0.2}


def _two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)).eval()


@pytest.mark.parametrize(
    ("peer", "precision", "executed"),
    [
        ("eager", "bf16", None),
        ("eager", "fp16", None),
        ("eager", "int8-weights", {"linear layers of 8 bits": 3}),
        ("eager", "int4-weights", {"linear layers of 4 bits": 2}),  # ten channels are not packed
        ("hybrid", "int8", {"int8": 3}),
        ("hybrid", "int4-weights", {"int4": 2}),  # a small layer gains nothing
    ],
)
def test_a_precision_is_what_runs(peer: str, precision: str, executed: dict[str, int] | None, tmp_path: Path) -> None:
    """Results are off float32's by no less than rounding, and by no more than such weights or activations cost; what ran is reported."""
    model, inputs = _two_layers(), (torch.randn(4, 128),)
    calibration = [(torch.randn(4, 128),) for _ in range(4)]
    with torch.no_grad():
        expected = model(*inputs)
        prepared = by_name()[peer].load()(model, inputs, Setting(2, tmp_path, precision, calibration))
        error = relative_error(expected, prepared.call())
    assert error is not None
    assert 1e-4 < error < _TOLERANCES[precision]
    assert prepared.report().get("executed") == executed


@pytest.mark.parametrize(("peer", "precision"), [("eager", "int8"), ("inductor", "int8")])
def test_what_a_peer_lacks_is_refused(peer: str, precision: str, tmp_path: Path) -> None:
    """Never computed in another precision without a word."""
    with pytest.raises(NotImplementedError):
        by_name()[peer].load()(_two_layers(), (torch.randn(4, 128),), Setting(2, tmp_path, precision))


def test_baselines_have_titles() -> None:
    """Records name them; what this version does not know is shown by its name."""
    assert [title(peer.name) for peer in BASELINES] == ["eager, float32", "hybrid, float32"]
    assert title("openvino") == "OpenVINO"
    assert title("unknown") == "unknown"


@pytest.mark.full
@pytest.mark.parametrize("precision", [precision for precision in PRECISIONS if precision != "float32"])
@pytest.mark.parametrize("name", [name for name in by_name() if name not in ("eager", "hybrid")])
def test_other_libraries_run_in_a_precision(name: str, precision: str, tmp_path: Path) -> None:
    """A small transformer: within what the precision costs, or a gap that says what the library lacks."""
    peer = by_name()[name]
    if why := peer.missing(precision):
        pytest.skip(why)
    effort = Effort(threads=2, seconds=0.1, rounds=1, timeout_s=600, precision=precision)
    [result] = compare("bert_base", "small", 1, [peer], effort, tmp_path / "log", lambda _: None)
    if precision in _LACKING.get(name, ()):
        assert result["gap"].startswith("NotImplementedError")
    elif "gap" in result:
        assert (name, precision) in _WRONG, result["gap"]
        assert result["gap"].startswith("wrong answer")
    else:
        assert 1e-4 < result["rms_error"] < 5 * _TOLERANCES[precision]
