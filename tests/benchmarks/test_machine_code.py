"""Kernels of ours beside inductor's: what their machine code says of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine_code import GRAPHS, code_of

ROOT = Path(__file__).resolve().parents[2]


def test_accesses_are_read_from_ptx() -> None:
    """Vectors as wide as they are; neither shared memory nor registers count."""
    ptx = """
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 ld.global.L1::evict_first.v2.b64 { %rd4, %rd5 }, [ %rd2 + 0 ];
        ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
        ld.param.b64 %rd1, [kernel_param_0];
        @%p2 st.global.b16 [ %rd3 + 0 ], { %rs1 };
    """
    code = code_of("kernel", 128, ptx)
    assert (code.loads, code.stores, code.widest) == ((16, 16), (2,), (16, 2))
    assert code_of("kernel", 128, "ret;").widest == (0, 0)


@pytest.mark.full
def test_accesses_are_as_wide_as_inductor_s() -> None:
    """Softmax, layer norm, a pointwise chain and a transposition read and write as many bytes at once as inductor's kernels for them, which
    the same Triton compiles; neither has more kernels than the other."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "benchmarks.machine_code"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=500)
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 2 * len(GRAPHS)
    for graph in GRAPHS:
        own, other = (next(row for row in rows if row[:2] == [graph.name, who]) for who in ("hybrid", "inductor"))
        for ours, theirs in zip(own[4].split(";"), other[4].split(";"), strict=True):
            assert max(map(int, ours.split())) >= max(map(int, theirs.split())) > 0, graph.name
