"""Saved models of other runtimes, made in workers (`bench.worker`) of a model and the sample of its `.hybrid` file.

    found = worker.ask(Save("openvino", file, folder, threads, work), timeout_s)
    error, rms = worker.ask(Open("openvino", found.path, folder, threads), timeout_s)

The folder has the sample: its results, and the tensors among its inputs as `input0.npy`, `input1.npy`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torch_hybrid_backend
from torch_hybrid_backend.bench.answering import import_runtime, opened
from torch_hybrid_backend.bench.calls import Inputs, as_tensors_only, tensors
from torch_hybrid_backend.bench.peers import Prepared, add_peers_folder, by_name
from torch_hybrid_backend.bench.worker import State, Work, compare
from torch_hybrid_backend.errors import ArgumentError

TITLES: Mapping[str, str] = {
    "hybrid": "hybrid",
    "aotinductor": "AOTInductor",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
}
# Suffix of a saved model -> its format.
SUFFIXES = {".pt2": "aotinductor", ".xml": "openvino", ".onnx": "onnxruntime"}

_EXPECTED = "expected.pt"


def missing(form: str) -> str:
    """The reason why a format cannot be run here, with the command that installs it; empty if it can."""
    return by_name()[form].missing() if form in by_name() else ""


def write_sample(file: Path, folder: Path) -> None:
    """Write the sample of a `.hybrid` file into a folder. Raises ArtifactError for a file that cannot be opened here."""
    entry = torch_hybrid_backend.load(file).flat_entry()
    args, kwargs = entry.sample_call
    with torch.no_grad():
        expected = tensors(entry.run(entry.sample_inputs))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(expected, folder / _EXPECTED)
    for number, value in enumerate(Inputs(args, kwargs).tensors()):
        if value.dtype is not torch.bfloat16:  # NumPy lacks it
            np.save(folder / f"input{number}.npy", value.numpy())


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved model. `size_bytes`: of all that a process needs to open it."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Save:
    """Message: save the model of `work`, on the sample of `file`, in a format, or prepare one that was saved, `given`. Answer: `Saved`."""

    form: str
    file: Path
    folder: Path
    threads: int
    work: Work | None
    given: Path | None = None

    def answer(self, _state: State) -> Saved:
        if missing(self.form) == "" and self.form in by_name():
            add_peers_folder()
        torch.set_num_threads(self.threads)
        own = self.folder / self.form
        own.mkdir(exist_ok=True)
        path = self.given
        if path is None:
            assert self.work is not None
            sample = Inputs(*torch_hybrid_backend.load(self.file).flat_entry().sample_call)
            model, inputs = as_tensors_only(self.work.build()[0], sample)
            if any(value.dtype is torch.bfloat16 for value in inputs.args) and self.form != "aotinductor":
                raise ArgumentError("an input is in bfloat16, which NumPy lacks")
            path = _SAVE[self.form](model, inputs.args, own)
        if self.form == "onnxruntime":
            path = _optimized(path, own)
        if self.form == "openvino":
            opened(self.form, path, self.folder, self.threads)()  # it fills the cache
        beside = [path, path.with_suffix(".bin")] if self.form == "openvino" else [path]
        files = [each for each in beside if each.is_file()] + list((own / "cache").glob("*"))
        return Saved(path, sum(each.stat().st_size for each in files))


@dataclass(frozen=True, slots=True)
class Open:
    """Message: open a saved model for `Round`s of calls. Answer: what is wrong with its results, or "", and the root mean square of their
    difference from the file's sample, divided by that of the sample."""

    form: str
    path: Path
    folder: Path
    threads: int

    def answer(self, state: State) -> tuple[str, float | None]:
        torch.set_num_threads(self.threads)
        import_runtime(self.form)
        call = opened(self.form, self.path, self.folder, self.threads)
        found = [torch.as_tensor(value) for value in call() if not isinstance(value, int | float | str | None)]
        expected = torch.load(self.folder / _EXPECTED, weights_only=True)
        state.prepared = Prepared(call)
        # The file may be of reduced precision, where others are in float32.
        error, _, rms = compare({"expected": expected, "exact": None}, found, "bf16")
        error = error.replace("eager's", "the sample's")
        return f"{error}: is it the model that was exported, with the same weights?" if error else "", rms


def _save_aotinductor(model: nn.Module, inputs: Sequence[Any], folder: Path) -> Path:
    from torch_hybrid_backend.torch_private import compile_aotinductor

    path = folder / "model.pt2"
    program = torch.export.export(model, tuple(inputs))
    compile_aotinductor(program, package_path=str(path), inductor_configs={"freezing": True})
    return path


def _save_openvino(model: nn.Module, inputs: Sequence[Any], folder: Path) -> Path:
    import openvino

    converted = openvino.convert_model(torch.export.export(model, tuple(inputs)))
    converted.reshape({port: list(value.shape) for port, value in zip(converted.inputs, inputs, strict=True)})
    path = folder / "model.xml"
    openvino.save_model(converted, path, compress_to_fp16=False)
    return path


def _save_onnx(model: nn.Module, inputs: Sequence[Any], folder: Path) -> Path:
    path = folder / "exported.onnx"
    names = [f"input_{number}" for number in range(len(inputs))]
    torch.onnx.export(
        model, tuple(inputs), str(path), dynamo=True, external_data=False, verbose=False, input_names=names
    )
    return path


def _optimized(path: Path, folder: Path) -> Path:
    """The model as ONNX Runtime optimizes it when it is loaded."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "model.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return folder / "model.onnx"


_SAVE: Mapping[str, Callable[[nn.Module, Sequence[Any], Path], Path]] = {
    "aotinductor": _save_aotinductor,
    "openvino": _save_openvino,
    "onnxruntime": _save_onnx,
}
