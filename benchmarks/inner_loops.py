"""Inner loops of kernels for AArch64: their instructions, and the cycles that llvm-mca gives them, beside the core's peak.

    python -m benchmarks.inner_loops                                    # all cores
    python -m benchmarks.inner_loops --target neoverse-n1 --kernel conv --assembly
    python -m benchmarks.inner_loops docs/guides/arm.md                 # renews the page's table

No AArch64 machine is needed, and no figure comes from one: llvm-mca (Debian's `llvm-22`; models of Neoverse cores are in LLVM 18 and later)
counts cycles by LLVM's model of the core, with all data in the first-level cache and branches foretold.

The loop shown is the innermost one with the most products, among those in which products are about as dense as anywhere in the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tools.generated import replaced, rewrite
from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.engines.cpu.backend import TvmBackend
from torch_hybrid_backend.engines.cpu.kernels import CpuConvKernel, CpuMatMulKernel
from torch_hybrid_backend.engines.cpu.target import Target, tvm_target
from torch_hybrid_backend.engines.cpu.variants.alternatives import alternatives
from torch_hybrid_backend.engines.cpu.weights import Weight
from torch_hybrid_backend.partition.regions import partition_graph

_START, _END = "<!-- inner-loops:start -->", "<!-- inner-loops:end -->"
_MCA = ("llvm-mca-22", "llvm-mca-21", "llvm-mca-20", "llvm-mca-19", "llvm-mca-18")
_INSTALL = "apt-get install llvm-22"
_ITERATIONS = 200
# Of loops whose share of products is at least so much of the best one's, the one with the most products counts.
_DENSE = 0.9
_PRODUCT = re.compile(r"(fmla|fmul|[su]dot|sudot|usdot|bfdot|(?:[su]|us|bf)mmla)\s.*\.(4s|2d|16b)")
_LOAD = re.compile(r"ld[1rnpu]")
_STACK = re.compile(r".*\b[qdsv]\d+.*\[sp\b")
_LABEL = re.compile(r"([.\w]+):")
_JUMP = re.compile(r"(?:b|b\.\w+|cbn?z|tbn?z)\s.*?(\.L\w+)$")

# Products of four float32, or of sixteen bytes, that begin in a cycle by LLVM's models of the cores; that of Cortex-A72 is that of A57, two of
# whose pipelines work together on 128 bits.
PEAKS = {"neoverse-n1": 2, "neoverse-v1": 4, "cortex-a72": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel: the middle one of those that `make` of `inputs` becomes, of which all but the first are weights.

    `thresholds`: the share of the peak that its inner loop reaches on each core of `PEAKS`, in their order; 0 where the core has no such
    instructions. `algorithm`: "" for the first choice, or a variant's name.
    """

    name: str
    make: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    thresholds: tuple[float, float, float] = (0.9, 0.9, 0.9)
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """An inner loop: its lines of assembly."""

    lines: tuple[str, ...]

    def _count(self, pattern: re.Pattern[str]) -> int:
        return sum(pattern.match(line) is not None for line in self.lines)

    @property
    def products(self) -> int:
        """Multiply-adds and dot products of whole vectors."""
        return self._count(_PRODUCT)

    @property
    def loads(self) -> int:
        """Loads, of one register or two."""
        return self._count(_LOAD)

    @property
    def spills(self) -> int:
        """Vectors that are stored to the stack, or loaded from there."""
        return self._count(_STACK)

    def cycles(self, core: str, mca: str) -> float:
        """Cycles of one iteration, by llvm-mca at path `mca`. Raises RuntimeError with its message where it fails."""
        text = "\n".join(re.sub(r"\.L\w+", "0", line) for line in self.lines)
        options = ["-mtriple=aarch64", f"-mcpu={core}", f"-iterations={_ITERATIONS}", "-json"]
        done = subprocess.run([mca, *options], input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{mca} failed: {done.stderr}")
        return float(json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]["TotalCycles"]) / _ITERATIONS


def find_mca() -> str | None:
    """The path of an llvm-mca that knows the cores; None where there is none."""
    return next((path for name in _MCA if (path := shutil.which(name))), None)


