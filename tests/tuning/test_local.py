"""Tuning in this process, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend.tuning.claims import State
from torch_hybrid_backend.tuning.local import Summary

pytest.importorskip("tvm")
FACTORY = f"{Path(__file__).parent / 'factory_for_tests.py'}:make"

# Tunes, and shows what came of it.
_TUNE = """
import json, sys
from pathlib import Path
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.progress import Progress
from torch_hybrid_backend.tuning.local import Request, tune_here

config = Config(cache_dir=Path(sys.argv[2]), compile_threads=2)
summary = tune_here(Request(sys.argv[1], ".", config, float(sys.argv[3])), Progress("tuning", shown=False))
state = summary.state
entries = open_services(config).timings.entries("variants")
shown = {"kernels": state.kernels, "tried": state.tried, "left": state.left, "entries": entries, "text": str(summary)}
print(json.dumps({**shown, "settled": summary.is_settled, "faster": state.faster}))
"""

# Compiles as a user does; shows what was written to the cache, and the variants in use.
_LATER = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1].rpartition(":")[0]).parent))
import torch
from factory_for_tests import make
from torch_hybrid_backend.storage.store import Store
from torch_hybrid_backend.backend import explain
model, args = make()
store = Store(Path(sys.argv[2]))
before = {(usage.kind, key) for usage in store.usage() for key in store.keys(usage.kind)}
with torch.no_grad():
    explanation = explain(model, *args, options={"cache_dir": sys.argv[2]})
after = {(usage.kind, key) for usage in store.usage() for key in store.keys(usage.kind)}
variants = [v for regions in explanation.compiled for region in regions.values() for v in region.variants]
print(json.dumps({"new": sorted(after - before), "variants": variants}))
"""


def tuned(cache: Path, budget_s: float = 1e9, factory: str = FACTORY) -> dict[str, Any]:
    """Results of tuning in a process."""
    return shown(_TUNE, factory, cache, budget_s)


def later(cache: Path) -> dict[str, Any]:
    """Results of a process that compiles the model."""
    return shown(_LATER, FACTORY, cache)


def shown(code: str, *arguments: object) -> dict[str, Any]:
    """The JSON that a process writes last."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    result: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return result


def test_a_later_process_uses_what_was_found(tmp_path: Path) -> None:
    """Nothing is timed or compiled anew, and the variants in use are the fastest. A second run has nothing to do."""
    made = tuned(tmp_path)
    assert made["left"] == 0
    assert made["settled"]
    assert made["kernels"] == len(made["entries"]) == 2
    found = later(tmp_path)
    assert not found["new"]
    assert sorted(found["variants"]) == sorted(min(times, key=times.get) for times in made["entries"].values())
    again = tuned(tmp_path)
    assert (again["kernels"], again["entries"]) == (0, made["entries"])


def test_the_time_is_over(tmp_path: Path) -> None:
    """The first call is made all the same. Nothing is tried, and all is left to the next run."""
    made = tuned(tmp_path, 1e-9)
    assert (made["tried"], made["kernels"]) == (0, 2)
    assert f"{made['left']} variants are left: the same command goes on" in made["text"]
    assert made["settled"]


def test_summary_in_words() -> None:
    """Gain, what is left, and what to know of it."""
    state = State({}, 3, 2, 10, 5, 2000.0, 1500.0, True, True, ())
    text = str(Summary(state, 2, 61.0, Path("/cache"), False, ("a node is left out",)))
    assert text.splitlines() == [
        "a node is left out",
        "2 of 3 kernels faster, 2.00 ms to 1.50 ms",
        "10 variants are timed (2 machines, 61 s)",
        "5 variants are left: the same command goes on from here",
        "kept in /cache",
        "only times are kept: the next process compiles the fastest kernels",
        "other load was felt: such times count when three runs have taken them (docs/guides/tuning.md)",
    ]


def test_nothing_to_tune() -> None:
    """The summary says why."""
    text = str(Summary(State({}, 0, 0, 0, 0, 0.0, 0.0, False, False, ()), 1, 1.0, Path("/cache")))
    assert text.startswith("no kernel of this model has variants to time: kernels below 1,000,000 multiply-adds")
    assert "0 of 0" not in text
