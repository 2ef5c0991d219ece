"""Runtimes that are timed beside each other, called peers: one module each, and the only list of them, `PEERS`.

A peer's module has one function, which is called once, in the peer's own process, under `torch.no_grad()`:

    def prepare(model: nn.Module, inputs: Inputs, setting: Setting) -> Prepared

`prepare` converts or compiles `model` for these inputs. It returns a call that computes the outputs with the setting's threads: nested tensors
in the order of the model's own outputs. A peer that is `tensors_only` gets a model of positional tensors (`calls.as_tensors_only`). Any
exception of `prepare` becomes the reason why the peer has no figures. If the peer lacks something, such as a precision, `prepare` raises
`LacksError`.

To add a peer, write its module, add a row to `PEERS`, and add its package to the extra `peers`.

Packages of peers may also lie in the folder `peers` below `sys.prefix`, where `make bench` of a clone puts them. Only workers of peers that
need extra packages search that folder.
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

NOT_INSTALLED = "not installed: "  # the beginning of `Peer.missing`
_PEERS_FOLDER = Path(sys.prefix) / "peers"
OURS, EAGER = "hybrid", "eager"
FLOAT32 = "float32"  # as written: nothing is converted
# The precisions of a model. "int8": weights and activations in 8 bits, with ranges from calibration; the rest in float32, or in bf16 for
# "int8+bf16". "int8-weights" and "int4-weights": only the weights of linear layers in 8 or 4 bits.
PRECISIONS = (FLOAT32, "bf16", "fp16", "int8", "int8+bf16", "int8-weights", "int4-weights")
CALIBRATED = ("int8", "int8+bf16")
# The group size of 4-bit weights along a row: hybrid's default, which every peer supports.
GROUP_SIZE = 32


class LacksError(HybridError):
    """A peer lacks something. The message follows the peer's name: "it has no ..."."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a peer. `threads`: intra-op threads. `scratch`: folder for temporary files. `precision`: one of `PRECISIONS`.

    `calibration`: inputs of the same shapes, if the precision needs ranges of activations. `precision_tolerance`: hybrid's setting of this
    name. `training`: True if a call is forward, backward and a step of an optimizer.
    """

    threads: int
    scratch: Path
    precision: str = FLOAT32
    calibration: Sequence[Inputs] = ()
    precision_tolerance: float | None = None
    training: bool = False

    @property
    def is_int8(self) -> bool:
        """True if activations are quantized, with ranges from `calibration`."""
        return self.precision in CALIBRATED

    @property
    def half(self) -> str | None:
        """ "bf16" or "fp16", the precision of everything that is not quantized; None for float32."""
        return {"bf16": "bf16", "int8+bf16": "bf16", "fp16": "fp16"}.get(self.precision)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast to the half precision; a null context for float32."""
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return contextlib.nullcontext() if self.half is None else torch.autocast("cpu", dtypes[self.half])

    @property
    def weight_bits(self) -> int | None:
        """8 or 4 if only weights are quantized, else None."""
        return {"int8-weights": 8, "int4-weights": 4}.get(self.precision)


def _nothing() -> dict[str, object]:
    return {}


def _unchanged() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prepared model. `call`: computes the outputs. `report`: entries of the peer for its JSON result, asked for after the first call.
    `reset`: undoes the changes that calls make to the model."""

    call: Callable[[], object]
    report: Callable[[], dict[str, object]] = _nothing
    reset: Callable[[], None] = _unchanged


Prepare = Callable[[nn.Module, Inputs, Setting], Prepared]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer. `packages`: pairs of a package that it imports besides torch, and the package's name for pip. `more_packages`: further ones, by
    precision.

    `keeps_cache`: True if the peer has a cache on disk, and so a warm compile time. `on_dynamo`: True if calls check Dynamo's guards.
    `tensors_only`: True if the model must take and return only tensors. `trains`: True if the peer can run backward. `precision`: the precision
    that the peer always runs in; empty: the precision of the work.
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
        """The packages that the peer imports besides torch in that precision."""
        return self.packages + self.more_packages.get(self.precision or precision, ())

    def missing(self, precision: str = FLOAT32) -> str:
        """The reason why the peer cannot be imported here, with the command that installs it; empty if it can."""
        where = [*sys.path, str(_PEERS_FOLDER)]
        names = [pip for package, pip in self.needs(precision) if PathFinder.find_spec(package, where) is None]
        return f"{NOT_INSTALLED}pip install {' '.join(names)}" if names else ""

    def load(self) -> Prepare:
        """Import the peer's module and return its `prepare`."""
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
# Timed beside the peers in every precision other than float32: the baselines of speedups.
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
# The baseline of a user's model, which may be written in another dtype than float32.
AS_WRITTEN = Peer(
    "eager_as_written", "eager, as written", "torch_hybrid_backend.bench.peers.eager", trains=True, precision=FLOAT32
)


def by_name() -> dict[str, Peer]:
    """The peers by name, as in results."""
    return {peer.name: peer for peer in PEERS}


def title(name: str) -> str:
    """Title of a peer or baseline in tables; `name` itself if unknown."""
    return next((peer.title for peer in (*PEERS, *BASELINES, AS_WRITTEN) if peer.name == name), name)


def add_peers_folder() -> None:
    """Append the folder of the peers' packages to `sys.path`."""
    if str(_PEERS_FOLDER) not in sys.path:
        sys.path.append(str(_PEERS_FOLDER))
