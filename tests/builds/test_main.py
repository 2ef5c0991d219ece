"""Progress reports of a builder. Builder processes are tested in test_builds.py."""

from __future__ import annotations

import json
import os

from torch_hybrid_backend.builds.main import GoingOn
from torch_hybrid_backend.processes.frames import split_frame


def test_going_on() -> None:
    """A builder goes on until the parent closes the pipe of orders. Progress is reported now and then, as a fraction between 0 and 1."""
    orders, closing = os.pipe()
    told, answers = os.pipe()
    now = [0.0]
    going_on = GoingOn(orders, answers, lambda: now[0])
    try:
        assert going_on(-1)
        assert going_on(0.1)  # too soon for a report
        now[0] += 0.2
        assert going_on(0.5)
        now[0] += 0.2
        assert going_on(2)
        os.close(closing)
        now[0] += 0.2
        assert not going_on(0.9)
        assert not going_on(0.9)
        received, found = bytearray(os.read(told, 4096)), []
        while (payload := split_frame(received)) is not None:
            found.append(json.loads(payload))
        assert found == [{"progress": 0.0}, {"progress": 0.5}, {"progress": 1.0}]
    finally:
        for descriptor in (orders, told, answers):
            os.close(descriptor)
