"""Inner loops of kernels for AArch64: no spills, few loads, and the share of the peak that the guide tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.inner_loops import (
    CASES,
    PEAKS,
    Case,
    Loop,
    Row,
    find_mca,
    hottest,
    inner_loops,
    loop_of,
    main,
    rows,
    table,
)
from torch_hybrid_backend.engines.cpu.target import Target

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "arm.md"
# The models of Neoverse cores in older ones are those of other cores.
needs_mca = pytest.mark.skipif(find_mca() is None, reason="needs llvm-mca of LLVM 18 or later: apt-get install llvm-22")
_ASSEMBLY = """
kernel:
	.cfi_startproc
	mov	x1, #4
.LBB0_1:                                // outer
	str	q9, [sp, #16]
.LBB0_2:                                // inner
	ldp	q0, q1, [x0], #32               // two registers
	fmla	v2.4s, v0.4s, v1.s[0]
	ldr	q3, [sp, #16]
	b.ne	.LBB0_2
	subs	x1, x1, #1
	b.ne	.LBB0_1
.LBB0_3:
	sdot	v4.4s, v0.16b, v1.4b[2]
	cbnz	x2, .LBB0_3
	ret
"""


def named(*names: str) -> list[Case]:
    found = [case for case in CASES if case.name.startswith(names)]
    assert len(found) >= len(names)
    return found


def test_innermost_loops_are_read() -> None:
    """Outer loops, labels, comments and directives are left out; a spill is a vector on the stack."""
    loops = inner_loops(_ASSEMBLY)
    assert [(loop.products, loop.loads, loop.spills, len(loop.lines)) for loop in loops] == [(1, 2, 1, 4), (1, 0, 0, 2)]


def test_the_hottest_loop_has_the_most_products() -> None:
    """A long loop with few products among its instructions, as a transform's, does not count."""
    fmla, add = "fmla v0.4s, v1.4s, v2.s[0]", "add x0, x0, #1"
    short, dense, sparse = (
        Loop((fmla,) * products + (add,) * others) for products, others in ((10, 2), (20, 5), (30, 40))
    )
    assert hottest([short, dense, sparse]) is dense
    with pytest.raises(ValueError, match="no loop has eight products"):
        hottest([Loop((fmla, add))])


@pytest.mark.parametrize(
    ("core", "name", "ratio"),
    [
        ("cortex-a72", "GEMM 128", 4),
        ("cortex-a72", "convolution 3x3, 64", 4),
        ("neoverse-n1", "int8 convolution 3x3", 4),
        ("neoverse-v1", "depthwise 3x3, 64", 3),
    ],
)
def test_nothing_is_spilled(core: str, name: str, ratio: int) -> None:
    """A dozen products or more for each iteration, `ratio` or more for each load, and no vector on the stack."""
    (case,) = named(name)
    loop = loop_of(case, Target.named(core))
    assert loop.products >= max(12, ratio * loop.loads)
    assert loop.spills == 0


@needs_mca
@pytest.mark.parametrize("core", PEAKS)
def test_peaks_are_those_of_the_models(core: str) -> None:
    """Products that wait for nothing begin as often as `PEAKS` says, by element too."""
    mca = find_mca()
    assert mca is not None
    for factor in ("v31.4s", "v31.s[1]"):
        loop = Loop(tuple(f"fmla v{sum_}.4s, v30.4s, {factor}" for sum_ in range(24)))
        assert loop.products / loop.cycles(core, mca) == pytest.approx(PEAKS[core], rel=0.02)


def check(cores: list[str], cases: list[Case]) -> None:
    mca = find_mca()
    assert mca is not None
    for row in rows(cores, cases, mca):
        assert row.share >= row.case.thresholds[list(PEAKS).index(row.core)], (row.core, row.case.name)
        assert row.loop.spills == 0, (row.core, row.case.name)


@needs_mca
def test_shares_of_the_peak() -> None:
    """Inner loops of a matrix product, convolutions and a product of bytes reach what `CASES` says on Neoverse N1, where it is least."""
    check(["neoverse-n1"], named("GEMM 128", "convolution 1x1", "Winograd F(2x2)", "depthwise 3x3, ", "int8 GEMM"))


@needs_mca
@pytest.mark.full  # the others, on all cores: the same path
@pytest.mark.parametrize("core", PEAKS)
def test_shares_of_the_peak_of_all(core: str) -> None:
    """Every kernel of the table reaches what `CASES` says."""
    check([core], list(CASES))


def test_the_guide_has_the_table() -> None:
    """A line for each kernel, with no spill, and on each core the share that `CASES` says or more."""
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in GUIDE.read_text().splitlines() if " %)" in line}
    assert list(lines) == [case.name for case in CASES]
    for case in CASES:
        _, _, _, spills, *cells = lines[case.name].strip("| ").split(" | ")
        assert spills == "0"
        for threshold, cell in zip(case.thresholds, cells, strict=True):
            share = 0 if cell == "-" else int(cell.split("(")[1].split(" %")[0])
            assert share >= round(100 * threshold)


@needs_mca
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each kernel that was asked for, and its loop."""
    main(["--target", "neoverse-n1", "--kernel", "7x33x19", "--assembly"])
    first, *loop = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["neoverse-n1", "GEMM", "7x33x19"]
    assert any("fmla" in line for line in loop)
    with pytest.raises(SystemExit):
        main(["docs/guides/arm.md", "--kernel", "GEMM"])


def test_a_core_without_a_kernel_has_a_dash() -> None:
    """Cortex-A72 has no dot products of bytes."""
    loop = Loop(("fmla v0.4s, v1.4s, v2.s[0]",) * 10)
    found = [
        Row(case, core, loop, 10.0) for case in CASES for core, has in zip(PEAKS, case.thresholds, strict=True) if has
    ]
    lines = {line.split(" | ")[0]: line for line in table(found).splitlines()}
    assert lines["| GEMM 7x33x19"] == "| GEMM 7x33x19 | 10 | 0 | 0 | 10 (50 %) | 10 (25 %) | 10 (100 %) |"
    assert lines["| int8 GEMM 128x768x768"].endswith("| - |")
