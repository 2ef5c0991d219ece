"""Build of a region's graph to the bytes of a TensorRT engine, in a process of its own.

    request = BuildRequest.of(region, ranges, tf32=False)                  # in this process; raises CompileError if the region has no text
    built = build(request.to_bytes(), lambda done: True)                  # in the build process; may take minutes
    engine = SerializedEngine.from_bytes(built)                           # in this process

Requests and engines are JSON and raw bytes, so reading them executes nothing. An engine is strongly typed, and built for a range of each size
(`Range`). Weights are inputs of the engine; those whose values the request holds are constants.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from torch_hybrid_backend.core.device import CPU
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.capability import on_host
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.engines.tensorrt.integer_products import factor_out_scales
from torch_hybrid_backend.engines.tensorrt.precision_fallback import AccumulationPrecision, widen
from torch_hybrid_backend.engines.tensorrt.quantization import zero_points
from torch_hybrid_backend.errors import CompileError, failures
from torch_hybrid_backend.graph.graph_json import NotTextError, graph_from_text, graph_to_text
from torch_hybrid_backend.sizes.bounds import bounds
from torch_hybrid_backend.sizes.forms import parse
from torch_hybrid_backend.sizes.size import Dim, evaluate, size_hint, symbols

GoingOn = Callable[[float], bool]
_REQUEST, _ENGINE = b"hybrid trt request 1\n", b"hybrid trt engine 1\n"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a size symbol that an engine serves: from `least` to `most`. The engine is tuned for `typical`."""

    least: int
    typical: int
    most: int

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor that enters or leaves an engine. `order`: its dimensions in memory order, outermost first. Engines read and write dense memory
    with dimensions in any order."""

    spec: TensorSpec
    order: tuple[int, ...]

    @staticmethod
    def of(spec: TensorSpec) -> Layout:
        """The layout of a dense tensor, or of the contiguous copy of another tensor."""
        order = memory_order(spec)
        return Layout(spec, order) if order is not None else Layout(contiguous(spec), tuple(range(len(spec.shape))))


def memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dimensions of a tensor in memory order, outermost first; None if the tensor is not dense."""
    # The stride of a dimension of size 1 has no meaning: such dimensions keep their place among the others.
    order = sorted(range(len(spec.shape)), key=lambda d: -size_hint(spec.strides[d]))
    expected: Dim = 1
    for d in reversed(order):
        if spec.shape[d] == 1:
            continue
        if spec.strides[d] != expected:
            return None
        expected = expected * spec.shape[d]
    return tuple(order)


