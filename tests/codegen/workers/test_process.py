"""A compiler process, as its parent sees it."""

from __future__ import annotations

import itertools
import os
import pickle
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.cpu.kernels_for_tests import scale_kernel
from tests.interpreter import compiler as interpreter_compiler
from torch_hybrid_backend.codegen.compiler import compiler_version
from torch_hybrid_backend.codegen.workers.process import CompilerProcess
from torch_hybrid_backend.codegen.workers.protocol import Job, Order
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.processes import child
from torch_hybrid_backend.processes.frames import frame

pytest.importorskip("tvm")


def test_an_order_may_arrive_during_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An order that arrives while a kernel is made waits for its turn: the signal that a parent's death sends is not sent for it."""
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


def test_a_process_from_its_start_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler process says that it is ready and of which sources; it has one thread in each library; killed, it has no more answers."""
    monkeypatch.delenv("HOME", raising=False)
    before = len(os.listdir("/dev/fd"))
    process = CompilerProcess(interpreter_compiler, idle_s=60)
    try:
        assert process.alive
        assert process.read() == []  # it does not wait
        select.select([process.stdout], [], [], 60)
        assert process.read() == [{"ready": True, "version": compiler_version(interpreter_compiler)}]
        if sys.platform == "linux":
            environment = Path(f"/proc/{process.process.pid}/environ").read_bytes().split(b"\0")
            for setting in (b"OMP_NUM_THREADS=1", b"HOME=/nonexistent", b"INTERPRETER_TESTS=1"):
                assert setting in environment
        os.kill(process.process.pid, signal.SIGTERM)
        process.wait(10)
        assert not process.alive
        assert process.read() is None
        process.outgoing += frame(b"to nobody")
        process.write()
        assert not process.outgoing
    finally:
        status = process.end()
    assert status == -signal.SIGTERM
    assert len(os.listdir("/dev/fd")) == before


def test_what_it_said_before_it_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its error output, and its exit status."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '%03000d' 0 >&2\necho 'out of luck' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(child, "interpreter", lambda: str(program))
    process = CompilerProcess(interpreter_compiler, idle_s=60)
    try:
        process.wait(10)
        assert not process.alive
        words = process.last_words()
        assert words.endswith("000out of luck")
        assert 1900 < len(words) <= 2000
    finally:
        assert process.end() == 3


def test_a_program_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and nothing is left open."""
    monkeypatch.setattr(child, "interpreter", lambda: str(tmp_path / "nowhere"))
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(CompileError, match="nowhere"):
        CompilerProcess(interpreter_compiler, idle_s=60)
    assert len(os.listdir("/dev/fd")) == before
