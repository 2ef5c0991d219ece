"""Files of ranges: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from torch_hybrid_backend.core.verdict import Reason
from torch_hybrid_backend.errors import QuantizationError
from torch_hybrid_backend.quantization.quantize import quantize
from torch_hybrid_backend.quantization.ranges import Ranges, Site, _checksum, fingerprint, left_in_float


def _model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


def _saved(path: Path) -> Ranges:
    sites = {
        "0": Site("linear", ((-1.5, 1 / 3),), (1.0, 0.1, 2.5)),
        "0#2": Site("matmul", ((0.0, 1e-20), (-7.0, 7.0))),
        "2": Site("linear"),
        "#add1": Site("add", (None, (-0.1, 0.2))),
    }
    ranges = Ranges(fingerprint(_model()), sites, {"1": "excluded"}, weight_bits=7)
    ranges.save(path)
    return ranges


def test_ranges_come_back(tmp_path: Path) -> None:
    """Bit by bit, for any model of the same structure, whatever its weights."""
    assert _saved(tmp_path / "r.json") == Ranges.load(tmp_path / "r.json", _model())


def test_files_that_do_not_tell_bits_of_weights(tmp_path: Path) -> None:
    """Files of versions that did not write the number: weights have 8 bits."""
    ranges = _saved(tmp_path / "r.json")
    head = json.loads((tmp_path / "r.json").read_text())
    assert head.pop("weight_bits") == 7
    content = {key: head[key] for key in ("model", "sites", "in_float")}
    (tmp_path / "r.json").write_text(json.dumps(head | {"sha256": _checksum(content)}))
    assert Ranges.load(tmp_path / "r.json", _model()) == replace(ranges, weight_bits=8)


def test_ranges_of_another_model_are_refused(tmp_path: Path) -> None:
    """A model with a layer of another width, or another kind, is another model."""
    _saved(tmp_path / "r.json")
    for other in (_model(5), nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))):
        with pytest.raises(QuantizationError, match="are another model's"):
            Ranges.load(tmp_path / "r.json", other)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("-1.5", "-1.6"),
        lambda text: text.replace('"version": 1', '"version": 9'),
        lambda text: text.replace("torch_hybrid_backend ranges", "something else"),
        lambda text: text.replace('"sites"', '"cites"'),
        lambda text: json.dumps({"format": "torch_hybrid_backend ranges", "version": 1}),
        lambda text: "[" * 10**6,
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    """The same error names the file and what to do, whatever is wrong with the file."""
    path = tmp_path / "r.json"
    _saved(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(QuantizationError, match=r"r\.json cannot be read: .*; calibrate again"):
        Ranges.load(path, _model())


@pytest.mark.parametrize(
    "change",
    [
        {"in_float": {"1": "because"}},
        {"in_float": {"1": ["excluded"]}},
        {"in_float": ["1"]},
        {"sites": {"0": {"kind": "linear", "ranges": [[1.0]], "smoothing": None}}},
        {"sites": {"0": {"kind": "linear", "ranges": [[0, 10**400]], "smoothing": None}}},
        {"weight_bits": 4},
        {"weight_bits": None},
    ],
)
def test_content_that_means_nothing_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """With the same error, though its checksum is right: `explain` would stumble on it later."""
    path = tmp_path / "r.json"
    _saved(path)
    head = json.loads(path.read_text())
    content = {key: head[key] for key in ("model", "sites", "in_float")} | change
    path.write_text(json.dumps(head | content | {"sha256": _checksum(content)}))
    with pytest.raises(QuantizationError, match=r"r\.json cannot be read: .*; calibrate again"):
        Ranges.load(path, _model())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """With the same error."""
    with pytest.raises(QuantizationError, match="cannot be read"):
        Ranges.load(tmp_path / "none.json", _model())


def test_what_is_left_in_float_as_seen_from_the_model() -> None:
    """Every quantized module in a model tells its layers, with its path; sites that are quantized would be float for their operands alone."""
    quantized = quantize(_model().eval(), calibration="none", exclude=("2",))
    quantized.ranges = replace(
        quantized.ranges, in_float={**quantized.ranges.in_float, "": "accuracy", "#2": "uncalibrated"}
    )
    alone, inside = left_in_float(quantized), left_in_float(nn.ModuleDict({"head": quantized}))
    assert {site: why.code for site, why in alone.items()} == {
        "model": Reason.ACCURACY,
        "model#2": Reason.UNCALIBRATED,
        "model.0": Reason.UNSUPPORTED,
        "model.2": Reason.EXCLUDED,
    }
    assert inside == {f"head.{site}": why for site, why in alone.items()}
    assert left_in_float(_model()) == {}