def contiguous(spec: TensorSpec) -> TensorSpec:
    """The spec of a contiguous copy."""
    strides: list[Dim] = []
    stride: Dim = 1
    for size in reversed(spec.shape):
        strides.insert(0, stride)
        stride = stride * size
    return replace(spec, strides=tuple(strides))


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """Request to build an engine. `inputs`: a tensor or a size for each of the region's inputs, in order. `constants`: position of an input ->
    its value; these are no inputs of the engine. `ranges`: size symbol -> range. `device`: index of the GPU. `accumulation`: how exactly half
    types are computed."""

    graph: bytes
    inputs: tuple[Layout | Dim, ...]
    outputs: tuple[Layout, ...]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tf32: bool = False
    device: int = 0
    accumulation: AccumulationPrecision = AccumulationPrecision.AS_WRITTEN

    @staticmethod
    def of(
        region: Region,
        ranges: Mapping[str, Range],
        *,
        tf32: bool = False,
        constants: Mapping[int, torch.Tensor] | None = None,
        accumulation: AccumulationPrecision = AccumulationPrecision.AS_WRITTEN,
    ) -> BuildRequest:
        """The request for a region. Raises CompileError if the region cannot be written as text."""
        inputs: list[Layout | Dim] = []
        for each in region.inputs:
            entering = Layout.of(each.spec) if each.spec is not None else each.size
            if entering is None:
                raise CompileError(f"the input {each.name} is neither a tensor nor a size")
            inputs.append(entering)
        outputs = [Layout.of(spec) for spec in region.outputs if spec is not None]
        if len(outputs) != len(region.outputs):
            raise CompileError("an output of the region is no plain tensor")
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(region.graph_module.graph, {}))
        for node in graph.nodes:
            node.meta.clear()  # traced anew, with sizes of its own
        on_host(graph)
        try:
            text = graph_to_text(torch.fx.GraphModule(region.graph_module, graph))
        except NotTextError as error:
            raise CompileError(f"the region has no text for another process: {error}") from error
        return BuildRequest(
            text,
            tuple(inputs),
            tuple(outputs),
            dict(ranges),
            {**zero_points(region), **(constants or {})},
            tf32,
            region.device.index,
            accumulation,
        )

    @property
    def engine_inputs(self) -> tuple[int, ...]:
        """Positions of the region's inputs that are inputs of the engine, in its order."""
        tensors = [i for i, each in enumerate(self.inputs) if isinstance(each, Layout)]
        return tuple(i for i in tensors if i not in self.constants)

    def to_bytes(self) -> bytes:
        """Write the request as the process that builds reads it."""
        return _framed(_REQUEST, {"graph": self.graph.decode(), "device": self.device, **self.form}, self.contents())

    @property
    def form(self) -> dict[str, Any]:
        """The request as JSON, without the graph, the values of constants and the GPU."""
        return {
            "inputs": [_layout(i) if isinstance(i, Layout) else str(i) for i in self.inputs],
            "outputs": [_layout(each) for each in self.outputs],
            "ranges": {name: [r.least, r.typical, r.most] for name, r in self.ranges.items()},
            "constants": [[position, *_form(tensor)] for position, tensor in self.constants.items()],
            "tf32": self.tf32,
            "accumulation": self.accumulation,
        }

    def contents(self) -> Iterator[bytes]:
        """The bytes of the request's constants, in the order of `form`."""
        return map(_content, self.constants.values())

    @staticmethod
    def from_bytes(data: bytes) -> BuildRequest:
        """The inverse of `to_bytes`; raises CompileError for other bytes."""
        try:
            header, rest = _unframed(_REQUEST, data)
            constants: dict[int, torch.Tensor] = {}
            for position, dtype, shape, nbytes in header["constants"]:
                constants[position] = _tensor(dtype, shape, rest[:nbytes])
                rest = rest[nbytes:]
            return BuildRequest(
                header["graph"].encode(),
                tuple(parse(each) if isinstance(each, str) else _read_layout(each) for each in header["inputs"]),
                tuple(map(_read_layout, header["outputs"])),
                {name: Range(*r) for name, r in header["ranges"].items()},
                constants,
                bool(header["tf32"]),
                int(header["device"]),
                AccumulationPrecision(header["accumulation"]),
            )
        except failures(ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            raise CompileError(f"this is no request for a TensorRT engine: {error}") from error


@dataclass(frozen=True, slots=True)
class SerializedEngine:
    """A serialized engine: `plan`, the names of its inputs and outputs, and its layers as TensorRT fused them, for reports."""

    plan: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[str, ...]
    versions: str

    def to_bytes(self) -> bytes:
        """Write the engine as the store keeps it."""
        header = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "layers": self.layers,
            "versions": self.versions,
            "plan_bytes": len(self.plan),
        }
        return _framed(_ENGINE, header, [self.plan])

    @staticmethod
    def from_bytes(data: bytes) -> SerializedEngine:
        """The inverse of `to_bytes`. Raises CompileError for truncated or foreign bytes: the engine must be built anew."""
        try:
            header, plan = _unframed(_ENGINE, data)
            if len(plan) != header["plan_bytes"]:
                raise ValueError(f"{len(plan)} bytes in place of {header['plan_bytes']}")
            inputs, outputs, layers = (tuple(header[name]) for name in ("inputs", "outputs", "layers"))
            return SerializedEngine(plan, inputs, outputs, layers, header["versions"])
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise CompileError(f"this is no TensorRT engine of this package's: {error}") from error


