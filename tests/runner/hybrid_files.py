"""`.hybrid` files of hand-made plans, part by part."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.hybrid_files import HybridFile as Contents
from tests.runtime.hybrid_files import target


@dataclass
class HybridFile:
    """A file while it is put together; `write` writes it."""

    library: bytes
    processor: str = platform.machine()  # that the library is said to be for
    features: tuple[str, ...] = ()
    segments: list[tuple[str, str, bytes]] = field(default_factory=list)  # kind, name, content
    constants: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=list)  # before the file's own

    def constant(self, array: np.ndarray[Any, Any]) -> int:
        """Add a constant; return its number."""
        name = f"weights.{len(self.constants)}"
        self.segments.append(("weights", name, np.ascontiguousarray(array).tobytes()))
        self.constants.append({"segment": name, "offset": 0, **tensor(str(array.dtype), *array.shape)})
        return len(self.constants) - 1

    def state(self, name: str, array: np.ndarray[Any, Any]) -> int:
        """Add a state that begins as the array; return its number."""
        self.states.append({"name": name, "constant": self.constant(array)})
        return len(self.states) - 1

    def entry(self, name: str, plan: Mapping[str, Any], **members: Any) -> None:
        """Add a function of the model with its plan."""
        self.segments.append(("plan", f"{name}.plan", json.dumps(plan).encode()))
        members.setdefault("functions", None)
        if members["functions"] is not None:
            self.segments.append(("functions", members["functions"], b"{}"))
        base = {
            "slots": [],
            "updates": [],
            "python_parts": [],
            "needs_torch": False,
            "structure": {"in": "", "out": ""},
        }
        self.entries.append({"name": name, "plan": f"{name}.plan", **base, **members})

    def variant(self, library: bytes, *features: str) -> None:
        """Add a variant for processors with features, that has the entries and samples that are there by now."""
        name = f"library.{len(self.variants) + 1}"
        self.segments.append(("library", name, library))
        members = {"entries": self.entries, "samples": self.samples, "report": "report"}
        self.variants.append({"targets": [{**target(name, *features), "processor": self.processor}], **members})

    def write(self, path: Path) -> Path:
        """Write the file."""
        manifest = {
            "format": 1,
            "package": "0",
            "torch": "0",
            "model": "hand-made",
            "targets": [{**target("library.0", *self.features), "processor": self.processor}],
            "constants": self.constants,
            "states": self.states,
            "entries": self.entries,
            "samples": self.samples,
            "report": "report",
            **({"variants": self.variants} if self.variants else {}),
        }
        segments = {"library.0": ("library", self.library), "report": ("report", b"{}")}
        segments |= {name: (kind, content) for kind, name, content in self.segments}
        path.write_bytes(Contents(manifest, segments).to_bytes())
        path.chmod(0o644)
        return path


def tensor(dtype: str, *sizes: int, strides: Sequence[int] | None = None) -> dict[str, Any]:
    """The form of a tensor, row-major unless `strides` says otherwise."""
    compact = [int(np.prod(sizes[d + 1 :])) for d in range(len(sizes))]
    return {"dtype": dtype, "sizes": list(sizes), "strides": compact if strides is None else list(strides)}


def named(name: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """The form of an input or output."""
    return {"name": name, **form}


def value(kind: str, payload: int, form: Mapping[str, Any], offset: int = 0) -> list[Any]:
    """A value of a plan."""
    return [kind, payload, form["dtype"], form["sizes"], form["strides"], "cpu", *([offset] if offset else [])]


def kernel(symbol: str, *arguments: int, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """A step that calls a kernel of csrc/tests/host_kernels.cc."""
    return {
        "kind": "kernel",
        "library": "library",
        "symbol": symbol,
        "arguments": list(arguments),
        "sizes": list(sizes),
    }


def plan(
    values: Sequence[Sequence[Any]],
    steps: Sequence[Mapping[str, Any]],
    *,
    inputs: int,
    outputs: Sequence[int],
    constants: int = 0,
    arena: int = 0,
) -> dict[str, Any]:
    """A plan, as runtime/native/description.py writes them."""
    return {
        "version": 1,
        "values": [list(each) for each in values],
        "steps": list(steps),
        "ranges": [],
        "arenas": [["cpu", arena]] if arena else [],
        "inputs": inputs,
        "constants": constants,
        "outputs": list(outputs),
    }


def doubling_plan() -> tuple[dict[str, Any], dict[str, Any]]:
    """The form of three elements, and the plan of y = 2 (2 x) + 5 for them, by kernels of csrc/tests/host_kernels.cc."""
    row = tensor("float32", 3)
    values = [value("input", 0, row), value("arena", 0, row), value("arena", 64, row), value("fresh", 0, row)]
    steps = [kernel("double", 0, 1), kernel("double", 1, 2), kernel("plus", 2, 3, sizes=[5])]
    return row, plan(values, steps, inputs=1, outputs=[3], arena=128)
