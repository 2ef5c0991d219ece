"""Verdicts are kept for later processes, which then do not import torch_tensorrt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_hybrid_backend.core.verdict import Reason, Refused, Supported, Verdict
from torch_hybrid_backend.engines.tensorrt.verdicts import KIND, Verdicts
from torch_hybrid_backend.storage.store import Store

REFUSED = Refused(Reason.INT64, "it would compute whole numbers of 64 bits in 32")


class Judge:
    """A check that counts its calls."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked = 0

    def __call__(self) -> Verdict:
        self.asked += 1
        return self.verdict


@pytest.mark.parametrize("verdict", [Supported(), REFUSED], ids=["supported", "refused"])
def test_a_form_is_judged_once_for_all_processes(verdict: Verdict, tmp_path: Path) -> None:
    """Other forms, and other versions, have their own verdicts."""
    judge = Judge(verdict)
    first = Verdicts(Store(tmp_path), "1.5")
    assert [first.of("aten.relu", judge) for _ in range(2)] == [verdict] * 2
    later = Verdicts(Store(tmp_path), "1.5")
    assert later.of("aten.relu", judge) == verdict
    assert judge.asked == 1
    later.of("aten.exp", judge)
    Verdicts(Store(tmp_path), "1.6").of("aten.relu", judge)
    assert judge.asked == 3


@pytest.mark.parametrize("kept", [b"", b"null", b"[1]", b'{"code": "gone", "why": ""}', b'{"code": "int64"}', b"\xff"])
def test_what_cannot_be_read_is_judged_anew(kept: bytes, tmp_path: Path) -> None:
    """An unreadable entry is replaced: the next process reads the new one."""
    store, judge = Store(tmp_path), Judge(REFUSED)
    Verdicts(store, "1.5").of("aten.relu", judge)
    (key,) = store.keys(KIND)
    store.remove(KIND, key)
    store.put(KIND, key, kept, suffix=".json")
    for _ in range(2):
        assert Verdicts(store, "1.5").of("aten.relu", judge) == REFUSED
    assert judge.asked == 2


def test_a_store_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    """The process still knows the verdict. If the check raises, there is no verdict."""
    verdicts, judge = Verdicts(Store(tmp_path), "1.5"), Judge(Supported())
    (tmp_path / KIND).write_text("no folder")
    assert [verdicts.of("aten.relu", judge) for _ in range(2)] == [Supported()] * 2
    assert judge.asked == 1

    def fails() -> Verdict:
        raise MemoryError

    with pytest.raises(MemoryError):
        verdicts.of("aten.exp", fails)
    assert verdicts.of("aten.exp", judge) == Supported()


@pytest.mark.tensorrt
def test_a_process_that_finds_verdicts_and_engines_never_imports_torch_tensorrt(tmp_path: Path) -> None:
    """The first process checks and builds. The second cuts the same regions, and has their engines at once."""
    command = [sys.executable, "-m", "tests.engines.tensorrt.start", str(tmp_path), "gpt2"]
    said: list[dict[str, Any]] = []
    for _ in range(2):
        run = subprocess.run(
            command, check=True, timeout=300, cwd=Path(__file__).parents[3], capture_output=True, text=True
        )
        said.append(json.loads(run.stdout.splitlines()[-1]))
    cold, warm = said
    assert cold["imports_torch_tensorrt"]
    assert not warm["imports_torch_tensorrt"]
    assert (cold["pending"], warm["pending"]) == (1, 0)
    assert warm["regions"] == cold["regions"] == 1
