"""A kernel's program as a file that runs alone: with inputs of its own, launched as the plan launches it, and timed.

python 003_r0_row_softmax_0f3a9c....py                          on a GPU; it needs torch and Triton, and nothing of this package
TRITON_INTERPRET=1 python 003_r0_row_softmax_0f3a9c....py       by Triton's interpreter, on the CPU, with this package's substitutes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_hybrid_backend.core.program import DeviceLaunch
from torch_hybrid_backend.engines.triton.artifact import Header
from torch_hybrid_backend.engines.triton.source import Launch
from torch_hybrid_backend.loops.index import Index, LoopVar, Scalar
from torch_hybrid_backend.loops.ir import Buffer, Expr, indices, loads_of, parts
from torch_hybrid_backend.loops.kernels import Argument, Kernel, expressions
from torch_hybrid_backend.sizes.size import Dim, size_hint

_MAIN = '''

# What follows is no part of the kernel: it runs it alone, on numbers of its own.


def arguments(device):
    """What it reads and what it writes, as they lie in memory, then sizes: those that it was compiled with."""
    torch.manual_seed(0)
    return [
{arguments}
    ]


def launch(*arguments):
    """As the plan does."""
{lend}    kernel = {name}
    if triton.knobs.runtime.interpret:  # Triton's interpreter lacks functions, which this package has substitutes of
        from torch_hybrid_backend.engines.triton.interpreted import interpretable

        kernel = interpretable(pathlib.Path(__file__).read_text(), "{name}")
    kernel[{grid}](*arguments, {constants}num_warps={warps}, num_stages={stages})


if __name__ == "__main__":
    on_gpu = not triton.knobs.runtime.interpret
    given = arguments("cuda" if on_gpu else "cpu")
    launch(*given)
    for number, written in enumerate(given[{reads}:{tensors}]):
        print(f"out{{number}}: {{written.dtype}}, {{written.numel()}} elements, mean {{written.double().mean().item():.6g}}")
    if on_gpu:
        print(f"{{1e3 * triton.testing.do_bench(lambda: launch(*given)):.2f}} us")  # which waits for it
'''
_LEND = """    # What Triton's launcher lends programs for the descriptors that they make.
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
"""
_MOST_INDEX = 1 << 31


def standalone(kernel: Kernel, name: str, header: Header, step: DeviceLaunch, launch: Launch) -> str:
    """The text of the file. `name`: of the program's function. `step`: the launch in the plan. Sizes known only at run time are those that the
    kernel was compiled with.

    Its inputs are random: floats of the standard normal distribution; what elements are picked by, where the kernel may read.
    """
    highest = _highest_indices(kernel)
    reads, writes = [*kernel.reads], [*kernel.writes]
    lines = [_input(f"in{i}", argument, highest) for i, argument in enumerate(reads)]
    lines += [
        f"torch.empty({size_hint(a.span)}, dtype=torch.{a.buffer.dtype}, device=device),  # out{i}"
        for i, a in enumerate(writes)
    ]
    lines += [f"{_number(scalar.value)}," for scalar in step.scalars]
    main = _MAIN.format(
        arguments="\n".join(f"        {line}" for line in lines),
        name=name,
        lend=_LEND if header.scratch_bytes else "",
        grid=tuple(size_hint(n) for n in step.grid),
        constants="".join(f"{name}={value}, " for name, value in header.constants.items()),
        warps=launch.warps,
        stages=launch.stages,
        reads=len(reads),
        tensors=len(reads) + len(writes),
    )
    return (
        header.text.replace("\nimport triton\n", "\nimport pathlib\n\nimport torch\nimport triton\n", 1).rstrip() + main
    )


def _number(value: Dim | float) -> int | float:
    return value if isinstance(value, float) else size_hint(value)


def _input(name: str, argument: Argument, highest: dict[Buffer, int]) -> str:
    buffer, dtype = argument.buffer, argument.buffer.dtype
    if buffer.by_value:
        return f"{1.5 if 'float' in dtype else 3},  # {name}"
    count = size_hint(argument.span)
    if "float" in dtype:
        return f"torch.randn({count}, device=device).to(torch.{dtype}),  # {name}"
    end = 2 if dtype == "bool" else highest.get(buffer, 100)
    return f"torch.randint({end}, ({count},), device=device).to(torch.{dtype}),  # {name}"


def _highest_indices(kernel: Kernel) -> dict[Buffer, int]:
    """Upper bounds of the values of buffers that hold indices of elements."""
    found: dict[Buffer, int] = {}
    for scalar in _scalars(expressions(kernel)):
        end = min(_MOST_INDEX, size_hint(scalar.high) + 1)
        for load in loads_of(scalar.expr):
            found[load.buffer] = min(found.get(load.buffer, end), end)
    return found


def _scalars(exprs: Sequence[Expr]) -> Iterator[Scalar]:
    for part in parts(exprs, within_indices=True):
        for index in indices(part):
            yield from _of(index)


def _of(index: Index) -> Iterator[Scalar]:
    for atom, _ in index.terms:
        if isinstance(atom, Scalar):
            yield atom
        elif not isinstance(atom, LoopVar):
            yield from _of(atom.numerator)
