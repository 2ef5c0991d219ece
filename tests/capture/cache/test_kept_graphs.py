"""Graphs that a second process finds: of quantized models, in all forms that they have, and what it must not take for one of them.

torchao lies in a folder apart (`make .venv/torchao`), as in `tests/ecosystem/test_torchao.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.capture.cache.kept_graphs import SUBJECTS
from tests.ecosystem.torchao_models import MODELS

_ROOT = Path(__file__).resolve().parents[3]
_APART = Path(sys.prefix) / "torchao"

_OF_TORCH = ("int8pack_mm", "int4pack_mm", "autocast", "quantize", "quantize, calibrated")
_OF_TORCHAO = (*MODELS, "rows of int8", "groups of 32")
# Each like one of those but for what the key must tell apart.
_OTHERS = ("int4pack_mm, groups of 64", "rows of int8, another class", "groups of 64")
_NEVER_KEPT = ("returned", "a class of the program's", "a method of the program's")

_needs_torchao = pytest.mark.skipif(
    PathFinder.find_spec("torchao", [*sys.path, str(_APART)]) is None, reason="needs torchao: make .venv/torchao"
)


def _run(names: Iterable[str], cache: Path, torchao: Path = _APART) -> dict[str, Any]:
    """Run a process of its own, and return what it finds."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_")} | {
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{torchao}",
        "HYBRID_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-m", "tests.capture.cache.kept_graphs", *names]
    done = subprocess.run(command, cwd=_ROOT, env=settings, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _check_same(found: dict[str, Any], first: dict[str, Any]) -> None:
    for name, each in found.items():
        assert each["output"] == first[name]["output"], name
        assert each["difference"] < 1e-5, name


def test_of_torch(tmp_path: Path) -> None:
    """PyTorch's products of packed weights, models under autocast and of `quantize`: the second process traces none, and computes the same
    bits. Packed weights of another group size are traced."""
    first = _run(_OF_TORCH, tmp_path)
    assert {name: each["traced"] for name, each in first.items()} == dict.fromkeys(_OF_TORCH, 1)
    other = "int4pack_mm, groups of 64"
    second = _run((other, *_OF_TORCH), tmp_path)
    assert {name: each["traced"] for name, each in second.items()} == {other: 1, **dict.fromkeys(_OF_TORCH, 0)}
    assert second.pop(other)["difference"] < 1e-5
    _check_same(second, first)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def first(cache: Path) -> dict[str, Any]:
    """The first process's findings; the process fills the cache."""
    return _run(_OF_TORCHAO, cache)


@pytest.fixture(scope="module")
def second(cache: Path, first: dict[str, Any]) -> dict[str, Any]:
    """The second process's findings: first of all subjects whose graphs are not there."""
    assert first
    replaced = ("replaced by groups of 64", "replaced by another class")
    return _run((*_OTHERS, *replaced, *_OF_TORCHAO, *_NEVER_KEPT), cache)


@_needs_torchao
@pytest.mark.parametrize("name", _OF_TORCHAO)
def test_of_torchao(name: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Exported models, and weights that are torchao's tensors: the second process does not trace them, and computes the same bits. The first
    traces each though many have the same parts: rows that are quantized in each call, by one rule or another, or not."""
    assert (first[name]["traced"], second[name]["traced"]) == (1, 0)
    _check_same({name: second[name]}, first)


@_needs_torchao
@pytest.mark.parametrize("name", _OTHERS)
def test_others_are_traced(name: str, second: dict[str, Any]) -> None:
    """Weights with parts of the same shapes that are of another class, and weights of another group size."""
    assert second[name]["traced"] == 1
    assert second[name]["difference"] < 1e-5


@_needs_torchao
@pytest.mark.parametrize("name", ["replaced by groups of 64", "replaced by another class"])
def test_a_weight_is_replaced(name: str, second: dict[str, Any]) -> None:
    """By one of another group size or class, between two calls: each has its graph, though both are kept."""
    assert second[name]["traced"] == 0
    assert second[name]["difference"] < 1e-5


@_needs_torchao
@pytest.mark.parametrize("name", _NEVER_KEPT)
def test_what_is_never_kept(cache: Path, name: str, second: dict[str, Any]) -> None:
    """Outputs that are made of others; a class of the program's; a class of torchao's in which the program has put a product of its own."""
    assert second[name]["traced"] == 1
    assert second[name]["difference"] < 1e-5
    if name == "a method of the program's":
        assert second[name]["output"] != second["rows of int8"]["output"]


@_needs_torchao
@pytest.mark.full
def test_damaged_entries_are_traced_anew(tmp_path: Path) -> None:
    """And replaced: the process after finds them."""
    names = ("rows of int8", "groups of 32")
    first = _run(names, tmp_path)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and "captures" in str(path.relative_to(tmp_path))]
    assert len(kept) == len(names)
    for path in kept:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    for traced in (1, 0):
        found = _run(names, tmp_path)
        assert [each["traced"] for each in found.values()] == [traced] * len(names)
        _check_same(found, first)


@_needs_torchao
@pytest.mark.full
def test_other_sources_of_torchao_are_traced(tmp_path: Path) -> None:
    """An edit to any file of torchao's, of the same version: its methods may do something else now."""
    _run(["rows of int8"], tmp_path / "cache")
    spec = PathFinder.find_spec("torchao", [str(_APART), *sys.path])
    assert spec is not None
    assert spec.origin is not None
    edited = tmp_path / "edited"
    shutil.copytree(Path(spec.origin).parents[1], edited, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (edited / "torchao/quantization/quant_primitives.py").open("a") as file:
        file.write("# edited\n")
    for traced in (1, 0):
        assert _run(["rows of int8"], tmp_path / "cache", edited)["rows of int8"]["traced"] == traced


def test_every_subject_is_tested() -> None:
    """None is left out of the lists above."""
    replaced = ("replaced by groups of 64", "replaced by another class")
    assert {*_OF_TORCH, *_OF_TORCHAO, *_OTHERS, *replaced, *_NEVER_KEPT} == set(SUBJECTS)
