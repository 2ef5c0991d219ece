"""OpenVINO's runtime, on a model converted from `torch.export` and quantized by NNCF."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openvino
import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import GROUP_SIZE, LacksError, Prepared, Setting

# Types of layers that multiply, as OpenVINO names them.
_PRODUCTS = (
    "Convolution",
    "FullyConnected",
    "MatMul",
    "ScaledDotProductAttention",
    "Deconvolution",
    "LSTMSequence",
    "RNNSeq",
)


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """The model compiled for latency and static shapes. Layers that are not quantized compute in the setting's half precision or float32;
    OpenVINO's default would be bfloat16 on processors that have it. Reports the precisions of layers that multiply."""
    compiled = compiled_model(model, inputs, setting)
    request = compiled.create_infer_request()
    feed = [value.numpy() for value in inputs.args]

    def call() -> list[torch.Tensor]:
        results = request.infer(feed, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(value) for value in results.values()]

    return Prepared(call, lambda: {"executed": _executed(compiled)})


def compiled_model(model: nn.Module, inputs: Inputs, setting: Setting, **properties: str) -> Any:
    """The model as OpenVINO's `CompiledModel`, with `properties` of the CPU plugin. Raises LacksError if the processor lacks the half
    precision."""
    core = openvino.Core()
    if setting.half and setting.half.upper() not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise LacksError(f"it has no {setting.half} on this processor: it would compute in float32 without a word")
    converted = openvino.convert_model(torch.export.export(model, inputs.args))
    converted.reshape({port: list(value.shape) for port, value in zip(converted.inputs, inputs.args, strict=True)})
    hints = {
        "INFERENCE_PRECISION_HINT": {"bf16": "bf16", "fp16": "f16", None: "f32"}[setting.half],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setting.threads,
    }
    return core.compile_model(_quantized(converted, setting), "CPU", hints | properties)


def _quantized(converted: Any, setting: Setting) -> Any:
    """Quantize the model by NNCF, with its defaults. int8: ranges from the calibration inputs, and the scheme for transformers if the model has
    attention. Weights alone: symmetric, all layers with the same bits."""
    if not setting.is_int8 and setting.weight_bits is None:
        return converted
    import nncf

    if setting.weight_bits is not None:
        form = {
            8: {"mode": nncf.CompressWeightsMode.INT8_SYM},
            4: {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": GROUP_SIZE, "ratio": 1.0, "all_layers": True},
        }
        return nncf.compress_weights(converted, **form[setting.weight_bits])
    kinds = {node.get_type_name() for node in converted.get_ops()}
    items = [[value.numpy() for value in item.args] for item in setting.calibration]
    return nncf.quantize(
        converted,
        nncf.Dataset(items),
        subset_size=len(items),
        model_type=nncf.ModelType.TRANSFORMER if "ScaledDotProductAttention" in kinds else None,
    )


def _executed(compiled: Any) -> dict[str, int]:
    """Precision -> the number of layers that multiply in that precision."""
    told = [{k: node.get_rt_info()[k].value for k in ("layerType", "runtimePrecision")} for node in _layers(compiled)]
    return dict(Counter(layer["runtimePrecision"] for layer in told if layer["layerType"] in _PRODUCTS))


def _layers(compiled: Any) -> list[Any]:
    return [node for node in compiled.get_runtime_model().get_ops() if "runtimePrecision" in node.get_rt_info()]