def inner_loops(assembly: str) -> list[Loop]:
    """The innermost loops of a function, their lines without comments, labels and directives."""
    lines = [line.split("//")[0].strip() for line in assembly.splitlines()]
    lines = [line for line in lines if line and (_LABEL.match(line) or not line.startswith("."))]
    labels = {found[1]: place for place, line in enumerate(lines) if (found := _LABEL.match(line))}
    jumps = [
        (labels.get(found[1], len(lines)), place) for place, line in enumerate(lines) if (found := _JUMP.match(line))
    ]
    spans = {(start, end) for start, end in jumps if start < end}
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return [
        Loop(tuple(line for line in lines[start : end + 1] if not _LABEL.match(line))) for start, end in sorted(inner)
    ]


def hottest(loops: Sequence[Loop]) -> Loop:
    """The loop of a kernel that its time goes into: see the module. Raises ValueError where none has products."""
    found = [loop for loop in loops if loop.products >= 8]
    if not found:
        raise ValueError("no loop has eight products of whole vectors")
    best = max(loop.products / len(loop.lines) for loop in found)
    return max(
        (loop for loop in found if loop.products >= _DENSE * best * len(loop.lines)), key=lambda loop: loop.products
    )


def loop_of(case: Case, target: Target) -> Loop:
    """The hottest loop of a case's kernel for a target."""
    from torch_hybrid_backend.engines.cpu.tir.emit import emit_kernel
    from torch_hybrid_backend.engines.cpu.tir.pipeline import build

    kernel = _kernel(case, TvmBackend(target))
    return hottest(
        inner_loops(build("kernel", emit_kernel(kernel, "kernel", target), tvm_target(target)).inspect_source("asm"))
    )