def build(request: bytes, going_on: GoingOn) -> bytes:
    """Build `SerializedEngine.to_bytes` from `BuildRequest.to_bytes`: the entry of the build process.

    `going_on`: takes the progress, from 0 to 1, and returns false to stop the build. Raises CompileError.
    """
    from torch_hybrid_backend.engines.tensorrt import adapter

    parsed = BuildRequest.from_bytes(request)
    if torch.cuda.is_available():
        torch.cuda.set_device(parsed.device)
    fakes = Fakes(*({name: getattr(r, which) for name, r in parsed.ranges.items()} for which in ("typical", "most")))
    try:
        graph = graph_from_text(parsed.graph, fakes.mode)
    except failures(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CompileError(f"the request's graph cannot be read: {error}") from error
    make_constants(graph, parsed)
    values = [
        fakes.tensor(each.spec) if isinstance(each, Layout) else fakes.size(each)
        for i, each in enumerate(parsed.inputs)
        if i not in parsed.constants
    ]
    try:
        module = adapter.lowered(graph, fakes, values)
    except CompileError:
        raise
    except failures(Exception) as error:  # a decomposition may fail in any way
        raise CompileError(f"torch_tensorrt cannot lower the region: {type(error).__name__}: {error}") from error
    factor_out_scales(module)
    widen(module, parsed.accumulation)
    inputs = [_network_input(f"input{i}", parsed.inputs[i], parsed.ranges) for i in parsed.engine_inputs]
    outputs = [
        adapter.NetworkOutput(f"output{i}", each.spec.torch_dtype, each.order, _numbers(each.spec.shape))
        for i, each in enumerate(parsed.outputs)
    ]
    plan, layers = adapter.build_engine(module, inputs, outputs, tf32=parsed.tf32, going_on=going_on)
    names = tuple(each.name for each in inputs), tuple(each.name for each in outputs)
    return SerializedEngine(plan, *names, layers, adapter.versions()).to_bytes()


def make_constants(graph: torch.fx.GraphModule, parsed: BuildRequest) -> None:
    """Replace inputs of a request's graph by the request's constants, with the strides of these inputs."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for position, tensor in parsed.constants.items():
        node, layout = placeholders[position], parsed.inputs[position]
        assert isinstance(layout, Layout)
        name = f"_constant{position}"
        laid = torch.empty_strided(tensor.shape, _numbers(layout.spec.strides), dtype=tensor.dtype).copy_(tensor)
        setattr(graph, name, torch.nn.Parameter(laid, requires_grad=False))
        with graph.graph.inserting_before(node):
            made = graph.graph.get_attr(name)
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    graph.recompile()


def _network_input(name: str, layout: Layout | Dim, ranges: Mapping[str, Range]) -> Any:
    from torch_hybrid_backend.engines.tensorrt import adapter

    assert isinstance(layout, Layout)
    shape = layout.spec.shape
    return adapter.NetworkInput(
        name,
        layout.spec.torch_dtype,
        layout.order,
        _numbers(shape),
        *(tuple(extreme(size, ranges, which) for size in shape) for which in ("least", "typical", "most")),
    )


def extreme(size: Dim, ranges: Mapping[str, Range], which: str) -> int:
    """The least, typical or most value of a size whose symbols have these ranges. Raises CompileError for a symbol without a range."""
    names = [each.name for each in symbols([size])]
    missing = [name for name in names if name not in ranges]
    if missing:
        raise CompileError(f"no range is given for the size {missing[0]}")
    if which == "typical":
        return evaluate(size, {name: ranges[name].typical for name in names})
    least, most = bounds(size, {name: (ranges[name].least, ranges[name].most) for name in names})
    return (
        max(0, least) if which == "least" else most
    )  # where bounds are wider than they need be: no dimension is below 0


def _numbers(sizes: Sequence[Dim]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


# --- bytes ------------------------------------------------------------------------------------------------------------------------------


def _framed(magic: bytes, header: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
    text = json.dumps(header).encode()
    return b"".join([magic, _LENGTH.pack(len(text)), text, *parts])


def _unframed(magic: bytes, data: bytes) -> tuple[Any, bytes]:
    if not data.startswith(magic):
        raise ValueError(f"bad magic number {data[: len(magic)]!r}; it must be {magic!r}")
    start = len(magic) + _LENGTH.size
    (length,) = _LENGTH.unpack(data[len(magic) : start])
    return json.loads(data[start : start + length]), data[start + length :]


def _layout(layout: Layout) -> list[Any]:
    spec = layout.spec
    return [spec.dtype, [str(n) for n in spec.shape], [str(n) for n in spec.strides], list(layout.order)]


def _read_layout(written: Sequence[Any]) -> Layout:
    dtype, shape, strides, order = written
    return Layout(TensorSpec(tuple(map(parse, shape)), dtype, tuple(map(parse, strides)), CPU), tuple(order))


def _form(tensor: torch.Tensor) -> tuple[str, list[int], int]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.numel() * tensor.itemsize


def _content(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _tensor(dtype: str, shape: Sequence[int], content: bytes) -> torch.Tensor:
    wanted = getattr(torch, dtype)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    if not content:
        return torch.empty(list(shape), dtype=wanted)
    return torch.frombuffer(bytearray(content), dtype=wanted).reshape(list(shape))
