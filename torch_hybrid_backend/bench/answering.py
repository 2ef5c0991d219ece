"""A new process that opens a saved model and answers: `python -m torch_hybrid_backend.bench.answering`. Prints one line of JSON.

It imports no more than the format needs. Inputs are the arrays `input0.npy`, `input1.npy`, ... of a folder; a `.hybrid` file is called with
its sample. `opened` serves other processes too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

READY = "ready"  # a process that is held says so on a line of its own once it has answered
Call = Callable[[], Any]
Open = Callable[[Path, Path, int], Call]


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("format", choices=tuple(_FORMATS))
    parser.add_argument("path", type=Path, help="the saved model")
    parser.add_argument("folder", type=Path, help="of the inputs, and of OpenVINO's cache")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--hold", action="store_true", help="keep the process until its input ends")
    given = parser.parse_args()
    start = time.perf_counter()
    import_runtime(given.format)
    imported, before = time.perf_counter(), _private_mib()
    call = opened(given.format, given.path, given.folder, given.threads)
    call()
    answered = time.perf_counter()
    if given.hold:
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        sys.stdin.read()
    figures = {"import_s": imported - start, "answer_s": answered - imported, "private_mib": _private_mib() - before}
    sys.stdout.write(json.dumps(figures) + "\n")


def import_runtime(form: str) -> None:
    """Import what runs models of the format."""
    _FORMATS[form][0]()


def opened(form: str, path: Path, folder: Path, threads: int) -> Call:
    """The saved model, as a function that calls it on the inputs in `folder`."""
    return _FORMATS[form][1](path, folder, threads)


def _private_mib() -> float:
    """Memory that a further process takes: what it shares with no other."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty")) / 1024


def _arrays(folder: Path) -> list[Any]:
    import numpy as np

    return [np.load(path, allow_pickle=False) for path in sorted(folder.glob("input*.npy"), key=_number)]


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


def _import_torch() -> None:
    import torch  # noqa: F401


def _import_openvino() -> None:
    _find_peers()
    import openvino  # noqa: F401


def _import_onnxruntime() -> None:
    _find_peers()
    import onnxruntime  # noqa: F401


def _find_peers() -> None:
    """Do what `peers.add_peers_folder` does, without an import of torch."""
    sys.path.append(str(Path(sys.prefix) / "peers"))


def _open_hybrid(path: Path, _folder: Path, _threads: int) -> Call:
    import torch_hybrid_backend

    entry = torch_hybrid_backend.load(path).flat_entry()
    return lambda: entry.run(entry.sample_inputs)


def _open_aotinductor(path: Path, folder: Path, _threads: int) -> Call:
    import torch

    from torch_hybrid_backend.torch_private import load_aotinductor

    model, inputs = load_aotinductor(str(path)), [torch.from_numpy(array) for array in _arrays(folder)]

    def call() -> object:
        with torch.no_grad():
            return model(*inputs)

    return call


def _open_openvino(path: Path, folder: Path, threads: int) -> Call:
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    core = openvino.Core()
    core.set_property({"CACHE_DIR": str(folder / "openvino" / "cache")})
    request = core.compile_model(path, "CPU", hints).create_infer_request()
    feed = _arrays(folder)
    return lambda: list(request.infer(feed, share_inputs=True, share_outputs=True).values())


def _open_onnxruntime(path: Path, folder: Path, threads: int) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when it was saved
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = _by_name([each.name for each in session.get_inputs()], _arrays(folder))
    return lambda: session.run(None, feed)


def _by_name(names: list[str], arrays: list[Any]) -> dict[str, Any]:
    """The inputs by name. A model that was exported here names them by number, and has left out those that it does not use."""
    numbers = [re.fullmatch(r"input_(\d+)", name) for name in names]
    if all(numbers):
        return {name: arrays[int(found[1])] for name, found in zip(names, numbers, strict=True) if found is not None}
    return dict(zip(names, arrays, strict=True))


_FORMATS: Mapping[str, tuple[Callable[[], None], Open]] = {
    "hybrid": (_import_torch, _open_hybrid),
    "aotinductor": (_import_torch, _open_aotinductor),
    "openvino": (_import_openvino, _open_openvino),
    "onnxruntime": (_import_onnxruntime, _open_onnxruntime),
}

if __name__ == "__main__":
    main()
