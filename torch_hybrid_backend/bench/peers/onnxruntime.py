"""ONNX Runtime's CPU provider, on a model exported by `torch.onnx.export` and quantized by ONNX Runtime's tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.bench.peers import FLOAT32, GROUP_SIZE, LacksError, Prepared, Setting

# Parts of the names of operators that multiply.
_PRODUCTS = ("Conv", "Gemm", "MatMul", "Attention", "LSTM")


def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared:
    """A session for static shapes with all graph optimizations, the default. Below float32 it reports the operators that multiply in the
    optimized graph."""
    if setting.half:
        raise LacksError(f"it has no kernels in {setting.half} on the CPU")
    exported = export(model, inputs, setting)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.inter_op_num_threads = 1
    optimised = str(setting.scratch / "optimised.onnx")
    if setting.precision != FLOAT32:
        options.optimized_model_filepath = optimised
    session = onnxruntime.InferenceSession(_quantized(exported, setting), options, providers=["CPUExecutionProvider"])
    feed = _feed(inputs, [wanted.name for wanted in session.get_inputs()])

    def call() -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in session.run(None, feed)]

    return Prepared(call, lambda: {} if setting.precision == FLOAT32 else {"executed": _executed(optimised)})


def export(model: nn.Module, inputs: Inputs, setting: Setting) -> str:
    """Export the model; return the path of the ONNX file. Weights lie in a second file beside it, except for int8: the quantizer moves the
    model away from a second file, so all must be in one file of at most 2 GB."""
    path = str(setting.scratch / "model.onnx")
    apart = not setting.is_int8
    names = [f"input_{index}" for index in range(len(inputs.args))]
    torch.onnx.export(model, inputs.args, path, dynamo=True, external_data=apart, verbose=False, input_names=names)
    return path


def _feed(inputs: Inputs, wanted: Sequence[str]) -> dict[str, Any]:
    """The inputs by name. Inputs that the model does not use are left out, as by the export."""
    given = {f"input_{index}": value for index, value in enumerate(inputs.args)}
    return {name: given[name].numpy() for name in wanted}


def _quantized(exported: str, setting: Setting) -> str:
    """Convert the exported model to the setting's precision; return the path. int8: pairs of QuantizeLinear and DequantizeLinear. Weights
    alone: packed weights of MatMul nodes; Gemm, which some linear layers become, stays as it is."""
    path = str(setting.scratch / "quantized.onnx")
    if setting.is_int8:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        prepared = str(setting.scratch / "prepared.onnx")
        quant_pre_process(exported, prepared, skip_symbolic_shape=True)  # shapes are static
        quantize_static(
            prepared,
            path,
            _reader(setting.calibration, onnx.load(prepared)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return path
    if setting.weight_bits is not None:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        # Level 4 quantizes activations to int8: the fastest kernels.
        quantizer = MatMulNBitsQuantizer(
            exported, bits=setting.weight_bits, block_size=GROUP_SIZE, is_symmetric=True, accuracy_level=4
        )
        quantizer.process()
        quantizer.model.save_model_to_file(path, use_external_data_format=True)
        return path
    return exported


def _reader(calibration: Sequence[Inputs], model: Any) -> Any:
    """The calibration inputs as a `CalibrationDataReader`."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            wanted = [value.name for value in model.graph.input]
            self._left = iter([_feed(item, wanted) for item in calibration])

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    return Reader()


def _executed(path: str) -> dict[str, int]:
    """Operator that multiplies -> its count in the file."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    return dict(Counter(node.op_type for node in nodes if any(part in node.op_type for part in _PRODUCTS)))
