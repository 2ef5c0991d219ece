"""The peers that are timed beside each other: one module a peer, and the one list of them, `PEERS`.

A peer's module has one function, called once in a process of its own, in which no gradient is recorded:

    def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared

It converts or compiles `model` for these inputs and returns a call that computes the outputs on the setting's threads: nested
tensors, in the order of the model's own. A peer that is `tensors_only` gets a model of tensors by position (`calls.of_tensors`).
Whatever it raises is shown as why the peer has no result; for what the peer lacks, a precision (`Setting.precision`) say, it raises
`LacksError`.

To add a peer, write its module, add a row to `PEERS`, and add its package to the extra `peers`.

Peers that are not installed may be in a folder apart, `peers` below `sys.prefix` (`make bench` of a clone puts them there); only the
workers of such peers look into it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from torch import nn

from torch_hybrid_backend.bench.calls import Inputs
from torch_hybrid_backend.errors import HybridError

NOT_INSTALLED = "not installed: "  # what `Peer.missing` begins with
_FOLDER_APART = Path(sys.prefix) / "peers"
OURS, EAGER = "hybrid", "eager"
FLOAT32 = "float32"  # as written: nothing is converted
# What a model may be computed in. int8 stands for weights and activations with ranges from calibration, the rest in float32 or bf16; of
# the last two only the weights of linear layers have 8 or 4 bits.
PRECISIONS = (FLOAT32, "bf16", "fp16", "int8", "int8+bf16", "int8-weights", "int4-weights")
CALIBRATED = ("int8", "int8+bf16")
# Weights of 4 bits share a scale in groups of so many along a row: ours do, and every peer can.
GROUP = 32


class LacksError(HybridError):
    """A peer lacks what it is asked for. The text is for people and follows the peer's name: "it has no ..."."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Threads within an operator, a folder for files that are thrown away afterwards, and one of `PRECISIONS`.

    `calibration`: inputs of the same shapes, where the precision needs ranges of activations. `precision_tolerance`: hybrid's setting of this
    name. `training`: a call is forward, backward and a step of an optimiser.
    """

    threads: int
    scratch: Path
    precision: str = FLOAT32
    calibration: Sequence[Inputs] = ()
    precision_tolerance: float | None = None
    training: bool = False

    @property
    def is_int8(self) -> bool:
        """True if activations are quantized, by `calibration`."""
        return self.precision in CALIBRATED

    @property
    def half(self) -> str | None:
        """ "bf16" or "fp16", in which all is computed that is not quantized; None for float32."""
        return {"bf16": "bf16", "int8+bf16": "bf16", "fp16": "fp16"}.get(self.precision)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context in which PyTorch's operators compute in the half precision, if there is one."""
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return contextlib.nullcontext() if self.half is None else torch.autocast("cpu", dtypes[self.half])

    @property
    def weight_bits(self) -> int | None:
        """8 or 4 where only weights are quantized."""
        return {"int8-weights": 8, "int4-weights": 4}.get(self.precision)


def _nothing() -> dict[str, object]:
    return {}


def _unchanged() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that gives the outputs, and what the peer tells of itself after the first call (into its JSON result). `reset` undoes what calls
    change in the model."""

    call: Callable[[], object]
    report: Callable[[], dict[str, object]] = _nothing
    reset: Callable[[], None] = _unchanged


Prepare = Callable[[nn.Module, Inputs, Setting], Prepared]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer. `packages` are what it imports beyond torch, with what to tell pip for each; `more_packages` what a precision needs besides.

    `keeps_cache`: what it compiled is found on disk by the next process, so that a warm compile time can be told. `on_dynamo`: its
    calls pass Dynamo's guards. `tensors_only`: it converts models that take and return tensors alone. `trains`: it runs backward as well.
    `precision`: the one it runs in, whichever the others are asked for; empty: the one asked for.
    """

    name: str
    title: str
    module: str
    packages: tuple[tuple[str, str], ...] = ()
    keeps_cache: bool = False
    on_dynamo: bool = False
    tensors_only: bool = False
    trains: bool = False
    more_packages: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict, hash=False)
    precision: str = ""

    def needs(self, precision: str = FLOAT32) -> tuple[tuple[str, str], ...]:
        """Packages that it imports beyond torch to run in that precision."""
        return self.packages + self.more_packages.get(self.precision or precision, ())

    def missing(self, precision: str = FLOAT32) -> str:
        """The reason why the peer cannot be imported here, with what to do; empty if it can."""
        where = [*sys.path, str(_FOLDER_APART)]
        names = [pip for package, pip in self.needs(precision) if PathFinder.find_spec(package, where) is None]
        return f"{NOT_INSTALLED}pip install {' '.join(names)}" if names else ""

    def load(self) -> Prepare:
        """The peer's `prepare`."""
        prepare: Prepare = importlib.import_module(self.module).prepare
        return prepare


