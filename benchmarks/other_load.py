"""The effect of other load on what is timed: how long threads waited for a core, how far times are off, and which engine is chosen.

    python -m benchmarks.other_load
    python -m benchmarks.other_load --processes 2 --choices 5

First three layers of PyTorch are timed beside 0, 1, 2, ... processes that each hold a core, and beside one that takes a tenth of it. Then a
linear layer whose number of rows is known only at run time is placed beside such processes, with an empty cache each time, and once more on
the quiet machine with the same cache: who runs it, and what a call takes. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.measuring.measure import measure
from torch_hybrid_backend.measuring.other_load import OtherLoad

_BUDGET_S = 0.1  # of placement
_ROUNDS = 8
_WHOLE = "while True: pass"
_TENTH = "import time\nwhile True:\n end = time.time() + 0.01\n while time.time() < end: pass\n time.sleep(0.09)"


@contextlib.contextmanager
def beside(count: int, code: str = _WHOLE) -> Iterator[None]:
    """So many processes that each run this code, by default one that holds a core."""
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _layers() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    return {
        "linear, 4 x 256": (nn.Linear(256, 256), torch.randn(4, 256)),
        "linear, 64 x 2048": (nn.Linear(2048, 2048), torch.randn(64, 2048)),
        "convolution": (nn.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 112, 112)),
    }


@torch.no_grad()
def _shares(title: str) -> None:
    """Print how long threads waited while placement's rounds took, as a share of the time, and what these rounds told."""
    for name, (layer, x) in _layers().items():
        shares, times = [], []
        for _ in range(_ROUNDS):
            load = OtherLoad()
            (timing,) = measure([lambda layer=layer, x=x: layer(x)], _BUDGET_S)
            shares.append(load.share)
            times.append(timing.low_us)
        found = f"{min(shares):5.3f} {statistics.median(shares):5.3f} {max(shares):5.3f}"
        print(f"{title:24} {name:18} waited {found}   {min(times):7.0f} to {max(times):7.0f} us")


@torch.no_grad()
def _placed() -> str:
    """The engine of a layer whose rows are known only at run time, as this process finds, and the shortest of some calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU()).eval()
    x = torch.randn(4, 2048)
    (plan,) = torch_hybrid_backend.explain(model, x, dynamic=True).plans
    in_eager = plan.call is not None and plan.call.engine == EAGER
    engine = EAGER if in_eager else plan.regions[0].engine
    torch.compiler.reset()
    compiled = torch.compile(model, backend="hybrid", dynamic=True)
    compiled(x)
    compiled(x)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        compiled(x)
        times.append(time.perf_counter() - start)
    return f"{engine}, {min(times) * 1e6:.0f} us"


def _in_a_process(cache: str) -> str:
    environment = {**os.environ, "HYBRID_CACHE_DIR": cache}
    command = [sys.executable, "-m", "benchmarks.other_load", "--place"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _choices(processes: int, count: int) -> None:
    """Print who is chosen beside other load, and by a later process with the same cache on a quiet machine."""
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            with beside(processes):
                busy = _in_a_process(cache)
            print(f"placed beside {processes}: {busy}; with its cache, alone: {_in_a_process(cache)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both parts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_load", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="how many hold a core each, at most")
    parser.add_argument("--choices", type=int, default=5, help="how often an engine is chosen beside them")
    parser.add_argument("--place", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.place:
        print(_placed())
        return
    _shares("alone")
    with beside(1, _TENTH):
        _shares("beside a tenth of a core")
    for count in range(1, args.processes + 1):
        with beside(count):
            _shares(f"beside {count}")
    _choices(args.processes, args.choices)


if __name__ == "__main__":
    main()
