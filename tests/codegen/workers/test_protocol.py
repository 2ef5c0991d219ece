"""Messages between a process that needs kernels and its compilers."""

from __future__ import annotations

import io
import pickle

from tests.engines.tvm.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.protocol import Job, Order, frame, split_frame
from torch_hybrid_backend.engines.tvm.target import Target


def test_frames() -> None:
    """Messages come apart again however they arrive."""
    sent = frame(b"one") + frame(b"") + frame(b"x" * 1000)
    received, messages = bytearray(), []
    stream = io.BytesIO(sent)
    while chunk := stream.read(7):
        received += chunk
        while (message := split_frame(received)) is not None:
            messages.append(message)
    assert messages == [b"one", b"", b"x" * 1000]
    assert not received


def test_indices_survive_the_way() -> None:
    """An order is a pickle of plain data; indices compare equal to new ones on the other side."""
    order = Order(Job("key", "kernel_x", scale_kernel(), Target.host(), "x.so"), 1.0)
    copied = pickle.loads(pickle.dumps(order))
    assert copied.job.kernel.stores[0].index == order.job.kernel.stores[0].index
