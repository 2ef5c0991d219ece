"""Kernels as files that run alone."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.engines.triton.regions_for_tests import HOPPER, compiled, kernels_of, program_of
from torch_hybrid_backend.codegen.kernel_cache import Artifact
from torch_hybrid_backend.core.program import DeviceLaunch
from torch_hybrid_backend.engines.triton.alternatives import tiled
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.schedules.tilings import Tiling
from torch_hybrid_backend.loops.kernels import MatMulKernel
from torch_hybrid_backend.report import Explanation

pytest.importorskip("triton")


def _block(tokens: torch.Tensor, table: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Kernels that pick elements by number, multiply matrices, call libdevice and reduce."""
    x = functional.layer_norm(table[tokens] * scale, (32,))
    return torch.softmax(torch.tanh(x @ w), -1)


def _written(folder: Path, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[Any, ...]:
    """The region, what it takes, and the files of its kernels."""
    region, taken = compiled(folder / "cache", function, *inputs)
    return region, taken, Explanation((), ({"r0": region},)).write_kernels(folder / "kernels")


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The block's inputs, then as `_written` gives them."""
    torch.manual_seed(0)
    inputs = torch.randint(0, 50, (3, 7)), torch.randn(50, 32), torch.randn(32, 40), torch.tensor(2.0)
    return inputs, *_written(tmp_path_factory.mktemp("block"), _block, *inputs)


def test_the_files_are_the_model_s_kernels(block: tuple[Any, ...]) -> None:
    """Launched one after the other, over the buffers of the program, they give what the model does."""
    inputs, region, taken, files = block
    program = region.program
    assert len(files) == len(program.steps) > 1
    memory = {n: torch.empty(spec.span, dtype=spec.torch_dtype) for n, spec in enumerate(program.buffers)}
    memory |= {number: tensor.flatten() for number, tensor in zip(program.inputs, taken, strict=True) if number >= 0}
    for step, path in zip(program.steps, files, strict=True):
        assert isinstance(step, DeviceLaunch)
        assert step.symbol in path.name
        runpy.run_path(str(path))["launch"](*(memory[number] for number in step.arguments))
    (result,) = (memory[number] for number in program.outputs)
    torch.testing.assert_close(result.view(3, 7, 40), _block(*inputs), rtol=1e-5, atol=1e-6)


def test_the_files_run_alone(block: tuple[Any, ...]) -> None:
    """In a process of their own, on the numbers that they make, which are the same every time; each tells what it wrote."""
    *_, files = block
    code = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"
    command = [sys.executable, "-c", code, *map(str, files)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    lines = []
    for path in files:
        module = runpy.run_path(str(path))
        given = module["arguments"]("cpu")
        module["launch"](*given)
        (written,) = (
            given[i] for i, argument in enumerate(re.findall(r"# (in|out)\d", path.read_text())) if argument == "out"
        )
        assert written.isfinite().all()
        assert written.count_nonzero()
        lines.append(f"out0: {written.dtype}, {written.numel()} elements, mean {written.double().mean().item():.6g}\n")
    assert printed == "".join(lines)


def test_memory_for_descriptors_is_lent(tmp_path: Path) -> None:
    """To a kernel that makes some, by Triton's own way of asking for it."""
    inputs = torch.randn(40, 72), torch.randn(24, 72)
    tiling = Tiling(16, 32, 16, persistent=3)
    (kernel,) = kernels_of(functional.linear, *inputs)
    assert isinstance(kernel, MatMulKernel)
    (made,) = tiled(kernel, tiling)
    program, taken = program_of(tmp_path, functional.linear, *inputs, tiling=tiling)
    (step,) = program.steps
    text = TritonBackend(HOPPER).text(made, Artifact(step.module, "kernel_0", "key"), step).text
    assert text.count("triton.set_allocator(") == 1
    path, out = tmp_path / "alone.py", torch.empty(40 * 24)
    path.write_text(text)
    read = dict(zip(program.inputs, taken, strict=True))
    runpy.run_path(str(path))["launch"](*(read[number].flatten() for number in step.memory[:2]), out)
    torch.testing.assert_close(out.view(40, 24), functional.linear(*inputs), rtol=1e-5, atol=1e-5)


def test_places_are_where_the_kernel_may_read(tmp_path: Path) -> None:
    """A table of three rows is picked from by 0, 1 and 2: a place outside it would be another kernel's memory."""
    _, _, (path,) = _written(tmp_path, lambda i, t: t[i] * 2, torch.zeros(500, dtype=torch.int64), torch.randn(3, 4))
    given = runpy.run_path(str(path))["arguments"]("cpu")
    (places,) = (tensor for tensor in given if tensor.dtype == torch.int64)
    assert places.unique().tolist() == [0, 1, 2]
