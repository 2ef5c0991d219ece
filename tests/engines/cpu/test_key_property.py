"""Keys of regions and of kernels: whatever changes in a generated graph, what is kept under the old key is not found.

For kernels the reference is the code itself: two kernels of one key have, letter by letter, the same TIR.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engines.cpu.kernels_for_tests import every_kind
from tests.engines.cpu.programs_for_keys import DTYPES, Operation, Program, changes, programs
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.kernel_key import kernel_key
from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.target import Target
from torch_hybrid_backend.engines.cpu.tir import compiler
from torch_hybrid_backend.measuring.timing_cache import TimingCache
from torch_hybrid_backend.partition.placement import timing_key
from torch_hybrid_backend.storage.store import Store

pytest.importorskip("tvm")

TARGET = Target("native", "a processor", ("avx2",), 8, 2, 32 << 10, 1 << 20)
STORE = Store.temporary()
CODE_OF_KEY: dict[str, str] = {}  # over all examples: a key never has two codes
Check = Callable[[Any], None]


def often(examples: int) -> Callable[[Check], Check]:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )


def code(program: Program) -> list[tuple[str, str]]:
    """(key, TIR) of every kernel."""
    from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel

    assembled = assemble(program.region(), TvmBackend(TARGET))
    return [
        (kernel_key(kernel, TARGET, compiler), emit_kernel(kernel, "kernel", TARGET).script())
        for kernel in assembled.kernels
    ]


def check_regions(data: st.DataObject, most: int) -> None:
    """A change of a program is another region; the same program, built anew, is the same one."""
    program = data.draw(programs())
    key = program.region().key
    assert program.region().key == key
    changed = changes(program)
    for what in data.draw(st.lists(st.sampled_from(sorted(changed)), min_size=1, max_size=most, unique=True)):
        assert changed[what].region().key != key, what


def check_kernels(data: st.DataObject) -> None:
    """Check that one key means one code, over everything that was ever drawn."""
    program = data.draw(programs())
    changed = changes(program)
    what = data.draw(st.sampled_from(sorted(changed)))
    for one in (program, program, changed[what]):
        for key, text in code(one):
            assert CODE_OF_KEY.setdefault(key, text) == text, what


@often(40)
@given(st.data())
def test_regions(data: st.DataObject) -> None:
    """Any operator, wire, constant, dimension, shape, dtype, stride or constant flag that changes gives another region key."""
    check_regions(data, 3)


@pytest.mark.full
@often(1000)
@given(st.data())
def test_many_regions(data: st.DataObject) -> None:
    """The same, more often."""
    check_regions(data, 10)


@often(40)
@given(st.data())
def test_kernels(data: st.DataObject) -> None:
    """Two kernels of one key have the same code, and a kernel made anew has the same key."""
    check_kernels(data)


@pytest.mark.full
@often(2000)
@given(st.data())
def test_many_kernels(data: st.DataObject) -> None:
    """The same, more often."""
    check_kernels(data)


def test_the_generator_reaches_what_matters() -> None:
    """A program of every family becomes kernels whose code depends on each change that a kernel can see."""
    program = Program(
        (4, 6),
        DTYPES[0],
        (False, True),
        (False, False),
        (
            Operation("scalar", "mul", (0,), 0.5),
            Operation("binary", "sub", (1, 2)),
            Operation("over_dim", "sum", (3,), 1),
            Operation("unary", "relu", (4,)),
        ),
    )
    plain = code(program)
    assert plain
    assert code(program) == plain
    differing = {what for what, changed in changes(program).items() if code(changed) != plain}
    for what in ("rows", "columns", "dtype", "transposed 0", "operator add of operation 0", "dimension of operation 2"):
        assert what in differing
    assert any(what.startswith("constant 0.75") for what in differing)
    assert any(what.startswith("wire") for what in differing)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Target)])
def test_every_part_of_the_target(field: str) -> None:
    """A kernel for another processor, other extensions, lanes, cores or caches is another kernel."""
    value = getattr(TARGET, field)
    other = (*value, "fma") if isinstance(value, tuple) else value + ("x" if isinstance(value, str) else 1)
    for kernel in every_kind().values():
        assert kernel_key(kernel, TARGET, compiler) != kernel_key(
            kernel, dataclasses.replace(TARGET, **{field: other}), compiler
        )


names = st.text(st.characters(codec="utf-8"), max_size=6)
circumstances = st.tuples(names, st.dictionaries(names, names, min_size=1, max_size=3), names)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(circumstances, circumstances)
def test_timings(one: Any, two: Any) -> None:
    """Timings are kept under a key of their region, contenders, versions and machine, and of no other, however those are spelled."""

    def key(region: str, contenders: dict[str, str], machine: str) -> str:
        return TimingCache(STORE, lambda device: machine).entry_key(timing_key(region, contenders), CPU)

    assert (key(*one) == key(*two)) == (one == two)
    region, contenders, machine = one
    assert key(region, dict(reversed(contenders.items())), machine) == key(*one)
