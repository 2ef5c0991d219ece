"""ONNX Runtime's CPU provider on the model as `torch.onnx.export` gives it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import torch
from torch import nn

from benchmarks.peers import Prepared, Setting


def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared:
    """All of the runtime's graph optimisations, which are its default; static shapes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        export(model, inputs, setting.scratch), options, providers=["CPUExecutionProvider"]
    )
    # An input that the model does not use is dropped by the export.
    given = dict(zip(_names(inputs), inputs, strict=True))
    feed = {wanted.name: given[wanted.name].numpy() for wanted in session.get_inputs()}

    def call() -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return Prepared(call)


def export(model: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path) -> str:
    """The path of an ONNX file (weights in a file beside it) whose inputs are called as `forward` calls them."""
    path = str(folder / "model.onnx")
    names = _names(inputs)
    torch.onnx.export(model, inputs, path, dynamo=True, external_data=True, verbose=False, input_names=names)
    return path


def _names(inputs: tuple[torch.Tensor, ...]) -> list[str]:
    return [f"input_{index}" for index in range(len(inputs))]
