"""OpenVINO's own runtime on the model converted from `torch.export`."""

from __future__ import annotations

import openvino
import torch
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """Compiled for latency, in float32: its default would be bfloat16 on processors that have it. Static shapes."""
    converted = openvino.convert_model(torch.export.export(model, inputs))
    converted.reshape({port: list(value.shape) for port, value in zip(converted.inputs, inputs, strict=True)})
    hints = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setting.threads,
    }
    request = openvino.Core().compile_model(converted, "CPU", hints).create_infer_request()
    feed = [value.numpy() for value in inputs]

    def call() -> list[torch.Tensor]:
        results = request.infer(feed, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(value) for value in results.values()]

    return Prepared(call)
