from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cpu.kernels_for_tests import (
    argument,
    conv_kernel,
    every_kind,
    matmul_kernel,
    row_sum_kernel,
    scale_kernel,
)
from torch_hybrid_backend.codegen import compiler as compiler_module
from torch_hybrid_backend.codegen.kernel_key import canonical_text
from torch_hybrid_backend.codegen.kernel_key import kernel_key as key_for
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler as tir_compiler
from torch_hybrid_backend.engines.cpu.weights import Panels
from torch_hybrid_backend.loops import ops
from torch_hybrid_backend.loops.index import Index, LoopVar, Scalar, var
from torch_hybrid_backend.loops.ir import Buffer, FromIndex, Load
from torch_hybrid_backend.loops.kernels import Argument, Kernel, MapKernel, Stage, Store
from torch_hybrid_backend.loops.layout import Blocked, Strided
from torch_hybrid_backend.storage.sources import sources_version

TARGET = Target("native", "a processor", ("avx2",), 8, 2, 32 << 10, 1 << 20)
KINDS = list(every_kind())


def kernel_key(kernel: Kernel, target: Target) -> str:
    return key_for(kernel, target, tir_compiler)


def other(value: object) -> Any:
    """A value of the same type that differs."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case LoopVar():
            return LoopVar(value.name, value.extent + 1)
        case Argument():
            return dataclasses.replace(value, layout=Strided((99,) * len(value.buffer.shape)))
        case Store():
            return dataclasses.replace(value, value=ops.call("neg", value.value))
        case Stage():
            return dataclasses.replace(value, combiner=value.combiner + "x")
        case Buffer():
            return Buffer(value.shape, "float64")
        case Panels():
            return dataclasses.replace(value, buffer=other(value.buffer))
        case None:
            return ops.const(1.0, "float32")
        case tuple() if value:
            return (*value[:-1], other(value[-1]))
        case tuple():
            return (LoopVar("more", 3),)
    return ops.call("neg", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_two_constructions_have_one_key(kind: str) -> None:
    """Fresh buffers, with other numbers, and fresh expressions make no difference; nor does a pickle."""
    kernel = every_kind()[kind]
    assert kernel_key(kernel, TARGET) == kernel_key(every_kind()[kind], TARGET)
    assert kernel_key(kernel, TARGET) == kernel_key(pickle.loads(pickle.dumps(kernel)), TARGET)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_counts(kind: str) -> None:
    """Whichever field of a kernel changes, the key changes."""
    kernel = every_kind()[kind]
    keys = {kernel_key(kernel, TARGET)}
    fields = dataclasses.fields(kernel)
    for field in fields:
        keys.add(kernel_key(dataclasses.replace(kernel, **{field.name: other(getattr(kernel, field.name))}), TARGET))
    assert len(keys) == len(fields) + 1


def test_kinds_differ() -> None:
    """No two kinds share a key."""
    assert len({kernel_key(kernel, TARGET) for kernel in every_kind().values()}) == len(KINDS)


def test_names_do_not_count() -> None:
    """Names of buffers and loop variables are for people."""
    assert kernel_key(scale_kernel(name="i"), TARGET) == kernel_key(scale_kernel(name="another"), TARGET)


def test_contents_count() -> None:
    """Extents, literals, dtypes, layouts, combiners, stage kinds and the order of arguments are all in the key."""
    base = scale_kernel()
    row = row_sum_kernel()
    x = base.reads[0]
    variants: list[Kernel] = [
        base,
        scale_kernel(size=65),
        scale_kernel(factor=2.5),
        scale_kernel(factor=float("nan")),
        dataclasses.replace(base, reads=(dataclasses.replace(x, layout=Strided((2,))),)),
        dataclasses.replace(base, reads=(Argument(Buffer((64,), "float16"), x.layout),)),
        dataclasses.replace(base, reads=(x, argument(64))),
        dataclasses.replace(base, stores=base.stores * 2),
        row,
        dataclasses.replace(row, stages=(dataclasses.replace(row.stages[0], combiner="max"), row.stages[1])),
        dataclasses.replace(row, stages=(dataclasses.replace(row.stages[0], kind="scalar"), row.stages[1])),
        dataclasses.replace(row, stages=row.stages[:1]),
        dataclasses.replace(
            conv_kernel(), reads=(Argument(conv_kernel().reads[0].buffer, Blocked(8)), conv_kernel().reads[1])
        ),
        dataclasses.replace(matmul_kernel(), reads=tuple(reversed(matmul_kernel().reads))),
    ]
    keys = [kernel_key(kernel, TARGET) for kernel in variants]
    assert len(set(keys)) == len(keys)


def test_zeros_of_either_sign_differ() -> None:
    """-0.0 equals 0.0 but is another constant."""
    assert kernel_key(scale_kernel(factor=0.0), TARGET) != kernel_key(scale_kernel(factor=-0.0), TARGET)


def _copy(index: Index, source: Argument | None = None) -> MapKernel:
    x, out = source or argument(256), argument(64)
    i = LoopVar("i", 64)
    return MapKernel((x,), (out,), (i,), (Store(out.buffer, (var("i", 64),), x.buffer.at((index,))),))


def test_indices_count() -> None:
    """Coefficients, constants, divisors and what is divided are in the key."""
    i = var("i", 64)
    indices = [i, i * 2, i + 1, i // 2, i % 2, i // 4, i % 4, (i + 1) // 2, i // 2 + i % 4]
    assert len({kernel_key(_copy(index), TARGET) for index in indices}) == len(indices)


def test_order_of_a_sum_does_not_count() -> None:
    """i + j and j + i are one index."""
    i, j = var("i", 8), var("j", 8)

    def kernel(index: Index) -> MapKernel:
        x, out = argument(256), argument(8, 8)
        return MapKernel(
            (x,), (out,), (LoopVar("i", 8), LoopVar("j", 8)), (Store(out.buffer, (i, j), x.buffer.at((index,))),)
        )

    assert kernel_key(kernel(i * 3 + j), TARGET) == kernel_key(kernel(j + i * 3), TARGET)
    assert kernel_key(kernel(i * 3 + j), TARGET) != kernel_key(kernel(i + j * 3), TARGET)


def test_scalars_in_indices_count() -> None:
    """A gathered index is written out with its bounds, and the position of what it reads."""

    def gather(high: int, offset: int) -> MapKernel:
        table, ids, out = argument(100), argument(64, dtype="int64"), argument(64)
        i = var("i", 64)
        row = Index(((Scalar(Load("int64", ids.buffer, (i + offset,)), 0, high), 1),), 0)
        return MapKernel((table, ids), (out,), (LoopVar("i", 64),), (Store(out.buffer, (i,), table.buffer.at((row,))),))

    assert kernel_key(gather(99, 0), TARGET) == kernel_key(gather(99, 0), TARGET)
    assert len({kernel_key(gather(high, offset), TARGET) for high, offset in ((99, 0), (98, 0), (99, 1))}) == 3


def test_sharing_does_not_count() -> None:
    """An expression used twice and two equal expressions are the same."""
    i = var("i", 8)

    def kernel(shared: bool) -> MapKernel:
        x, out = argument(8), argument(8)
        one = x.buffer.at((i,))
        two = one if shared else x.buffer.at((i,))
        return MapKernel((x,), (out,), (LoopVar("i", 8),), (Store(out.buffer, (i,), ops.mul(one, two)),))

    assert canonical_text(kernel(True)) == canonical_text(kernel(False))


def test_target_and_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, another TVM or another source of the engine means another key."""
    kernel = scale_kernel()
    keys = {kernel_key(kernel, TARGET), kernel_key(kernel, dataclasses.replace(TARGET, cores=3))}
    with monkeypatch.context() as patch:
        patch.setattr(tir_compiler, "version", lambda: "0.0")
        keys.add(kernel_key(kernel, TARGET))
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "sources_version", lambda *_: "edited")
        keys.add(kernel_key(kernel, TARGET))
    assert len(keys) == 4


