"""Messages between processes."""

from __future__ import annotations

import io

from torch_hybrid_backend.processes.frames import frame, split_frame


def test_frames() -> None:
    """Frames are separated again, however their bytes arrive."""
    sent = frame(b"one") + frame(b"") + frame(b"x" * 1000)
    received, messages = bytearray(), []
    stream = io.BytesIO(sent)
    while chunk := stream.read(7):
        received += chunk
        while (message := split_frame(received)) is not None:
            messages.append(message)
    assert messages == [b"one", b"", b"x" * 1000]
    assert not received
