"""Source: one kernel as the text of a Triton program, and how it is launched. Plain text: nothing here imports Triton."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_hybrid_backend.sizes.size import Dim


@dataclass(frozen=True, slots=True)
class Launch:
    """The number of programs that a kernel runs as, and what each of them is compiled with.

    `grid`: programs by axis; `constants`: the kernel's `tl.constexpr` parameters by name. `warps` of 32 threads run a program; `stages`: how
    many iterations of a loop that multiplies matrices load ahead.
    """

    grid: tuple[Dim, Dim, Dim]
    constants: Mapping[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3


class Lines:
    """The body of a function as it is written: lines, their indentation, and names that are used once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 1
        self._count = 0

    def add(self, line: str) -> None:
        self._lines.append("    " * self._depth + line)

    def name(self, stem: str = "t") -> str:
        """A name that no other value of this kernel has."""
        self._count += 1
        return f"{stem}{self._count}"

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Write the body of a loop: the lines added inside the block."""
        self.add(head)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def text(self) -> str:
        return "\n".join(self._lines)


def function_of(text: str, name: str, folder: Path) -> Any:
    """The function `name` of a program, from a module written into `folder`: Triton reads a function's text where it is defined."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return getattr(module, name)
