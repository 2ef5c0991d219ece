"""The package as a program."""

from __future__ import annotations

import subprocess
import sys

import torch_hybrid_backend


def test_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_hybrid_backend", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"hybrid {torch_hybrid_backend.__version__}\n"
