"""Messages between a process that needs kernels and its compilers."""

from __future__ import annotations

import pickle

from tests.engines.cpu.kernels_for_tests import scale_kernel
from torch_hybrid_backend.codegen.workers.protocol import Job, Order
from torch_hybrid_backend.engines.cpu.target import Target


def test_indices_survive_the_way() -> None:
    """An order is a pickle of plain data; indices compare equal to new ones on the other side."""
    order = Order(Job("key", "kernel_x", scale_kernel(), Target.host(), "x.so"), 1.0)
    copied = pickle.loads(pickle.dumps(order))
    assert copied.job.kernel.stores[0].index == order.job.kernel.stores[0].index
