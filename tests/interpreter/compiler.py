"""The interpreter's kernel compiler module (`codegen/compiler.py`): it writes a kernel down as JSON, and imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.storage.sources import sources_version

SOURCES: tuple[str, ...] = ("core", "sizes", "loops", "codegen")
SUFFIX = ".json"
ENVIRONMENT: Mapping[str, str] = {"INTERPRETER_TESTS": "1"}
_OWN = hashlib.sha256(
    b"".join(Path(__file__).with_name(f"{own}.py").read_bytes() for own in ("compiler", "wire"))
).hexdigest()


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The target, which worker processes unpickle: any machine."""

    fingerprint: str = "any machine"


def version() -> str:
    """The version of its own sources: they lie outside the package, as a third party's would."""
    return _OWN


def load() -> None:
    import tests.interpreter.wire  # noqa: F401


def compile_kernel(job: Job) -> None:
    from tests.interpreter.wire import encode

    Path(job.output).write_text(encode(job.kernel))


sources_version(*SOURCES)  # now: see there
