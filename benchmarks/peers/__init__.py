"""The peers that are timed beside each other: one module a peer, and the one list of them, `PEERS`.

A peer's module has one function, called once in a process of its own, in which no gradient is recorded:

    def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...], setting: Setting) -> Prepared

It converts or compiles `model` for these inputs and returns a call that computes the outputs on the setting's threads: nested
tensors, in the order of the model's own. Whatever it raises is shown as why the peer has no result. To add a peer, write its
module, add a row to `PEERS`, and add its package to the extra `peers`.

Peers that are no part of the project's environment may be in a folder apart, `peers` below `sys.prefix` (`make bench` puts them
there); only the workers of such peers look into it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from torch import nn

_FOLDER_APART = Path(sys.prefix) / "peers"


@dataclass(frozen=True, slots=True)
class Setting:
    """Threads within an operator, and a folder for files that are thrown away afterwards."""

    threads: int
    scratch: Path


def _nothing() -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that gives the outputs, and what the peer tells of itself after the first call (into its JSON result)."""

    call: Callable[[], object]
    report: Callable[[], dict[str, object]] = _nothing


Prepare = Callable[[nn.Module, tuple[torch.Tensor, ...], Setting], Prepared]


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer. `packages` are what it imports beyond torch, with what to tell pip for each.

    `keeps_cache`: what it compiled is found on disk by the next process, so that a warm compile time can be told. `on_dynamo`: its
    calls pass Dynamo's guards.
    """

    name: str
    title: str
    module: str
    packages: tuple[tuple[str, str], ...] = ()
    keeps_cache: bool = False
    on_dynamo: bool = False

    def missing(self) -> str:
        """Why the peer cannot be imported here, with what to do; empty where it can."""
        where = [*sys.path, str(_FOLDER_APART)]
        names = [pip for package, pip in self.packages if PathFinder.find_spec(package, where) is None]
        return f"not installed: pip install {' '.join(names)}" if names else ""

    def load(self) -> Prepare:
        """The peer's `prepare`."""
        prepare: Prepare = importlib.import_module(self.module).prepare
        return prepare


PEERS: tuple[Peer, ...] = (
    Peer("eager", "eager", "benchmarks.peers.eager"),
    Peer("hybrid", "hybrid", "benchmarks.peers.hybrid", keeps_cache=True, on_dynamo=True),
    Peer("inductor", "inductor", "benchmarks.peers.inductor", keeps_cache=True, on_dynamo=True),
    Peer(
        "inductor_freezing",
        "inductor, freezing",
        "benchmarks.peers.inductor_freezing",
        keeps_cache=True,
        on_dynamo=True,
    ),
    Peer("openvino", "OpenVINO", "benchmarks.peers.openvino", (("openvino", "openvino"),)),
    Peer(
        "onnxruntime",
        "ONNX Runtime",
        "benchmarks.peers.onnxruntime",
        (("onnxruntime", "onnxruntime"), ("onnx", "onnx"), ("onnxscript", "onnxscript")),
    ),
    Peer("zentorch", "zentorch", "benchmarks.peers.zentorch", (("zentorch", "zentorch"),), on_dynamo=True),
)


def by_name() -> dict[str, Peer]:
    """The peers, by the names used on the command line and in results."""
    return {peer.name: peer for peer in PEERS}


def search_folder_apart() -> None:
    """Let this process import peers from the folder apart, after everything that is installed."""
    if str(_FOLDER_APART) not in sys.path:
        sys.path.append(str(_FOLDER_APART))
