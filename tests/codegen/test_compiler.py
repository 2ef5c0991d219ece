"""Conditions under which two processes share kernels."""

from __future__ import annotations

import types

import pytest

from tests.interpreter import compiler as interpreter_compiler
from torch_hybrid_backend.codegen.compiler import compiler_version
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.storage.sources import sources_version


def test_a_version_names_sources_module_and_installation() -> None:
    """Each of the three makes it another one."""
    module = types.SimpleNamespace(__name__="some.compiler", SOURCES=("loops",), version=lambda: "1.0")
    found = compiler_version(module)  # type: ignore[arg-type]
    assert found == f"{sources_version('loops')} some.compiler 1.0"
    for change in ({"__name__": "other"}, {"SOURCES": ("core",)}, {"version": lambda: "1.1"}):
        other = types.SimpleNamespace(**{**vars(module), **change})
        assert compiler_version(other) != found  # type: ignore[arg-type]


@pytest.mark.parametrize("compiler", [tir_compiler, interpreter_compiler])
def test_versions_of_compilers_do_not_change(compiler: types.ModuleType) -> None:
    """Asked twice, and different for each compiler."""
    assert compiler_version(compiler) == compiler_version(compiler)  # type: ignore[arg-type]
    others = {compiler_version(each) for each in (tir_compiler, interpreter_compiler)}  # type: ignore[arg-type]
    assert len(others) == 2
