"""The benchmark for a machine with a GPU: `python3 -m benchmarks.gpu`."""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"benchmarks.gpu: {sys.executable} has no torch; name a Python that has: make bench-gpu PYTHON=...")
