"""Messages between a process and its children: frames of an 8-byte little-endian length and so many bytes."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<Q")


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
