"""Artifacts: what a kernel was compiled to, in one file.

    the machine code   the header, JSON   8 bytes, little endian: how long the header is   HYBRID-TRITON-1\\n

The header has the program's text and all that launching it takes; of a kernel for the interpreter there is no machine code. That comes first,
so that the file is a module as a driver reads it: it is told where an image begins, and not how long it is. (The interpreter's own driver finds
the header there: `host_driver.py`.)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_hybrid_backend.errors import CacheError

_MAGIC = b"HYBRID-TRITON-1\n"
_LENGTH = struct.Struct("<Q")
_END = _LENGTH.size + len(_MAGIC)


@dataclass(frozen=True, slots=True)
class Header:
    """`symbol`: the kernel's name in the machine code. `signature`: its parameters' types by name, as Triton writes them ("*fp32": an address),
    but those of `constants`, its `tl.constexpr` parameters. `threads`: of a program. `scratch_bytes`: of the device's memory that a launch
    lends each program, for descriptors of tensors (`schedules/boxes.py`)."""

    text: str
    symbol: str
    signature: Mapping[str, str]
    constants: Mapping[str, int]
    threads: int
    shared_bytes: int = 0
    scratch_bytes: int = 0


def write(path: Path, header: Header, code: bytes = b"") -> None:
    """Write an artifact."""
    fields: dict[str, Any] = {name: getattr(header, name) for name in Header.__slots__}
    text = json.dumps(fields).encode()
    path.write_bytes(b"".join((code, text, _LENGTH.pack(len(text)), _MAGIC)))


def read(path: Path) -> tuple[Header, bytes]:
    """The header and the machine code of an artifact. Raises CacheError for a file that is none."""
    data = path.read_bytes()
    try:
        if not data.endswith(_MAGIC):
            raise ValueError("it does not end as one")
        (length,) = _LENGTH.unpack_from(data, len(data) - _END)
        start = len(data) - _END - length
        if start < 0:
            raise ValueError("its header is missing")
        return Header(**json.loads(data[start:-_END])), data[:start]
    except (ValueError, TypeError, struct.error) as error:
        raise CacheError(f"{path} is no artifact of the Triton engine: {error}") from error


def header_at(image: bytes) -> Header:
    """The header at the beginning of an artifact without machine code, as far as its first zero. Raises CacheError where there is none."""
    try:
        return Header(**json.JSONDecoder().raw_decode(image.decode(errors="replace"))[0])
    except (ValueError, TypeError) as error:
        raise CacheError(f"this is no kernel for Triton's interpreter: {error}") from error
