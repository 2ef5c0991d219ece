"""What the process that needs kernels and its compiler processes say to each other.

Frames of an 8-byte little-endian length and so many bytes. To the worker: a pickled `Order`. Back: JSON, so that nothing a crashing
compiler writes is ever unpickled:

    {"ready": true, "version": ...}                             once, when the compiler is loaded; `compiler_version`
    {"ready": false, "error": {...}}                            instead, where that failed
    {"error": null} or {"error": {"type": ..., "message": ..., "traceback": ...}}      for each job
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from torch_hybrid_backend.codegen.compiler import CodeTarget
from torch_hybrid_backend.loops.kernels import Kernel

_LENGTH = struct.Struct("<Q")
# A worker that nobody gave work for a while leaves with this status: whoever was about to use it takes another.
IDLE_EXIT_STATUS = 73


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Compile `kernel` to the file `output`, where it is called `symbol`.

    `key` is equal for jobs that make the same artifact. With `assembly`, the text of its machine code, where the compiler
    has one, is written beside it with the suffix ".s".
    """

    key: str
    symbol: str
    kernel: Kernel
    target: CodeTarget
    output: str
    assembly: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A job as it is sent: the worker ends itself after `limit_s` seconds, in case nobody is left to end it."""

    job: Job
    limit_s: float


def frame(payload: bytes) -> bytes:
    """A message, ready to be written."""
    return _LENGTH.pack(len(payload)) + payload


def split_frame(received: bytearray) -> bytes | None:
    """Take the first whole message out of what was received; None where it has not all arrived."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    payload = bytes(received[_LENGTH.size : end])
    del received[:end]
    return payload
