"""Precisions of other libraries: a small transformer of the catalogue, in processes of their own, where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compare import Effort, compare
from torch_hybrid_backend.bench.peers import BASELINES, PRECISIONS, by_name, title

# Peer -> precisions that it lacks, which its gap says.
_LACKING = {
    "inductor": ("int8", "int8+bf16"),
    "onnxruntime": ("bf16", "fp16", "int8+bf16"),
    "zentorch": ("int8-weights", "int4-weights"),
}
# zentorch's integer products of a transformer are wrong (2.13.0.2), which is a gap as well.
_WRONG = {("zentorch", "int8"), ("zentorch", "int8+bf16")}
_TOLERANCES = {"bf16": 0.01, "fp16": 0.01, "int8": 0.05, "int8+bf16": 0.05, "int8-weights": 0.02, "int4-weights": 0.2}


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
        assert result["gap"].startswith("it")
    elif "gap" in result:
        assert (name, precision) in _WRONG, result["gap"]
        assert result["gap"].startswith("wrong answer")
    else:
        assert 1e-4 < result["rms_error"] < 5 * _TOLERANCES[precision]
