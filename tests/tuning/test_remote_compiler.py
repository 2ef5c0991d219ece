"""Jobs compiled by tasks of Ray, on a cluster of one node in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.tuning.remote_compiler import compile_here

pytest.importorskip("tvm")

_COMPILE = """
import contextlib, dataclasses, os, sys
from pathlib import Path
import ray
from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as module
from torch_hybrid_backend.errors import CompileError, DeadlineError
from torch_hybrid_backend.tuning.remote_compiler import RemoteCompiler

folder = Path(sys.argv[1])
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
waited = []

@contextlib.contextmanager
def waiting():
    waited.append("begin")
    yield
    waited.append("end")

def job(size):
    return Job(f"key{size}", f"kernel_{size}", scale_kernel(size), Target.host(), str(folder / f"{size}.so"))

own = KernelCompiler(module, threads=1)
compiler = RemoteCompiler(own, [ray.get_runtime_context().get_node_id()], waiting)
assert compiler.module is module
told = []
broken = dataclasses.replace(job(32), kernel=None, key="broken")
jobs = [job(16), broken, job(16), job(24)]
first, failed, again, last = compiler.compile(jobs, 120.0, lambda job, made: told.append(job.key))
assert first == again == folder / "16.so" and first.stat().st_size and last.stat().st_size
assert isinstance(failed, CompileError), failed
assert sorted(told) == ["broken", "key16", "key24"], told
assert waited == ["begin", "end"]
assert not own.process_ids()  # nothing was compiled here
(late,) = compiler.compile([job(40)], 0.0)
assert isinstance(late, DeadlineError), late
print("done")
"""


def test_a_job_as_a_task_runs_it(tmp_path: Path) -> None:
    """The artifact's bytes, or what stopped the compiler. Nothing is written where the job says."""
    job = Job("key", "kernel", scale_kernel(16), Target.host(), str(tmp_path / "kernel.so"))
    made = compile_here(tir_compiler.__name__, job, 60.0)
    assert isinstance(made, bytes)
    assert made.startswith(b"\x7fELF")
    assert not list(tmp_path.iterdir())
    late = compile_here(tir_compiler.__name__, job, 0.0)
    assert isinstance(late, CompileError)


@pytest.mark.full
def test_jobs_on_a_node(tmp_path: Path) -> None:
    """Equal ones once; failures are the jobs' own; a deadline ends the rest."""
    pytest.importorskip("ray", reason="needs the extra tune")
    command = [sys.executable, "-c", _COMPILE, str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("done\n")