def _kernel(case: Case, backend: TvmBackend) -> CpuConvKernel[Weight] | CpuMatMulKernel[Weight]:
    """A case's kernel, its weights constant."""
    config = Config(cache=False)
    engine = KernelEngine(backend, config, open_services(config))
    with torch.no_grad():
        traced = make_fx(lambda *xs: (case.make(*xs),), tracing_mode="fake", _allow_non_fake_inputs=True)(*case.inputs)
    (segment,) = partition_graph(traced, [engine], config).graph.segments
    first, *weights = segment.region.inputs
    constant = (first, *[dataclasses.replace(weight, is_constant=True) for weight in weights])
    made = assemble(dataclasses.replace(segment.region, inputs=constant), backend)
    kernels = [kernel for kernel in made.kernels if isinstance(kernel, CpuConvKernel | CpuMatMulKernel)]
    kernel = kernels[len(kernels) // 2]
    if not case.algorithm:
        return kernel
    packed = {each.buffer: each for each in made.packed}
    (variant,) = [each for each in alternatives(kernel, packed, backend.target) if each.name == case.algorithm]
    (other,) = variant.kernels
    assert isinstance(other, CpuConvKernel)
    return other


def _convolved(stride: int = 1, padding: int = 1, groups: int = 1) -> Callable[..., torch.Tensor]:
    """Convolutions one after the other, the one in the middle with the stride; one of bytes where the image is of bytes."""

    def convolve(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            (weight,) = weights
            return nn.functional.conv2d(x.float() * 0.5, weight.float() * 0.5, None, stride, padding, 1, groups)
        for place, weight in enumerate(weights):
            x = nn.functional.conv2d(x, weight, None, stride if place == len(weights) // 2 else 1, padding, 1, groups)
        return x

    return convolve


def _multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w) if x.dtype == torch.float32 else torch._int_mm(x, w)


def _floats(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape) for shape in shapes)


def _layers(image: tuple[int, ...], weight: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """An image and the weights of three layers, so that the one in the middle reads and writes blocked channels."""
    return _floats((1, *image), weight, weight, weight)


def _bytes(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(left, dtype=dtype), torch.zeros(right, dtype=torch.int8)


# LLVM's model of N1 begins three operations a cycle, and takes a load for two: with a load for every other product, as in depthwise
# convolutions, that is all that they can reach.
_WIDE, _SQUARE = (64, 56, 56), (64, 64, 3, 3)
CASES = (
    Case("GEMM 128x768x768", _multiplied, _floats((128, 768), (768, 768))),
    Case("GEMM 197x64x197", _multiplied, _floats((197, 64), (64, 197))),
    Case("GEMM 7x33x19", _multiplied, _floats((7, 33), (33, 19)), (0.8, 0.9, 0.9)),
    Case("convolution 3x3, 64x56x56", _convolved(), _layers(_WIDE, _SQUARE)),
    Case("convolution 3x3 stride 2, 64x56x56", _convolved(2), _layers(_WIDE, _SQUARE)),
    Case("convolution 3x3, 512x7x7", _convolved(), _layers((512, 7, 7), (512, 512, 3, 3))),
    Case("convolution 1x1, 256x28x28", _convolved(1, 0), _layers((256, 28, 28), (256, 256, 1, 1))),
    Case("Winograd F(2x2), 64x56x56", _convolved(), _layers(_WIDE, _SQUARE), algorithm="winograd 2"),
    Case("Winograd F(4x4), 64x56x56", _convolved(), _layers(_WIDE, _SQUARE), algorithm="winograd 4"),
    Case("depthwise 3x3, 64x56x56", _convolved(1, 1, 64), _layers(_WIDE, (64, 1, 3, 3)), (0.7, 0.9, 0.9)),
    Case("depthwise 3x3 stride 2, 64x56x56", _convolved(2, 1, 64), _layers(_WIDE, (64, 1, 3, 3)), (0.5, 0.9, 0.9)),
    Case("depthwise 5x5, 64x28x28", _convolved(1, 2, 64), _layers((64, 28, 28), (64, 1, 5, 5)), (0.7, 0.9, 0.9)),
    Case("int8 GEMM 128x768x768", _multiplied, _bytes((128, 768), (768, 768), torch.int8), (0.9, 0.9, 0)),
    Case("int8 convolution 3x3, 64x14x14", _convolved(), _bytes((1, 64, 14, 14), _SQUARE), (0.9, 0.9, 0)),
    Case(
        "int8 convolution 1x1, 256x28x28", _convolved(1, 0), _bytes((1, 256, 28, 28), (256, 256, 1, 1)), (0.9, 0.9, 0)
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A case on a core. `share`: of the core's peak."""

    case: Case
    core: str
    loop: Loop
    cycles: float

    @property
    def share(self) -> float:
        return self.loop.products / self.cycles / PEAKS[self.core]


def rows(cores: Sequence[str], cases: Sequence[Case], mca: str) -> Iterator[Row]:
    """A row for each core and each case that it has a kernel for."""
    for core in cores:
        for case in cases:
            if case.thresholds[list(PEAKS).index(core)]:
                loop = loop_of(case, Target.named(core))
                yield Row(case, core, loop, loop.cycles(core, mca))


def table(found: Sequence[Row]) -> str:
    """A table in Markdown, a line for each kernel: products and loads of an iteration as on the first core, the most spills on any, and for
    each core cycles and the share of its peak."""
    lines = [
        f"| inner loop | products | loads | spills | {' | '.join(PEAKS)} |",
        f"|---|---:|---:|---:|{'---:|' * len(PEAKS)}",
    ]
    for case in CASES:
        of = {row.core: row for row in found if row.case is case}
        loop = next(iter(of.values())).loop
        cells = [f"{of[core].cycles:.0f} ({100 * of[core].share:.0f} %)" if core in of else "-" for core in PEAKS]
        spills = max(row.loop.spills for row in of.values())
        lines.append(f"| {case.name} | {loop.products} | {loop.loads} | {spills} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kernel, or renew the table in the named pages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inner_loops", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("pages", nargs="*", help="pages whose table is renewed")
    parser.add_argument("--target", choices=PEAKS, action="append", help="a core; all where none is named")
    parser.add_argument("--kernel", default="", help="only kernels whose name has this in it")
    parser.add_argument("--assembly", action="store_true", help="print the loops")
    options = parser.parse_args(arguments)
    mca = find_mca()
    if mca is None:
        parser.error(f"no llvm-mca that knows these cores is installed, of {', '.join(_MCA)}: {_INSTALL}")
    if options.pages and (options.target or options.kernel):
        parser.error("a page has all kernels and cores: leave out --target and --kernel")
    cases, found = [case for case in CASES if options.kernel in case.name], []
    for row in rows(options.target or list(PEAKS), cases, mca):
        found.append(row)
        if not options.pages:
            loop = row.loop
            counts = f"{loop.products:4} products {loop.loads:3} loads {loop.spills:2} spills {row.cycles:7.1f} cycles"
            print(f"{row.core:<12} {row.case.name:<36} {counts} {100 * row.share:4.0f} %", flush=True)
            if options.assembly:
                print("\n".join(f"    {line}" for line in loop.lines))
    if options.pages:
        rewrite(options.pages, lambda text: replaced(text, _START, _END, table(found)))


if __name__ == "__main__":
    main()
