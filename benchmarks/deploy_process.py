"""A process of `benchmarks.deploy`: saves a model in a format, or loads it and answers. Prints one line of JSON.

An answering process imports no more than its format needs, and takes its inputs from a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], object]
_SECONDS = 3.0


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("save", "answer", "steady"))
    parser.add_argument("format")
    parser.add_argument("--model")
    parser.add_argument("--size")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--hold", action="store_true", help="keep the answering process until its input ends")
    arguments = parser.parse_args()
    tasks = {"save": _save, "answer": _answer, "steady": _steady}
    print(json.dumps(tasks[arguments.task](arguments)))


def _built(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from benchmarks.catalogue import MODELS

    entry = MODELS[arguments.model]
    return entry.build(arguments.size), entry.inputs(arguments.size, 1)


def _save(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    model, inputs = _built(arguments)
    for number, value in enumerate(inputs):
        np.save(arguments.folder / f"input{number}.npy", value.numpy())
    with torch.no_grad():
        path = _SAVE[arguments.format](model, inputs, arguments.folder)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return {"file_mb": sum(each.stat().st_size for each in files) / 1e6}


def _answer(arguments: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    _IMPORT[arguments.format]()
    imported, before = time.perf_counter(), _private_mib()
    call = _LOAD[arguments.format](arguments.folder)
    call()
    answered = time.perf_counter()
    if arguments.hold:
        print("ready", flush=True)
        sys.stdin.read()
    return {"import_s": imported - start, "answer_s": answered - imported, "private_mib": _private_mib() - before}


def _steady(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times of the loaded model; a `.hybrid` file's in turns with the live plan and with the compiled module, guards included."""
    import torch

    from torch_hybrid_backend.measuring.measure import measure

    _IMPORT[arguments.format]()
    with torch.no_grad():
        calls: list[Call] = [_LOAD[arguments.format](arguments.folder)]
        if arguments.format == "hybrid":
            model, inputs = _built(arguments)
            calls += _live(model, inputs)
        for call in calls:
            call()
        times = [timing.median_us for timing in measure(calls, _SECONDS * len(calls))]
    result = {"call_ms": times[0] / 1e3}
    return (
        result
        if len(times) == 1
        else {**result, "live_ratio": times[0] / times[1], "compiled_ratio": times[0] / times[2]}
    )


def _live(model: Any, inputs: tuple[Any, ...]) -> list[Call]:
    """The graph of a compiled model without Dynamo's guards around it, and the compiled model."""
    import torch

    from torch_hybrid_backend.backend import hybrid

    graphs: list[tuple[Callable[..., Any], list[Any]]] = []

    def backend(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        compiled = hybrid(gm, example_inputs, options={"prefer_kernels": True})

        def called(*given: Any) -> Any:
            graphs[:] = [(compiled, list(given))]
            return compiled(*given)

        return called

    torch.compile(model, backend=backend, dynamic=False)(*inputs)
    (graph, given) = graphs[0]
    torch.compiler.reset()
    whole = torch.compile(model, backend="hybrid", dynamic=False, options={"prefer_kernels": True})
    return [lambda: graph(*given), lambda: whole(*inputs)]


def _private_mib() -> float:
    """Memory that a further process takes: what it shares with no other."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 1024


def _arrays(folder: Path) -> list[Any]:
    return [np.load(path) for path in sorted(folder.glob("input*.npy"))]


def _tensors(folder: Path) -> list[Any]:
    import torch

    return [torch.from_numpy(array) for array in _arrays(folder)]


def _save_hybrid(model: Any, inputs: tuple[Any, ...], folder: Path) -> Path:
    import torch_hybrid_backend

    return torch_hybrid_backend.export(model, inputs, folder / "model.hybrid").path


def _load_hybrid(folder: Path) -> Call:
    import torch_hybrid_backend

    model, inputs = torch_hybrid_backend.load(folder / "model.hybrid"), _tensors(folder)
    return lambda: model(*inputs)


def _save_aotinductor(model: Any, inputs: tuple[Any, ...], folder: Path) -> Path:
    import torch
    from torch._inductor import aoti_compile_and_package

    from torch_hybrid_backend.bench.calls import Inputs, as_tensors_only

    wrapper, given = as_tensors_only(
        model, Inputs(inputs)
    )  # a class of transformers' is known only where that is imported
    program = torch.export.export(wrapper.eval(), given.args)
    path = folder / "model.pt2"
    aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})
    return path


def _load_aotinductor(folder: Path) -> Call:
    import torch
    from torch._inductor import aoti_load_package

    model, inputs = aoti_load_package(str(folder / "model.pt2")), _tensors(folder)

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def _with_peers() -> None:
    from torch_hybrid_backend.bench.peers import add_peers_folder

    add_peers_folder()


def _save_openvino(model: Any, inputs: tuple[Any, ...], folder: Path) -> Path:
    _with_peers()
    import openvino
    import torch

    converted = openvino.convert_model(torch.export.export(model, inputs))
    converted.reshape({port: list(value.shape) for port, value in zip(converted.inputs, inputs, strict=True)})
    (folder / "openvino").mkdir(exist_ok=True)
    openvino.save_model(converted, folder / "openvino" / "model.xml", compress_to_fp16=False)
    _load_openvino(folder)()  # it fills the cache
    return folder / "openvino"


def _load_openvino(folder: Path) -> Call:
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    core = openvino.Core()
    core.set_property({"CACHE_DIR": str(folder / "openvino" / "cache")})
    request = core.compile_model(folder / "openvino" / "model.xml", "CPU", hints).create_infer_request()
    feed = _arrays(folder)
    return lambda: request.infer(feed, share_inputs=True, share_outputs=True)


def _save_onnxruntime(model: Any, inputs: tuple[Any, ...], folder: Path) -> Path:
    _with_peers()
    import onnxruntime
    import torch

    (folder / "onnx").mkdir(exist_ok=True)
    names = [f"input_{number}" for number in range(len(inputs))]
    torch.onnx.export(
        model, inputs, str(folder / "exported.onnx"), dynamo=True, external_data=False, verbose=False, input_names=names
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "onnx" / "model.onnx")
    onnxruntime.InferenceSession(str(folder / "exported.onnx"), options, providers=["CPUExecutionProvider"])
    return folder / "onnx"


def _load_onnxruntime(folder: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when it was saved
    session = onnxruntime.InferenceSession(
        str(folder / "onnx" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    wanted = [each.name for each in session.get_inputs()]
    feed = dict(zip(wanted, _arrays(folder), strict=True))
    return lambda: session.run(None, feed)


def _import_torch() -> None:
    import torch  # noqa: F401


def _import_openvino() -> None:
    _find_peers()
    import openvino  # noqa: F401


def _import_onnxruntime() -> None:
    _find_peers()
    import onnxruntime  # noqa: F401


def _find_peers() -> None:
    """Do what `add_peers_folder` does, without an import of torch."""
    sys.path.append(str(Path(sys.prefix) / "peers"))


_SAVE = {
    "hybrid": _save_hybrid,
    "aotinductor": _save_aotinductor,
    "openvino": _save_openvino,
    "onnxruntime": _save_onnxruntime,
}
_LOAD = {
    "hybrid": _load_hybrid,
    "aotinductor": _load_aotinductor,
    "openvino": _load_openvino,
    "onnxruntime": _load_onnxruntime,
}
_IMPORT = {
    "hybrid": _import_torch,
    "aotinductor": _import_torch,
    "openvino": _import_openvino,
    "onnxruntime": _import_onnxruntime,
}

if __name__ == "__main__":
    main()
