"""What an inference graph is computed in, where that is not what the model says."""

from __future__ import annotations

AS_WRITTEN = "as-written"
# bf16, fp16: layers that gain by it. int8: activations and weights in 8 bits; int8+bf16: and the rest as bf16.
# int8-weights, int4-weights: weights alone, activations as written.
PRECISIONS = (AS_WRITTEN, "bf16", "fp16", "int8", "int8+bf16", "int8-weights", "int4-weights")
