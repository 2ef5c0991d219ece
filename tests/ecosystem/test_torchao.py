"""torchao's quantized models, compiled: what its graphs and tensors say is what is computed.

torchao lies in a folder apart (`make .venv/torchao`), and one process runs all models: wherever it can be found, transformers imports it, and
so would every other test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.torchao_models import MODELS, Figures

_ROOT = Path(__file__).resolve().parents[2]
_APART = Path(sys.prefix) / "torchao"

pytestmark = pytest.mark.skipif(
    PathFinder.find_spec("torchao", [*sys.path, str(_APART)]) is None, reason="needs torchao: make .venv/torchao"
)


@pytest.fixture(scope="module")
def found(kernel_directory: Path) -> dict[str, Any]:
    """The findings of the process; its settings are those of the other tests here."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_")} | {
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{_APART}",
        "HYBRID_CACHE_DIR": str(kernel_directory),
        "HYBRID_PLACEMENT": "estimate",
    }
    command = [sys.executable, "-m", "tests.ecosystem.torchao_models"]
    done = subprocess.run(command, cwd=_ROOT, env=settings, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _of(found: dict[str, Any], name: str) -> Figures:
    figures = found["found"][name]
    assert isinstance(figures, dict), figures
    return figures


@pytest.mark.parametrize("name", MODELS)
def test_results_are_eagers(name: str, found: dict[str, Any]) -> None:
    """In one graph, all of which our engines run, of a model that quantization changes a little: graphs that were quantized by export, and
    weights of 8 and 4 bits that are torchao's tensors, with rows quantized in every call or not."""
    figures = _of(found, name)
    assert 1e-4 < figures["quantization"] < (0.15 if "int4" in name else 0.05)
    assert figures["difference"] < (5e-3 if name == "packed int4 weights" else 1e-3)  # it is in bfloat16
    assert (figures["graphs"], figures["in_eager"]) == (1, [])


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("int8", "aten._int_mm.default"),
        ("int8, zero points", "aten._int_mm.default"),
        ("packed int4 weights", "quantized_decomposed.dequantize_per_channel_group.default"),
    ],
)
def test_operators_of_its_tensors_are_kept(name: str, operator: str, found: dict[str, Any]) -> None:
    """Products of integers stay what they are; what PyTorch packs is read as groups of integers."""
    assert operator in _of(found, name)["operators"]


def test_the_package_does_not_import_it(found: dict[str, Any]) -> None:
    """The package does not import torchao, even where it is installed."""
    assert found["was_imported"] is False
