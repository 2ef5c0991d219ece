"""Models in reduced precision for PyTorch's compilers: inductor, and backends built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import GROUP_SIZE, Prepared, Setting, training

Compile = Callable[[nn.Module], Callable[..., object]]


def prepared(model: nn.Module, inputs: Inputs, setting: Setting, compiled: Compile) -> Prepared:
    """The model in the setting's precision, compiled by `compiled`.

    16 bits: autocast. int8: a PT2E graph of torchao. Weights alone: torchao's weight-only tensors, in a bfloat16 model, the only dtype for
    which inductor keeps them packed."""
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
    """Export and quantize the model with torchao's quantizer for x86 and its defaults: uint8 per tensor for activations, int8 per channel for
    weights."""
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
    """The same model with quantized weights in its linear layers: int8 with a scale per channel, or int4 with a scale per group."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    if bits == 8:
        quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False))
    else:
        # torchao's int4 tensors for CPUs are still prototypes.
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=GROUP_SIZE, set_inductor_config=False))
    return model
