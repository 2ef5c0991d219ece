"""Kernel names for profilers, reports and error messages. A name tells what the kernel computes: "row_softmax_gelu_0f3a9c...".

A name depends on the kernel's content and key alone: another process that finds the kernel on disk gives it the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch_hybrid_backend.loops.ir import Call, parts
from torch_hybrid_backend.loops.kernels import Kernel, RowKernel, expressions

_MOST_WORDS = 4
_DIGITS = 16
# What a scalar operation most often stands for.
_WORDS: Mapping[str, str] = {"exp_nonpositive": "exp", "rsqrt": "norm", "erf": "gelu"}
# In nearly every kernel: named only where there is nothing else to tell.
_PLAIN = frozenset("add sub mul div neg fma max min sum".split())
_SILENT = frozenset("cast round where guard eq ne lt le gt ge and or xor not".split())
_SOFTMAX = {"max", "exp", "sum"}


def symbol_of(kernel: Kernel, key: str) -> str:
    """The name of the kernel with this key in its artifact: a name for people, then the beginning of the key."""
    return f"{kernel_name(kernel)}_{key[:_DIGITS]}"


def kernel_name(kernel: Kernel) -> str:
    """A kernel's kind and at most four of its operations, in order: "row_softmax", "matmul_gelu", "map_add". No more than a hint."""
    found = list(dict.fromkeys(_operations(kernel)))
    if isinstance(kernel, RowKernel) and set(found) >= _SOFTMAX:
        found = ["softmax" if word == "exp" else word for word in found]
    told = [word for word in found if word not in _PLAIN] or found
    return "_".join([kernel.kind, *told[:_MOST_WORDS]])


def _operations(kernel: Kernel) -> Iterator[str]:
    combiners = {stage.value: stage.combiner for stage in kernel.stages} if isinstance(kernel, RowKernel) else {}
    for expr in expressions(kernel):
        # The operands of an operation are computed before it.
        for part in reversed([*parts([expr])]):
            if isinstance(part, Call) and part.op not in _SILENT:
                yield _WORDS.get(part.op, part.op)
        if combiners.get(expr):
            yield combiners[expr]
