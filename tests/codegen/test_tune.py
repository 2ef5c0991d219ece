"""Tuning: every variant in turn, interrupted and gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.codegen.search_for_tests import CASES, engine_in, without_tiles
from tests.engines.cpu.regions_for_tests import compiled_region
from torch_hybrid_backend.codegen import engine as engine_module
from torch_hybrid_backend.codegen.kernel_cache import Artifact, JobCompiler, compile_kernels
from torch_hybrid_backend.codegen.search import KernelOptions
from torch_hybrid_backend.codegen.tune import Tuner, tuned_by, tuner
from torch_hybrid_backend.codegen.workers.pool import Finished
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.engines.cpu.variants import alternatives as variants_module
from torch_hybrid_backend.errors import CompileError
from torch_hybrid_backend.loops.kernels import Kernel

pytest.importorskip("tvm")
pytestmark = pytest.mark.usefixtures("without_tiles")
__all__ = ["without_tiles"]  # the fixture


def test_tuning_tries_everything_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C keeps what was found out; the next engine tries the rest, one more has nothing to do; the gain is told.

    Three other choices of the schedule, and oneDNN's operator."""
    us: dict[str, float] = {}
    monkeypatch.setattr(variants_module, "_RANKS", 4)
    engine = engine_in(tmp_path, "tune", us)
    _, compiled, inputs = compiled_region(engine, CASES["matmuls"])
    assert all(len(option.compiled) == 1 and len(option.untried) == 4 for option in compiled.options)
    monkeypatch.setattr(engine_module, "compile_kernels", _Interrupting(us))
    stopped = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert [len(option.untried) for option in stopped.options] == [3, 3]
    assert stopped.options[0].chosen.variant.name == "choice 1"
    torch.testing.assert_close(stopped(inputs)[0], compiled(inputs)[0], rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(engine_module, "compile_kernels", compile_kernels)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("stopped")
    assert said[1].startswith("tuned r0: 2 of 2 kernels faster, 0.20 ms to 0.10 ms (50.0% less)")
    _, resumed, _ = compiled_region(engine_in(tmp_path, "tune", us), CASES["matmuls"])
    assert [len(option.untried) for option in resumed.options] == [3, 3]
    assert [option.chosen.variant.name for option in resumed.options] == ["choice 1", "choice 1"]
    done = resumed.refine(inputs, 0.01, Deadline(120.0))
    assert not any(option.untried for option in done.options)
    _, again, _ = compiled_region(engine_in(tmp_path, "tune", us), CASES["matmuls"])
    assert again.refine(inputs, 0.01, Deadline(120.0)) is again
    _, measured, _ = compiled_region(engine_in(tmp_path, "measure", us), CASES["matmuls"])
    assert [option.chosen.variant.name for option in measured.options] == ["choice 1", "choice 1"]


class _Interrupting:
    """Compiles once, says that the kernels are fast, and is interrupted as a user would the second time."""

    def __init__(self, us: dict[str, float]) -> None:
        self.us, self.calls = us, 0

    def __call__(self, kernels: Sequence[Kernel], *how: object) -> list[Artifact | Exception]:
        self.calls += 1
        if self.calls > 1:
            raise KeyboardInterrupt
        made = compile_kernels(kernels, *how)  # type: ignore[arg-type]
        self.us.update({kernel.symbol: 50.0 for kernel in made if isinstance(kernel, Artifact)})
        return made


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("placement", ["tune", "measure"])
def test_variants_that_could_not_be_compiled(
    placement: str, recurs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants are tried by a later process where this one lacked something, a full disk say; where they themselves were at fault, none
    does."""
    us: dict[str, float] = {}
    engine = engine_in(tmp_path, placement, us)

    def failing(kernels: Sequence[Kernel], *how: object) -> list[Artifact | Exception]:
        """All but the last, which is of a variant."""
        return [*compile_kernels(kernels, *how)[:-1], CompileError("no disk", recurs=recurs)]  # type: ignore[arg-type]

    if placement == "measure":  # compiles variants with the region
        monkeypatch.setattr(engine_module, "compile_kernels", failing)
    _, compiled, inputs = compiled_region(engine, CASES["matmuls"])
    monkeypatch.setattr(engine_module, "compile_kernels", failing if placement == "tune" else compile_kernels)
    compiled.refine(inputs, 0.01, Deadline(120.0))
    monkeypatch.undo()
    _, later, _ = compiled_region(engine_in(tmp_path, placement, us), CASES["matmuls"])
    assert any(option.untried or option.is_open for option in later.options) is not recurs


class _OneVariant(Tuner):
    """Tries one variant of the first kernel alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reported: list[KernelOptions] = []
        self.compiled: list[str] = []

    def claim(self, device: Device, options: Sequence[KernelOptions]) -> Mapping[str, str]:
        assert device == CPU
        return {} if self.reported else {options[0].key: self.name}

    def report(self, device: Device, options: Sequence[KernelOptions], is_disturbed: bool) -> None:
        self.reported += options

    def compiler(self, own: JobCompiler) -> JobCompiler:
        return _Noting(own, self.compiled)


class _Noting:
    def __init__(self, own: JobCompiler, names: list[str]) -> None:
        self.module, self._own, self._names = own.module, own, names

    def compile(
        self, jobs: Sequence[Job], deadline_s: float, finished: Finished = lambda job, made: None
    ) -> list[Path | CompileError]:
        self._names += [job.symbol for job in jobs]
        return self._own.compile(jobs, deadline_s, finished)


def test_another_tuner_decides_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled by its compiler, and it is told their times; what it did not claim is left."""
    monkeypatch.setattr(variants_module, "_RANKS", 4)
    _, compiled, inputs = compiled_region(engine_in(tmp_path, "tune"), CASES["matmuls"])
    names = [variant.name for variant in compiled.options[0].untried if not variant.calls_operator]
    other = _OneVariant(names[-1])
    with tuned_by(other):
        assert tuner() is other
        done = compiled.refine(inputs, 0.01, Deadline(120.0))
    assert tuner() is not other
    assert [option.key for option in other.reported] == [compiled.options[0].key]
    assert names[-1] in other.reported[0].times
    assert len(other.compiled) == 1
    left = [len(option.untried) for option in done.options]
    assert left == [len(compiled.options[0].untried) - 1, len(compiled.options[1].untried)]
