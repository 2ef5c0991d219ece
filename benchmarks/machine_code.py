"""Kernels of ours beside inductor's for the same graph, compiled by the same Triton for sm_90: how wide their loads and stores are, and how
many registers they take. No GPU is needed; what is faster is not told.

    python -m benchmarks.machine_code

Inductor writes kernels for a GPU that it is told of: this process pretends to have an H100, and lays every tensor on it as a fake one. What it
would choose among by the clock (tiles, warps) is all compiled; the one with the widest accesses is shown.
"""

from __future__ import annotations

import contextlib
import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # read when Triton is imported, as torch may do: here it compiles

import re
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.codegen.assemble import assemble
from torch_hybrid_backend.codegen.engine import KernelEngine
from torch_hybrid_backend.codegen.kernel_name import kernel_name
from torch_hybrid_backend.codegen.workers.protocol import Job
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.session import open_services
from torch_hybrid_backend.engines.triton import artifact, compiler
from torch_hybrid_backend.engines.triton.backend import TritonBackend
from torch_hybrid_backend.engines.triton.target import INTERPRETER, Target
from torch_hybrid_backend.partition.regions import partition_graph

_CAPABILITY, _MULTIPROCESSORS = 90, 132
_H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": _MULTIPROCESSORS,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
    "gcnArchName": "",
}
_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b")


@dataclass(frozen=True, slots=True)
class Graph:
    """`shapes` of bfloat16 inputs."""

    name: str
    function: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]


GRAPHS: tuple[Graph, ...] = (
    Graph("softmax", lambda x: torch.softmax(x, -1), ((4096, 1024),)),
    Graph("layer_norm", lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), ((4096, 1024),)),
    Graph("gelu_add", lambda x, y: torch.nn.functional.gelu(x) + y, ((4096, 1024), (4096, 1024))),
    Graph("transposed_add", lambda x, y: x.t() + y, ((4096, 1024), (1024, 4096))),
)


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel compiled. `loads`, `stores`: the bytes that each such instruction of a thread takes from or writes to memory."""

    name: str
    threads: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]

    @property
    def widest(self) -> tuple[int, int]:
        """The widest loads and stores, in bytes; 0 where there are none."""
        return max(self.loads, default=0), max(self.stores, default=0)


def code_of(name: str, threads: int, ptx: str) -> Code:
    """The loads and stores that PTX says of memory in the device's global space."""
    found = [(kind, int(count or 1) * int(bits) // 8) for kind, count, bits in _ACCESS.findall(ptx)]
    loads, stores = (tuple(size for kind, size in found if kind == which) for which in ("ld", "st"))
    return Code(name, threads, loads, stores)


def ours(graph: Graph) -> list[Code]:
    """The kernels that this package makes of a graph."""
    config = Config(cache=False)
    engine = KernelEngine(TritonBackend(INTERPRETER), config, open_services(config))  # which traces on the CPU
    inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in graph.shapes]
    traced = make_fx(lambda *xs: (graph.function(*xs),), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    target = Target(_CAPABILITY, _MULTIPROCESSORS)
    segments = partition_graph(traced, [engine], config).graph.segments
    codes: list[Code] = []
    with tempfile.TemporaryDirectory() as folder:
        for kernel in (kernel for s in segments for kernel in assemble(s.region, TritonBackend(target)).kernels):
            path = Path(folder) / f"{len(codes)}{compiler.SUFFIX}"
            compiler.compile_kernel(Job("", "kernel", kernel, target, str(path), assembly=True))
            header, _ = artifact.read(path)
            codes.append(code_of(kernel_name(kernel), header.threads, path.with_suffix(".ptx").read_text()))
    return codes


def inductors(graph: Graph) -> list[Code]:
    """The kernels that inductor makes of a graph. It reaches into inductor, and may fail with another torch."""
    sources = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", _inductor_text(graph), re.DOTALL)
    return [_widest(name, text) for name, text in sources]


def _inductor_text(graph: Graph) -> str:
    """The Python module that inductor would run."""
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with _pretended_gpu(), FakeTensorMode() as mode:
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in graph.shapes]
        traced = make_fx(graph.function, decomposition_table=select_decomp_table())(*inputs)
        lowering = GraphLowering(traced, example_inputs=inputs)
        with (
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
            config.patch({"triton.cudagraphs": False, "compile_threads": 1}),
        ):
            lowering.run(*inputs)
            code: Any = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def _pretended_gpu() -> contextlib.ExitStack:
    """Within it, inductor finds an H100."""
    import torch._dynamo.device_interface
    import torch.utils._triton

    properties = types.SimpleNamespace(**_H100)
    interface = torch._dynamo.device_interface.CudaInterface
    stack = contextlib.ExitStack()
    for where, name, value in (
        (interface, "is_available", True),
        (interface, "get_device_properties", properties),
        (interface, "get_compute_capability", _CAPABILITY),
        (interface, "is_triton_capable", True),
        (interface, "raise_if_triton_unavailable", None),
        (interface.Worker, "get_device_properties", properties),
        (interface.Worker, "current_device", 0),
        (torch.cuda, "is_available", True),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", (9, 0)),
        (torch.cuda, "current_device", 0),
        (torch.utils._triton, "triton_hash_with_backend", "none"),
    ):
        stack.enter_context(mock.patch.object(where, name, staticmethod(lambda *_, value=value: value)))
    return stack


def _widest(name: str, text: str) -> Code:
    """A kernel of inductor's, compiled with each configuration that it would time; that with the widest accesses."""
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torch_hybrid_backend.engines.triton.source import function_of

    with tempfile.TemporaryDirectory() as folder, _pretended_gpu(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with mock.patch.object(triton_helpers, "set_driver_to_gpu"):
            tuned = function_of(text, name, Path(folder))
        meta = tuned.triton_meta
        codes = []
        for configuration in tuned.configs:
            constants = {**meta["constants"], **configuration.kwargs}
            source = ASTSource(tuned.fn, meta["signature"], constants, meta["configs"][0])
            options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", _CAPABILITY, 32), options=options)
            codes.append(code_of(name, 32 * configuration.num_warps, compiled.asm["ptx"]))
    return max(codes, key=lambda code: sum(code.widest))


def table(graphs: Sequence[Graph]) -> str:
    """A line for each kernel of ours and of inductor's."""
    lines = [f"{'graph':<16} {'of':<9} {'kernel':<28} threads  bytes of each load; of each store"]
    for graph in graphs:
        for who, codes in (("hybrid", ours(graph)), ("inductor", inductors(graph))):
            for code in codes:
                loads, stores = (" ".join(map(str, sizes)) for sizes in (code.loads, code.stores))
                lines.append(f"{graph.name:<16} {who:<9} {code.name:<28} {code.threads:>7}  {loads}; {stores}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(GRAPHS))
