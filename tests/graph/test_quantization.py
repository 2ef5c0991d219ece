"""The steps of quantizing, on tensors: errors are those of 8 bits, and integers are those of the formula."""

from __future__ import annotations

import pytest
import torch

from torch_hybrid_backend.graph import quantization as steps


def _within_half_a_step(actual: torch.Tensor, x: torch.Tensor, step: torch.Tensor | float) -> bool:
    return bool(((actual.double() - x.double()).abs() <= 0.5001 * torch.as_tensor(step).double()).all())


@pytest.mark.parametrize(("bits", "steps_of_largest"), [(8, 127), (7, 64)])
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_have_a_scale_per_channel(axis: int, bits: int, steps_of_largest: int) -> None:
    """A channel's error is at most half of a 127th of its largest magnitude, or of a 64th with 7 bits, however large its neighbours are;
    channels of zeros stay zeros."""
    w = torch.randn(6, 5, 3) * torch.tensor([1e-6, 1.0, 1e6, 1.0, 0.0, 1.0]).view(6, 1, 1)
    largest = w.abs().amax([d for d in range(3) if d != axis], keepdim=True)
    made = steps.weight(steps.call, w, axis, bits)
    assert _within_half_a_step(made, w, largest / steps_of_largest)
    assert not _within_half_a_step(made, w, largest / steps_of_largest / 1.5)
    assert torch.equal(steps.weight(steps.call, torch.zeros(2, 3), 0, bits), torch.zeros(2, 3))


def test_weights_of_depthwise_convolutions_have_8_bits() -> None:
    """Few products are added up there, so that errors do not average out."""
    w = torch.randn(6, 1, 3, 3)
    assert _within_half_a_step(steps.weight(steps.call, w, 0, 7), w, w.abs().amax((1, 2, 3), keepdim=True) / 127)


def test_activations_saturate_at_their_range() -> None:
    """Values in the range are off by half a step at most; values beyond become the end of the range.

    Values that are never negative have 255 steps, others 127 on either side.
    """
    x = torch.linspace(-3, 9, 4001)
    unsigned, signed = steps.tensor(steps.call, x, 0.0, 6.0), steps.tensor(steps.call, x, -2.0, 1.0)
    assert _within_half_a_step(unsigned, x.clamp(0, 6), 6 / 255)
    assert _within_half_a_step(signed, x.clamp(-2 * 128 / 127, 2), 2 / 127)
    assert torch.equal(steps.tensor(steps.call, torch.zeros(3), 0.0, 0.0), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_found_now(dtype: torch.dtype) -> None:
    """By tensor or by row, the largest magnitude is the last step; the dtype is kept."""
    x = torch.randn(7, 33).to(dtype)
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    for made, largest in (
        (steps.tensor_now(steps.call, x), x.abs().amax()),
        (steps.rows_now(steps.call, x), x.abs().amax(-1, keepdim=True)),
    ):
        assert made.dtype == dtype
        assert _within_half_a_step(made, x, largest * (1 / 127 + 2 * rounding))
    positive = x.relu()
    for made, largest in (
        (steps.tensor_now(steps.call, positive, non_negative=True), positive.amax()),
        (steps.rows_now(steps.call, positive, non_negative=True), positive.amax(-1, keepdim=True)),
    ):
        assert _within_half_a_step(made, positive, largest * (1 / 255 + 2 * rounding))
