"""Precisions of inference graphs other than what the model says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AS_WRITTEN = "as-written"
# bf16, fp16: layers that gain by it. int8: activations and weights in 8 bits; int8+bf16: and the rest as bf16.
# int8-weights, int4-weights: weights alone, activations as written.
PRECISIONS = (AS_WRITTEN, "bf16", "fp16", "int8", "int8+bf16", "int8-weights", "int4-weights")
# Of how many neighbours along a row one scale may be.
GROUP_SIZES = (32, 64, 128, 256)
# Weights of 7 bits: two products of such by 255 add up to 32,640 at most, which 16 bits hold.
SEVEN_BITS = (-64, 64)
# To how many bits activations may be rounded where they meet weights of 8 and 4 bits; 32: not at all.
ACTIVATION_BITS = (8, 16, 32)
# The mark of a pass on a product, in `meta`: to how many bits, one of `ACTIVATION_BITS`, kernels may round the rows that it multiplies by its
# weight, by the largest of a group of neighbours: of up to `ROW_GROUPS`.
ROW_BITS = "row_bits"
ROW_GROUPS: Mapping[int, int] = {8: 64, 16: 256}


def are_seven_bits(bounds: tuple[int, int]) -> bool:
    """True if integers between these bounds are such weights."""
    return SEVEN_BITS[0] <= bounds[0] and bounds[1] <= SEVEN_BITS[1]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form of weights of 8 and 4 bits, and of what meets them.

    `group_size`: neighbours along a row that share a scale; None: 32 under `int4-weights`, a whole row under `int8-weights`.
    `zero_points`: True if a group has a zero point beside its scale, for values that are not about 0.
    `activation_bits`: one of `ACTIVATION_BITS`.
    """

    group_size: int | None = None
    zero_points: bool = False
    activation_bits: int = 8


SYMMETRIC = WeightForm()

# How far outputs may be off those of the graph as written: root mean square of the difference over root mean square.
DEFAULT_TOLERANCES: Mapping[str, float] = {
    "bf16": 0.02,
    "fp16": 0.02,
    "int8": 0.1,
    "int8+bf16": 0.1,
    "int8-weights": 0.1,
    "int4-weights": 0.3,  # a weight in 4 bits is off by 0.075, two layers by 0.11: 0.1 would leave hardly any
}
