"""A region's graph to the bytes of an engine, in a process of its own.

    request = Request.of(region, ranges, tf32=False)                       # here: says by RefusedError what has no such form
    built = build(request.to_bytes(), lambda done: True)                  # there; may take minutes
    engine = Engine.from_bytes(built)                                     # here again

Requests and engines are JSON beside raw bytes: nothing that is read can run. An engine is built for a range of each size (`Range`), strongly
typed, and with its weights as inputs or, for those whose values the request holds, as constants.
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
from torch_hybrid_backend.engines.tensorrt.integer_products import spell_out
from torch_hybrid_backend.engines.tensorrt.precision_fallback import Rung, widen
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
    """The values of a size symbol that an engine serves: from `least` to `most`; it is fastest at `typical`."""

    least: int
    typical: int
    most: int

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor at the border of an engine: its spec, and its dimensions as they lie in memory, outermost first. Engines read and write dense
    memory of any order."""

    spec: TensorSpec
    order: tuple[int, ...]

    @staticmethod
    def of(spec: TensorSpec) -> Layout:
        """The layout of a tensor, or where it is not dense that of its contiguous copy."""
        order = memory_order(spec)
        return Layout(spec, order) if order is not None else Layout(contiguous(spec), tuple(range(len(spec.shape))))


def memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dimensions of a tensor, outermost first, where they lie densely one after the other; None elsewhere."""
    # Of dimensions of size 1 the stride says nothing: they stay where they are among the others.
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
class Request:
    """A build to be made. `inputs`: by the region's inputs in order a tensor, or a size. `constants`: values of some of the tensors, by
    position; they are no inputs of the engine. `ranges`: by the name of each size symbol. `device`: the index of the GPU to build for. `rung`:
    how exactly half types are computed."""

    graph: bytes
    inputs: tuple[Layout | Dim, ...]
    outputs: tuple[Layout, ...]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tf32: bool = False
    device: int = 0
    rung: Rung = Rung.AS_WRITTEN

    @staticmethod
    def of(
        region: Region,
        ranges: Mapping[str, Range],
        *,
        tf32: bool = False,
        constants: Mapping[int, torch.Tensor] | None = None,
        rung: Rung = Rung.AS_WRITTEN,
    ) -> Request:
        """The request for a region. Raises CompileError where it has no text."""
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
        return Request(
            text,
            tuple(inputs),
            tuple(outputs),
            dict(ranges),
            {**zero_points(region), **(constants or {})},
            tf32,
            region.device.index,
            rung,
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
            "rung": self.rung,
        }

    def contents(self) -> Iterator[bytes]:
        """The values of its constants, in the order of `form`."""
        return map(_content, self.constants.values())

    @staticmethod
    def from_bytes(data: bytes) -> Request:
        """The inverse of `to_bytes`; raises CompileError for other bytes."""
        try:
            header, rest = _unframed(_REQUEST, data)
            constants: dict[int, torch.Tensor] = {}
            for position, dtype, shape, nbytes in header["constants"]:
                constants[position] = _tensor(dtype, shape, rest[:nbytes])
                rest = rest[nbytes:]
            return Request(
                header["graph"].encode(),
                tuple(parse(each) if isinstance(each, str) else _read_layout(each) for each in header["inputs"]),
                tuple(map(_read_layout, header["outputs"])),
                {name: Range(*r) for name, r in header["ranges"].items()},
                constants,
                bool(header["tf32"]),
                int(header["device"]),
                Rung(header["rung"]),
            )
        except failures(ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            raise CompileError(f"this is no request for a TensorRT engine: {error}") from error


@dataclass(frozen=True, slots=True)
class Engine:
    """A serialised engine: `plan`, its inputs and outputs by name, and its layers as TensorRT fused them, for people."""

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
    def from_bytes(data: bytes) -> Engine:
        """The inverse of `to_bytes`; raises CompileError for what is cut short or foreign: it is to be built anew."""
        try:
            header, plan = _unframed(_ENGINE, data)
            if len(plan) != header["plan_bytes"]:
                raise ValueError(f"{len(plan)} bytes in place of {header['plan_bytes']}")
            inputs, outputs, layers = (tuple(header[name]) for name in ("inputs", "outputs", "layers"))
            return Engine(plan, inputs, outputs, layers, header["versions"])
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise CompileError(f"this is no TensorRT engine of this package's: {error}") from error


def build(request: bytes, going_on: GoingOn) -> bytes:
    """The entry of a process that builds: `Engine.to_bytes` for `Request.to_bytes`. `going_on` gets how far it is, from 0 to 1, and says
    whether to go on. Raises CompileError."""
    from torch_hybrid_backend.engines.tensorrt import adapter

    wanted = Request.from_bytes(request)
    if torch.cuda.is_available():
        torch.cuda.set_device(wanted.device)
    fakes = Fakes(*({name: getattr(r, which) for name, r in wanted.ranges.items()} for which in ("typical", "most")))
    try:
        graph = graph_from_text(wanted.graph, fakes.mode)
    except failures(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise CompileError(f"the request's graph cannot be read: {error}") from error
    make_constants(graph, wanted)
    values = [
        fakes.tensor(each.spec) if isinstance(each, Layout) else fakes.size(each)
        for i, each in enumerate(wanted.inputs)
        if i not in wanted.constants
    ]
    try:
        module = adapter.lowered(graph, fakes, values)
    except CompileError:
        raise
    except failures(Exception) as error:  # a decomposition may fail in any way
        raise CompileError(f"torch_tensorrt cannot lower the region: {type(error).__name__}: {error}") from error
    spell_out(module)
    widen(module, wanted.rung)
    inputs = [_network_input(f"input{i}", wanted.inputs[i], wanted.ranges) for i in wanted.engine_inputs]
    outputs = [
        adapter.NetworkOutput(f"output{i}", each.spec.torch_dtype, each.order, _numbers(each.spec.shape))
        for i, each in enumerate(wanted.outputs)
    ]
    plan, layers = adapter.build_engine(module, inputs, outputs, tf32=wanted.tf32, going_on=going_on)
    names = tuple(each.name for each in inputs), tuple(each.name for each in outputs)
    return Engine(plan, *names, layers, adapter.versions()).to_bytes()


def make_constants(graph: torch.fx.GraphModule, wanted: Request) -> None:
    """Have a request's graph hold its constants, in place of the inputs that they are, with those inputs' strides."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for position, tensor in wanted.constants.items():
        node, layout = placeholders[position], wanted.inputs[position]
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
    """The least, typical or most value of a size where its symbols have these ranges. Raises CompileError for one that has none."""
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
        raise ValueError("its first bytes are others")
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
