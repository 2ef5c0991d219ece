"""`.hybrid` files put together byte by byte, for tests of their reader: also files that no writer would write.

`python -m tests.runtime.hybrid_files csrc/tests/corpus` renews what csrc/tests/fuzz_artifact.cc begins with.
"""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = 4096
N = 8  # elements of each tensor of `small_file`


@dataclass
class HybridFile:
    """The contents of a file. `segments`: kind and bytes by name. `edit` changes the manifest once it is complete, lengths included."""

    manifest: dict[str, Any]
    segments: dict[str, tuple[str, bytes]]
    signatures: list[bytes] = field(default_factory=list)  # 96 bytes each
    edit: Callable[[dict[str, Any]], object] = lambda manifest: None

    def text(self) -> bytes:
        """The JSON of the manifest. Its own length decides where segments lie."""
        text = b""
        while True:
            described, end = [], PAGE + len(text)
            for name, (kind, content) in self.segments.items():
                offset = -(-end // PAGE) * PAGE
                digest = hashlib.sha256(content).hexdigest()
                described.append(
                    {
                        "name": name,
                        "kind": kind,
                        "offset": offset,
                        "size": len(content),
                        "sha256": digest,
                        "encoding": "none",
                    }
                )
                end = offset + len(content)
            manifest = copy.deepcopy({**self.manifest, "segments": described})
            self.edit(manifest)
            made = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
            if len(made) == len(text):
                return made
            text = made

    def to_bytes(self) -> bytes:
        return with_text(self.text(), [content for _, content in self.segments.values()], self.signatures)


def with_text(text: bytes, contents: list[bytes], signatures: list[bytes] | None = None) -> bytes:
    """A file whose manifest is `text`, whatever that is."""
    body = text
    for content in contents:
        body += b"\0" * (-len(body) % PAGE) + content
    signatures = signatures or []
    fields = b"\x89HYBRID\n", 1, len(signatures), len(text), hashlib.sha256(text).digest(), PAGE + len(body)
    return with_header(struct.pack("<8sIIQ32sQ", *fields) + b"".join(signatures)) + body


def with_header(begin: bytes) -> bytes:
    """A header that begins so, with its checksum."""
    header = begin.ljust(PAGE - 32, b"\0")
    return header + hashlib.sha256(header).digest()


def value(kind: str, payload: int = 0, sizes: tuple[int, ...] = (N,), dtype: str = "float32") -> list[Any]:
    """A value of a plan, contiguous."""
    return [kind, payload, dtype, list(sizes), contiguous(sizes), "cpu"]


def contiguous(sizes: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)
    return strides if sizes else []


def form(name: str, sizes: tuple[int, ...] = (N,), dtype: str = "float32") -> dict[str, Any]:
    """The form of a tensor among inputs and outputs, contiguous."""
    return {"name": name, "dtype": dtype, "sizes": list(sizes), "strides": contiguous(sizes)}


def plan_text(values: list[Any], steps: list[Any], inputs: int, constants: int, outputs: list[int]) -> bytes:
    plan = {"version": 1, "values": values, "steps": steps, "ranges": [], "arenas": []}
    return json.dumps({**plan, "inputs": inputs, "constants": constants, "outputs": outputs}).encode()


def small_file() -> HybridFile:
    """A model without kernels that copies an input and a state, and has nearly all that a manifest can have."""
    plan = plan_text(
        [value("input"), value("constant"), value("input", 1), value("fresh"), value("fresh"), value("fresh")],
        [
            {"kind": "copy", "source": 0, "destination": 3},
            {"kind": "copy", "source": 2, "destination": 4},
            {"kind": "copy", "source": 0, "destination": 5},
        ],
        inputs=2,
        constants=1,
        outputs=[3, 4, 5],
    )
    weights = struct.pack(f"<{N}f", *range(N)) + b"\0" * 32 + struct.pack(f"<{N}f", *range(N))
    tensor = {"dtype": "float32", "sizes": [N], "strides": [1]}
    entry = {
        "name": "forward",
        "plan": "plan.forward",
        "functions": None,
        "python_parts": [],
        "needs_torch": False,
        "inputs": [form("x"), {"name": "flag", "value": True}],
        "sources": [["input", 0], ["state", 0]],
        "slots": [0],
        "updates": [["copy", ["state", 0], 1], ["rows", ["state", 0], 0, ["constant", 3], ["constant", 4]]],
        "results": [
            ["output", 0],
            ["input", 0],
            ["state", 0],
            ["constant", 1],
            ["literal", 3],
            ["view", ["output", 2], [2, 2], [4, 1], 2, "conj neg"],
        ],
        "outputs": [*map(form, "abcd"), {"name": "e", "value": 3}, form("f", (2, 2))],
        "structure": {"in": "", "out": ""},
    }
    manifest = {
        "format": 1,
        "package": "0",
        "torch": "2",
        "model": "small",
        "report": "report",
        "targets": [],
        "constants": [{"segment": "weights.0", "offset": offset, **tensor} for offset in (0, 64)],
        "states": [{"name": "cache", "constant": 1}],
        "entries": [entry],
        "samples": [{"entry": "forward", "inputs": [0, None], "outputs": [0, 0, 1, 1, None, 2], "tolerance": 1e-5}],
    }
    for dtype, sizes in (("float32", (2, 2)), ("int64", (2,)), ("float32", (2,))):
        strides = contiguous(sizes)
        more = {"segment": "weights.0", "offset": 0, "dtype": dtype, "sizes": list(sizes), "strides": strides}
        manifest["constants"].append(more)  # type: ignore[attr-defined]
    segments = {"plan.forward": ("plan", plan), "report": ("report", b"{}"), "weights.0": ("weights", weights)}
    return HybridFile(manifest, segments)


def file_for_many_sizes() -> HybridFile:
    """A model that copies an input of n times 2 elements, in the arena too, for n from 1 to 9; expressions of every kind."""
    file = small_file()
    n, half, twice = ({"size": number} for number in range(3))
    matrix = {"dtype": "float32", "sizes": [n, 2], "strides": [2, 1]}
    sizes = [
        "n",
        ["//", ["max", "n", ["%", "n", 7]], 2],
        ["*", "n", 2],
        ["span", ["n", 2], [2, 1]],
        ["min", "n", ["+", "n", -1]],
    ]
    values = [["input", 0, *matrix.values(), "cpu"], ["fresh", 0, *matrix.values(), "cpu"]]
    values.append(["alias", 1, "float32", [half], [2], "cpu", half])
    plan = json.loads(
        plan_text(values, [{"kind": "copy", "source": 0, "destination": 1}], inputs=1, constants=0, outputs=[1, 2])
    )
    plan |= {"arenas": [], "lives": [], "symbols": ["n"], "sizes": sizes}
    entry = file.manifest["entries"][0]
    entry |= {
        "inputs": [{"name": "x", **matrix}],
        "sources": [["input", 0]],
        "slots": [],
        "updates": [],
        "results": [["output", 0], ["view", ["output", 0], [twice], [1], 0, ""]],
        "outputs": [{"name": "a", **matrix}, {"name": "b", "dtype": "float32", "sizes": [twice], "strides": [1]}],
        "symbols": [{"name": "n", "input": 0, "dim": 0, "factor": 1, "offset": 0, "least": 1, "most": 9, "example": 2}],
        "sizes": sizes,
        "limits": [[{"size": 3}, 0, 18], [{"size": 4}, 0, 8]],
    }
    file.segments["plan.forward"] = "plan", json.dumps(plan, separators=(",", ":")).encode()
    file.manifest["samples"] = []
    return file


def file_with_control_flow() -> HybridFile:
    """A model of three truth values and two tensors: while the first is true it becomes the second, and x becomes y if the third is true, else
    a copy of itself."""
    file = small_file()
    flag = value("raw_input", 0, (), "bool")
    flags = [[*flag[:1], number, *flag[2:]] for number in (0, 2, 3)]
    x, y, fresh = value("raw_input", 1), value("raw_input", 4), value("fresh")
    filled = [value("returned", 0, (), "bool"), value("returned")]

    def plan(values: list[Any], steps: list[Any], inputs: int, outputs: list[int]) -> dict[str, Any]:
        made = json.loads(plan_text(values, steps, inputs, 1, outputs))
        del made["version"]
        return made  # type: ignore[no-any-return]

    copies = [[[*value("input", number)], fresh] for number in (0, 1)]
    branch = {"kind": "branch", "predicate": 1, "plans": [0, 1], "inputs": [3, 2], "outputs": [4]}
    loop = {"kind": "loop", "plans": [2, 3], "inputs": [0, 3, 1, 2, 4], "outputs": [-1, 6]}
    inner = [
        *(plan(each, [{"kind": "copy", "source": 0, "destination": 1}], 2, [1]) for each in copies),
        plan([flags[0]], [], 5, [0]),
        plan([flags[1], flags[2], x, y, filled[1]], [branch], 5, [0, 4]),
    ]
    whole = plan([*flags, x, y, *filled], [loop], 5, [6])
    file.segments["plan.forward"] = (
        "plan",
        json.dumps({"version": 1, **whole, "plans": inner}, separators=(",", ":")).encode(),
    )
    flag_form = [form(name, (), "bool") for name in ("flag", "next", "which")]
    file.manifest["entries"][0] |= {
        "inputs": [flag_form[0], form("x"), *flag_form[1:], form("y")],
        "sources": [["input", number] for number in range(5)],
        "updates": [],
        "results": [["output", 0]],
        "outputs": [form("a")],
    }
    file.manifest["samples"] = []
    return file


def coded_file() -> HybridFile:
    """The small file with its weights coded: a stored block, and one of two values of 4 bytes."""
    file = small_file()
    _, weights = file.segments["weights.0"]
    values, lengths = struct.pack("<B2f", 1, 0, 1), b"\x11".ljust(128, b"\0")
    blocks = b"\0" + weights[:64], b"\4" + values + lengths + b"\xaa"
    table = struct.pack("<5I", 2, len(blocks[0]), 64, len(blocks[1]), len(weights) - 64)
    file.segments["weights.0"] = "weights", table + b"".join(blocks)
    file.edit = lambda manifest: manifest["segments"][2].update(encoding="huffman", decoded=len(weights))
    return file


def file_with_variants() -> HybridFile:
    """The small file with two variants, over the same plan and weights: one for a processor with a feature that none has, and its own."""
    file = small_file()
    file.segments["library"] = "library", b"code of another processor"
    members = {member: file.manifest[member] for member in ("entries", "samples", "report")}
    file.manifest["variants"] = [{**members, "targets": [target("library", "new_feature")]}]
    return file


def target(library: str, *features: str) -> dict[str, Any]:
    """The library of that segment, for machines like this one that have the features."""
    return {
        "system": "linux",
        "processor": platform.machine(),
        "features": list(features),
        "library": library,
    }


def main(folder: Path) -> None:
    """Write the seeds of the fuzzer: a whole file, and texts of manifests with those of their plans."""
    file = small_file()
    whole = file.to_bytes()
    _, plan = file.segments["plan.forward"]
    folder.mkdir(exist_ok=True)
    (folder / "whole").write_bytes(b"F" + whole)
    (folder / "texts").write_bytes(b"M" + str(len(whole)).encode() + b"\n" + file.text() + b"\0" + plan)
    (folder / "coded").write_bytes(b"F" + coded_file().to_bytes())
    for name, other in (
        ("sizes", file_for_many_sizes()),
        ("control_flow", file_with_control_flow()),
        ("variants", file_with_variants()),
    ):
        _, plan = other.segments["plan.forward"]
        size = len(other.to_bytes())
        (folder / name).write_bytes(b"M" + str(size).encode() + b"\n" + other.text() + b"\0" + plan)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
