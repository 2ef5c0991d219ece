"""Values that depend on no input are computed once."""

from __future__ import annotations

import torch

from torch_hybrid_backend.passes.canonical.dead_code import dead_code
from torch_hybrid_backend.passes.canonical.fold_constants import fold_constants
from torch_hybrid_backend.passes.context import PassContext


def causal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return x.masked_fill(~mask, float("-inf"))


def test_mask_becomes_a_buffer(captured):
    """A causal mask is one buffer."""
    subject = captured(causal, torch.randn(4, 4))
    assert subject.apply(fold_constants, dead_code, exact=True)
    assert len(subject.gm.graph.find_nodes(op="get_attr")) == 1
    assert set(subject.operators()) <= {"where.self", "full.default", "scalar_tensor.default"}


def test_limit(captured):
    """Above the size limit the mask stays computed."""
    subject = captured(causal, torch.randn(4, 4))
    subject.ctx = PassContext(fold_limit_bytes=15)
    assert not subject.apply(fold_constants, exact=True)


def test_uniform_values_become_fills(captured):
    """A constant expression of equal elements becomes full, which a loop gets for nothing."""
    subject = captured(lambda x: x + (torch.zeros(3) + 1).cos(), torch.randn(3))
    assert subject.apply(fold_constants, dead_code, exact=True)
    assert subject.operators() == {"full.default": 1, "add.Tensor": 1}


def test_ranges_and_fills_stay(captured):
    """arange and full are free where they are."""
    subject = captured(lambda x: x + torch.arange(3) + torch.full((3,), 2.0), torch.randn(3))
    assert not subject.apply(fold_constants, exact=True)
    for node in subject.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.start_step):
        node.target, node.args = torch.ops.aten.arange.default, (3,)  # as engines have it
    assert not subject.apply(fold_constants, exact=True)


def test_returned_constants_stay_fresh(captured):
    """A returned constant is computed in every call: the caller may write to it."""
    subject = captured(lambda x: (x + 1, torch.arange(3).square()), torch.randn(3))
    subject.apply(fold_constants, dead_code, exact=True)
    first, second = subject.run()[1], subject.run()[1]
    assert first.data_ptr() != second.data_ptr()


def test_random_stays(captured):
    """Random numbers are no constants."""
    subject = captured(lambda x: x * torch.rand(3).round(), torch.randn(3))
    assert not fold_constants(subject.gm, subject.ctx)


def test_views_keep_their_base(captured):
    """The base of an expanded constant is folded, not the expansion."""
    subject = captured(lambda x: x * torch.arange(3).cos().expand(1000, 3), torch.randn(1000, 3))
    assert subject.apply(fold_constants, dead_code, exact=True)
    assert all(buffer.numel() == 3 for buffer in subject.gm.buffers())


def test_other_devices_are_not_read(captured):
    """A constant on another device stays an expression, as it was: its elements would have to be waited for, and meta has none."""

    def elsewhere(x: torch.Tensor) -> torch.Tensor:
        return x.to("meta") * torch.arange(3, device="meta").cos() + torch.ones(3).cumsum(0).to("meta")

    subject = captured(elsewhere, torch.randn(3))
    before = subject.operators()
    assert fold_constants(subject.gm, subject.ctx)  # the sum, which is on the CPU
    dead_code(subject.gm, subject.ctx)
    assert {
        name: count for name, count in before.items() if name not in ("ones.default", "full.default", "cumsum.default")
    } == {name: count for name, count in subject.operators().items() if name != "full.default"}
    assert [buffer.device.type for buffer in subject.gm.buffers()] == ["cpu"]