_NNCF = dict.fromkeys(PRECISIONS[3:], (("nncf", "nncf"), ("tabulate", "tabulate"), ("pydot", "pydot")))
_TORCHAO = dict.fromkeys(PRECISIONS[3:], (("torchao", "torchao"),))

PEERS: tuple[Peer, ...] = (
    Peer(EAGER, "eager", "torch_hybrid_backend.bench.peers.eager", trains=True),
    Peer(
        OURS,
        "hybrid",
        "torch_hybrid_backend.bench.peers.hybrid",
        keeps_cache=True,
        on_dynamo=True,
        trains=True,
    ),
    Peer(
        "inductor",
        "inductor",
        "torch_hybrid_backend.bench.peers.inductor",
        keeps_cache=True,
        on_dynamo=True,
        trains=True,
        more_packages=_TORCHAO,
    ),
    Peer(
        "inductor_freezing",
        "inductor, freezing",
        "torch_hybrid_backend.bench.peers.inductor_freezing",
        keeps_cache=True,
        on_dynamo=True,
        more_packages=_TORCHAO,
    ),
    Peer(
        "openvino",
        "OpenVINO",
        "torch_hybrid_backend.bench.peers.openvino",
        (("openvino", "openvino"),),
        tensors_only=True,
        more_packages=_NNCF,
    ),
    Peer(
        "onnxruntime",
        "ONNX Runtime",
        "torch_hybrid_backend.bench.peers.onnxruntime",
        (("onnxruntime", "onnxruntime"), ("onnx", "onnx"), ("onnxscript", "onnxscript")),
        tensors_only=True,
    ),
    Peer(
        "zentorch",
        "zentorch",
        "torch_hybrid_backend.bench.peers.zentorch",
        (("zentorch", "zentorch"),),
        on_dynamo=True,
        more_packages=_TORCHAO,
    ),
)
# Timed beside the peers of every other precision: what is won by it is told by these.
BASELINES: tuple[Peer, ...] = (
    Peer("eager_float32", "eager, float32", "torch_hybrid_backend.bench.peers.eager", precision=FLOAT32),
    Peer(
        "hybrid_float32",
        "hybrid, float32",
        "torch_hybrid_backend.bench.peers.hybrid",
        keeps_cache=True,
        on_dynamo=True,
        precision=FLOAT32,
    ),
)
# The same for a model of the user's, which may be in another dtype as written.
AS_WRITTEN = Peer(
    "eager_as_written", "eager, as written", "torch_hybrid_backend.bench.peers.eager", trains=True, precision=FLOAT32
)


def by_name() -> dict[str, Peer]:
    """The peers, by the names used on the command line and in results."""
    return {peer.name: peer for peer in PEERS}


def title(name: str) -> str:
    """Title of a peer, or a baseline, in tables; the name itself if it is not known."""
    return next((peer.title for peer in (*PEERS, *BASELINES, AS_WRITTEN) if peer.name == name), name)


def search_folder_apart() -> None:
    """Let this process import peers from the folder apart, after everything that is installed."""
    if str(_FOLDER_APART) not in sys.path:
        sys.path.append(str(_FOLDER_APART))
