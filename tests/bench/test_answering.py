"""Processes that open a saved model: what they import, and how inputs find their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from torch_hybrid_backend.bench import answering


def test_a_process_imports_what_its_format_needs() -> None:
    """PyTorch is imported by those formats alone that need it."""
    program = "import sys, torch_hybrid_backend.bench.answering; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_inputs_are_in_order(tmp_path: Path) -> None:
    """The tenth input comes behind the second."""
    for number in (10, 2, 0):
        np.save(tmp_path / f"input{number}.npy", np.array(number))
    assert [int(array) for array in answering._arrays(tmp_path)] == [0, 2, 10]


def test_inputs_have_the_names_that_they_were_exported_with() -> None:
    """Inputs that a model does not use are left out; names of another exporter stand for the inputs in order."""
    assert answering._by_name(["input_0", "input_2"], ["a", "b", "c"]) == {"input_0": "a", "input_2": "c"}
    assert answering._by_name(["ids", "mask"], ["a", "b"]) == {"ids": "a", "mask": "b"}
