"""Models for PyTorch's compilers in a precision below float32: inductor, and those that are built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import GROUP, Prepared, Setting, training

Compile = Callable[[nn.Module], Callable[..., object]]


def prepared(model: nn.Module, inputs: Inputs, setting: Setting, compiled: Compile) -> Prepared:
    """The model as PyTorch's own tools write it in the setting's precision, under `compiled`: autocast for 16 bits; torchao's PT2E graphs
    for 8 bits; torchao's tensors for weights alone, in a model in bfloat16, the one dtype for which inductor keeps them packed."""
    if setting.training:
        return training.prepared(model, inputs, setting, compiled)
    if setting.is_int8:
        model = pt2e(model, inputs, setting.calibration)
    elif setting.weight_bits is not None:
        model = with_packed_weights(model.bfloat16(), setting.weight_bits)
        inputs = inputs.floats(torch.bfloat16)
    call = compiled(model)
    if setting.half is None:
        return Prepared(lambda: inputs.call(call))

    def under_autocast() -> object:
        with setting.autocast():
            return inputs.call(call)

    return Prepared(under_autocast)


def pt2e(model: nn.Module, inputs: Inputs, calibration: Sequence[Inputs]) -> nn.Module:
    """An exported graph that quantizes and dequantizes, by torchao's quantizer for x86 with its defaults: uint8 per tensor for activations,
    int8 per channel for weights."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    observed = prepare_pt2e(torch.export.export(model, inputs.args, dict(inputs.kwargs)).module(), quantizer)
    for item in calibration:
        item.call(observed)
    converted: nn.Module = convert_pt2e(observed)
    return converted


def with_packed_weights(model: nn.Module, bits: int) -> nn.Module:
    """The same model, whose linear layers have int8 weights, a scale for each channel, or int4 ones, a scale for each group."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        # torchao's own tensors of 4 bits for the processor have not left its folder of prototypes.
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False))
    return model
