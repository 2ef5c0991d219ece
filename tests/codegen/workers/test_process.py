"""One compiler process, as its parent sees it."""

from __future__ import annotations

import itertools
import pickle
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.tvm.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.process import CompilerProcess
from torch_hybrid_backend.codegen.workers.protocol import Job, Order, frame
from torch_hybrid_backend.engines.tvm.target import Target
from torch_hybrid_backend.engines.tvm.tir import compiler as tir_compiler

pytest.importorskip("tvm")


def test_an_order_may_arrive_during_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What arrives while a kernel is made waits for its turn: the signal that a parent's death sends is not sent for it."""
    began = tmp_path / "began"
    (tmp_path / "ld").write_text(f"#!/bin/sh\n: > {began}\n/bin/sleep 0.3\nexit 1\n")
    (tmp_path / "ld").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    process = CompilerProcess(tir_compiler, idle_s=60)

    def answers() -> Iterator[dict[str, object]]:
        while True:
            if select.select([process.stdout], [], [], 0.02)[0]:
                arrived = process.read()
                assert arrived is not None, "the compiler process ended"
                yield from arrived
            else:
                yield {}

    def send(size: int) -> None:
        job = Job(f"key{size}", f"kernel_{size}", scale_kernel(size), Target.host(), str(tmp_path / f"{size}.so"))
        process.outgoing += frame(pickle.dumps(Order(job, 60.0)))
        while process.outgoing:
            process.write()

    try:
        arriving = answers()
        assert next(filter(None, arriving))["ready"]
        send(24)
        while not began.exists():
            assert not next(arriving)
        send(32)
        assert ["error" in answer for answer in itertools.islice(filter(None, arriving), 2)] == [True, True]
    finally:
        process.end()
