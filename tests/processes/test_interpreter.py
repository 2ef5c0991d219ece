"""The Python for child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ASK = """
import json, multiprocessing.spawn, sys
told = json.loads(sys.argv[1])
sys.executable = told["executable"]
multiprocessing.set_executable(told.get("for multiprocessing", sys.executable) or "")
sys._base_executable = told.get("base")
for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
    setattr(sys, name, told.get("prefix", "/nonexistent"))
if told.get("frozen"):
    sys.frozen = True
from torch_hybrid_backend.processes.interpreter import interpreter
print(json.dumps(interpreter()))
"""


def found(**told: object) -> str | None:
    """The interpreter found by a process with that environment."""
    command = [sys.executable, "-c", _ASK, json.dumps(told)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    path: str | None = json.loads(out)
    return path


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A program that is named like a Python but is none, and creates a file when it is run."""
    program = tmp_path / "python3"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    return program


def test_an_interpreter_is_taken_as_it_is() -> None:
    """An ordinary Python finds itself."""
    assert found(executable=sys.executable) == sys.executable


@pytest.mark.parametrize("wrong", ["/usr/bin/false", "", None, "/usr/sbin/uwsgi", "/nonexistent/python3", "/"])
def test_what_is_no_interpreter_is_passed_over(wrong: str | None) -> None:
    """Another Python is found if `sys.executable` is none: by multiprocessing's setting, below a virtual environment, or in the
    installation."""
    assert found(executable=wrong, **{"for multiprocessing": sys.executable}) == sys.executable
    assert found(executable=wrong, base=sys.executable) == sys.executable
    of_prefix = found(executable=wrong, prefix=sys.prefix)
    assert of_prefix is not None
    assert Path(of_prefix).is_relative_to(sys.prefix)
    assert found(executable=wrong) is None


def test_a_python_of_another_version_is_passed_over(started: Path) -> None:
    """A program of the right name is run to ask for its version."""
    assert found(executable=str(started), base=sys.executable) == sys.executable
    assert (started.parent / "started").exists()


def test_programs_are_not_started_to_see_what_they_are(started: Path) -> None:
    """Programs of other names, and frozen programs, are never run."""
    server = started.rename(started.with_name("my-python-server"))
    assert found(executable=str(server)) is None
    frozen = server.rename(server.with_name("python3"))
    assert found(executable=str(frozen), frozen=True) is None
    assert not (started.parent / "started").exists()


def test_a_program_that_may_not_be_run_is_passed_over(started: Path) -> None:
    """A program without the permission to run counts as absent."""
    started.chmod(0o644)
    assert found(executable=str(started), base=sys.executable) == sys.executable
    assert not os.access(started, os.X_OK)
