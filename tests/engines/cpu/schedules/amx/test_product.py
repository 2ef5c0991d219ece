"""Products on tiles: their machine code, and the tasks that share them."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path

import pytest

from tests.engines.cpu.amx_for_tests import SAPPHIRE_RAPIDS, emulated
from tests.engines.cpu.schedule_runner import compile_kernel
from tests.engines.cpu.schedules.amx.products_for_tests import (
    TILES_NARROW,
    errors,
    kernel_of,
    operands_of,
    run,
)
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.engines.cpu.operands.amx_formats import FORMATS
from torch_hybrid_backend.engines.cpu.schedules.matmul.amx import emit
from torch_hybrid_backend.engines.cpu.tir import compiler

__all__ = ["emulated"]  # the fixture


def test_small_tasks(emulated: ctypes.CDLL) -> None:
    """More blocks of rows than caches hold at once, shared among more cores, a B for each batch, by several of the schedule's ways."""
    shape = (2, 200, 70, 150)
    a, b = operands_of(shape, "float32", batched=True)
    for rank in (0, 3):
        kernel = dataclasses.replace(kernel_of(shape, "float32", batched=True), schedule_rank=rank)

        assert errors(run(kernel, a, b, TILES_NARROW), a, b).max() < 3e-7


def test_the_library_needs_nothing_else(tmp_path: Path) -> None:
    """The library of a compiled kernel is linked to nothing but the C library: intrinsics have all become instructions."""
    library = tmp_path / "tiles.so"
    kernel = kernel_of((1, 64, 64, 64), "float32")
    compiler.compile_kernel(Job("key", "kernel_tiles", kernel, SAPPHIRE_RAPIDS, str(library), assembly=True))
    assert library.exists()
    assert "\ttdpbf16ps\t" in library.with_suffix(".s").read_text()


def _loops(assembly: str) -> list[str]:
    """The innermost loops of x86 assembly."""
    labels = re.split(r"^(\.L\w+):", assembly, flags=re.MULTILINE)
    found = []
    for label, body in zip(labels[1::2], labels[2::2], strict=True):
        end = re.search(rf"\tj\w+\s+{re.escape(label)}$", body, flags=re.MULTILINE)
        if end is not None:
            found.append(body[: end.start()])
    return found


@pytest.mark.parametrize(
    ("mcpu", "name"),
    [
        *[("sapphirerapids", name) for name in FORMATS if name != "float16"],
        ("graniterapids", "float16"),  # has AMX-FP16
        *[pytest.param("graniterapids", name, marks=pytest.mark.full) for name in FORMATS if name != "float16"],
    ],
)
def test_machine_code(mcpu: str, name: str) -> None:
    """Tiles are multiplied in a loop that touches no vector, and nothing of the stack but addresses; they are configured and released once,
    memory is taken before."""
    form = FORMATS[name]
    target = dataclasses.replace(SAPPHIRE_RAPIDS, mcpu=mcpu)
    assembly = compile_kernel(kernel_of((1, 512, 1536, 256), name), emit, target).inspect_source("asm")
    assert assembly.count("\tldtilecfg\t") == assembly.count("\ttilerelease") == 1
    configured, released = assembly.index("\tldtilecfg\t"), assembly.index("\ttilerelease")
    tiles = re.findall(r"\t(tileload\w*|tilestored|tilezero|tdp\w+)\t", assembly)
    assert {form.instruction, "tilestored"} <= set(tiles)
    assert all(configured < place.start() < released for place in re.finditer(r"\ttdp\w+\t", assembly))
    assert "BackendAllocWorkspace" not in assembly[configured:released]
    assert "\tret" not in assembly[configured:released]
    products = [loop for loop in _loops(assembly) if f"\t{form.instruction}\t" in loop]
    assert products
    for loop in products:
        assert "mm" not in re.sub(r"%tmm\d", "", loop), loop  # vectors
        assert all(line.startswith("\tmovq\t") for line in loop.splitlines() if "%rsp" in line), loop
        assert "prefetch" in loop or name == "float32"
    if form.splits:
        splits = [loop for loop in _loops(assembly) if "vpmovdw" in loop]
        assert splits
        for loop in splits:
            assert "vpminud" in loop
            assert "%rsp" not in loop, loop
