"""Compiler processes that load while Dynamo traces."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.head_start import is_known, program_key
from torch_hybrid_backend.partition.seen_graphs import SeenGraphs
from torch_hybrid_backend.storage.store import Store

# Prints how many compiler processes there are when Dynamo calls the backend.
_PROGRAM = """
import sys, torch
from torch_hybrid_backend import backend
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.codegen.engine import shared_compiler
from torch_hybrid_backend.engines.cpu.tir import compiler

compile_for_dynamo = backend.compile_for_dynamo

def counted(*args, **told):
    print(len(shared_compiler(compiler, 2).process_ids()))
    return compile_for_dynamo(*args, **told)

backend.compile_for_dynamo = counted
torch.compile(lambda x: torch.relu(x) + 1, backend="hybrid")(torch.ones(8))
"""


def _started(folder: Path, **variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRID_")}
    environment |= {"HYBRID_CACHE_DIR": str(folder / "cache"), "HYBRID_COMPILE_THREADS": "2", **variables}
    program = folder / "program.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    return int(done.stdout)


def test_a_new_program_has_compilers_before_the_backend_is_called_and_a_known_one_has_none(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    assert _started(tmp_path) > 0
    assert _started(tmp_path) == 0


def test_no_compiler_is_started_where_its_engine_is_switched_off(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    assert _started(tmp_path, HYBRID_DISABLE_ENGINES="tvm") == 0


def test_a_cache_that_was_filled_elsewhere_knows_all_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(cache_dir=tmp_path / "cache")
    assert not is_known(config)
    assert not (tmp_path / "cache").exists()
    assert is_known(dataclasses.replace(config, cache_shared=(str(tmp_path),)))
    SeenGraphs(Store(tmp_path / "cache")).add("another")
    assert not is_known(config)
    monkeypatch.setattr(Store, "is_read_only", True)
    assert is_known(config)


def test_another_command_line_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    key = program_key()
    assert key == program_key()
    monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, "--model=other"])
    assert key != program_key()
