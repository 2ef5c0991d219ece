"""Messages between a process and its children. A frame is an 8-byte little-endian length, then the message."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """The frame of a message."""
    return _LENGTH.pack(len(payload)) + payload


def split_frame(received: bytearray) -> bytes | None:
    """Remove the first message from the received bytes and return the message; None if it is not complete yet."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    payload = bytes(received[_LENGTH.size : end])
    del received[:end]
    return payload