def test_the_version_of_sources_is_that_of_what_was_imported(tmp_path: Path) -> None:
    """Sources edited after the import: the version stays, as does the code that runs in this process; a new process has another. So it is
    for all that kernels are made by, `core` included, and for nothing else."""
    root = Path(__file__).parents[2]
    package = shutil.copytree(root / "torch_hybrid_backend", tmp_path / "torch_hybrid_backend")
    code = """
import sys
from pathlib import Path
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.storage.sources import sources_version
source = Path(sys.argv[1])
source.write_text(source.read_text() + "# edited\\n")
print(sources_version(*compiler.SOURCES))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    versions = [
        subprocess.run(
            [sys.executable, "-c", code, str(package / edited)],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        ).stdout.strip()
        for edited in (
            "core/limits.py",
            "sizes/size.py",
            "loops/ops.py",
            "codegen/assemble.py",
            "report/text.py",
            "report/text.py",
        )
    ]
    assert versions[0] == sources_version(*tir_compiler.SOURCES)
    assert len(set(versions)) == 5
    assert versions[4] == versions[5]


def test_key_needs_no_tvm() -> None:
    """A process that finds its kernels in the cache never imports TVM."""
    code = (
        "import sys; from tests.engines.cpu.kernels_for_tests import scale_kernel;"
        "from torch_hybrid_backend.codegen.kernel_key import kernel_key;"
        "from torch_hybrid_backend.engines.cpu.tir import compiler;"
        "from torch_hybrid_backend.engines.cpu.target import Target;"
        "print(kernel_key(scale_kernel(), Target.host(), compiler), compiler.version());"
        "assert 'tvm' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root).stdout
    assert printed.split() == [kernel_key(scale_kernel(), Target.host()), tir_compiler.version()]


def test_functions_are_refused() -> None:
    """A function that cannot be written out is an error, not silently left out."""
    kernel = dataclasses.replace(scale_kernel(), stores=(len,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no canonical text"):
        kernel_key(kernel, TARGET)


def test_index_expressions_count() -> None:
    """An index used as a value is written out."""
    i = var("i", 8)

    def kernel(index: Index) -> MapKernel:
        out = argument(8, dtype="int64")
        return MapKernel((), (out,), (LoopVar("i", 8),), (Store(out.buffer, (i,), FromIndex("int64", index)),))

    assert kernel_key(kernel(i), TARGET) != kernel_key(kernel(i + 1), TARGET)
