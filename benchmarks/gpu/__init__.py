"""The benchmark for a machine with a GPU (`make bench-gpu`): what it measures (`rows`), on what (`kernels`, `models`), and how (`work`).

It needs torch, Triton and a C++ compiler, and neither TVM nor a network.
"""

import importlib.util
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"benchmarks.gpu: {sys.executable} has no torch; name a Python that has: make bench-gpu PYTHON=...")
