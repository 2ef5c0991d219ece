"""Graphs that `torch.compile(...).aot_compile` compiles, and `save_compiled_function` saves. Part of the wiring.

    compiling   the graph is compiled as for a call, and its first call is made, on copies of the inputs that `aot_compile` was given
    saving      Dynamo's graph, and each entry of the cache that was found or made meanwhile: traced graphs, kernels, timings
    loading     the entries go into the cache; the first call compiles the graph again, which finds all of them

Parameters and buffers are inputs of such a graph, so weights stay live. PyTorch's file is a pickle, and so is the graph in it: both run code of
whoever wrote the file.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.graph_compilation import GraphCompilation
from torch_hybrid_backend.driver.session import open_session
from torch_hybrid_backend.errors import ArtifactError, CacheError, NotExportableError, failures
from torch_hybrid_backend.processes.fork_lock import ForkLock
from torch_hybrid_backend.storage.store import Content, collecting
from torch_hybrid_backend.torch_private import (
    FakeTensor,
    FakeTensorMode,
    SerializableCallable,
    TracingContext,
    compile_lock,
    functorch_config,
    graph_from_pickle,
    graph_to_pickle,
    tracing,
    tree_map_only,
)

_log = logging.getLogger(__name__)
_MAGIC = b"hybrid-aot-1\n"
_LENGTH = struct.Struct("<Q")
# Settings of AOTAutograd that `aot_compile` changes: keys of traced graphs hold them, so they are the same whenever a graph is compiled.
_SETTINGS = {
    "strict_autograd_cache": False,
    "bypass_autograd_cache_key": False,
    "bundled_autograd_cache": False,
    "force_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,  # kernels of a backward graph are saved, too
}


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A graph that comes from a file, until its first call."""

    graph_module: torch.fx.GraphModule
    fake_mode: FakeTensorMode
    config: Config

    def compiled(self) -> Callable[..., Any]:
        """Compile the graph. The guards of `aot_compile` hold the caller's modes: grad mode, autocast and the default dtype."""
        with compile_lock, tracing(TracingContext(self.fake_mode)):
            return _compiled(self.graph_module, self.config)


class AheadOfTimeGraph(SerializableCallable):
    """A graph of Dynamo's, as `aot_compile` wants it. Threads may call it at once."""

    def __init__(self, compiled: Callable[..., Any] | _Loaded, to_bytes: Callable[[], bytes]) -> None:
        self._compiled = compiled
        self._to_bytes = to_bytes
        self._lock = ForkLock()

    @classmethod
    def compile(
        cls,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, object] | None,
        mode: str | None,
    ) -> AheadOfTimeGraph:
        """Compile a graph on the inputs that `aot_compile` was given. Raises ConfigError for settings."""
        entries: dict[tuple[str, str], Content] = {}
        with collecting(entries):
            compiled = _compiled(graph_module, _config(options, mode), inputs)
        how = {"options": options, "mode": mode}
        return cls(compiled, lambda: _to_bytes(graph_module, how, list(entries.values())))

    def __call__(self, *inputs: Any) -> Any:
        """The graph's outputs. The first call after loading compiles the graph."""
        if isinstance(self._compiled, _Loaded):
            with self._lock:
                if isinstance(self._compiled, _Loaded):
                    self._compiled = self._compiled.compiled()
        return self._compiled(*inputs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: AheadOfTimeGraph) -> bytes:
        """The graph and its entries of the cache. Raises NotExportableError for a graph that PyTorch cannot pickle."""
        return fn._to_bytes()

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> AheadOfTimeGraph:
        """Open a saved graph, and put its entries into the cache. Raises ArtifactError for other bytes. The graph is unpickled: PyTorch, which
        calls this, has unpickled the file that the bytes are part of."""
        loaded, entries = _from_bytes(data)
        store = open_session(loaded.config).services.store
        try:
            for content in entries:
                store.add(content)
        except CacheError as error:
            _log.warning("what was saved with a compiled function is not kept, so it is compiled again: %s", error)
        return cls(loaded, lambda: data)


def _config(options: Mapping[str, object] | None, mode: str | None) -> Config:
    return Config.from_env(os.environ).with_options(options, mode)


def _compiled(
    graph_module: torch.fx.GraphModule, config: Config, inputs: Sequence[Any] | None = None
) -> Callable[..., Any]:
    """The compiled graph, whose first call was made on copies of `inputs`."""
    known = {name: value for name, value in _SETTINGS.items() if hasattr(functorch_config, name)}
    examples = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]

    def tried(compilation: GraphCompilation, compiled: Callable[..., Any]) -> None:
        if inputs is not None:
            compilation.try_call(compiled, inputs)

    with functorch_config.patch(known):
        return compile_graph(graph_module, examples, config, after=tried)


def _to_bytes(graph_module: torch.fx.GraphModule, how: Mapping[str, Any], entries: Sequence[Content]) -> bytes:
    """Magic, the length of a header in JSON, the header, the graph, and the entries."""
    kept = [entry for entry in entries if entry.is_portable]
    try:
        graph = graph_to_pickle(graph_module, _metadata)
    except failures(Exception) as error:  # whatever objects of the user's raise
        raise NotExportableError(
            f"PyTorch cannot pickle the compiled graph: {type(error).__name__}: {error}; torch_hybrid_backend.export writes a model "
            "without pickling"
        ) from error
    named = [(entry.kind, entry.key, entry.suffix, len(entry.data)) for entry in kept]
    header = json.dumps({**how, "graph": len(graph), "entries": named}, default=str).encode()
    return b"".join([_MAGIC, _LENGTH.pack(len(header)), header, graph, *(entry.data for entry in kept)])


def _metadata(node: torch.fx.Node) -> dict[str, Any]:
    """The metadata of a node that AOTAutograd and this package read."""
    kept: dict[str, Any] = {
        name: node.meta[name] for name in ("example_value", "stack_trace", "tensor_dict") if name in node.meta
    }
    if node.op != "placeholder" and "example_value" in kept:
        kept["example_value"] = tree_map_only(FakeTensor, _apart, kept["example_value"])
    stack = node.meta.get("nn_module_stack", {})
    # Classes by name: the process that loads the graph may not have the modules that define them.
    names = {key: (path, getattr(kind, "__name__", str(kind))) for key, (path, kind) in stack.items()}
    return {**kept, "nn_module_stack": names} if names else kept


def _apart(value: FakeTensor) -> torch.Tensor:
    """A fake tensor of the same form that is no view: PyTorch cannot pickle all that views know of their bases."""
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _from_bytes(data: bytes) -> tuple[_Loaded, list[Content]]:
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("it begins otherwise")
        at = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        header = json.loads(data[at : at + length])
        at += length
        graph_module, fake_mode = graph_from_pickle(data[at : at + header["graph"]])
        at += header["graph"]
        entries = []
        for kind, key, suffix, size in header["entries"]:
            entries.append(Content(kind, key, suffix, data[at : at + size]))
            at += size
        if at != len(data):
            raise ValueError(f"it has {len(data)} bytes instead of {at}")
        return _Loaded(graph_module, fake_mode, _config(header["options"], header["mode"])), entries
    except failures(ValueError, KeyError, TypeError, struct.error) as error:
        raise ArtifactError(
            f"this is no graph that this version of torch_hybrid_backend saved: {error}; compile and save the function again"
        ) from error
