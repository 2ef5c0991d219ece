"""The network of a TensorRT engine, computed by PyTorch's operators on the host: there is no GPU to run engines on.

    network = network_of(region)                # as converters made it, before TensorRT's builder; strongly typed
    network.run([x, w])                         # the region's outputs for its tensors, of any sizes
    network.check({"s0": 5})                    # against the region's graph in eager, with random tensors of such sizes

The layers follow TensorRT's documentation strictly: operands of two dtypes, slices out of bounds and unsuitable shapes raise. Layers that no
model of the zoo has raise NotImplementedError.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.build import BuildRequest, Layout, build, make_constants
from torch_hybrid_backend.engines.tensorrt.ranges import ranges_of
from torch_hybrid_backend.graph.graph_json import graph_from_text
from torch_hybrid_backend.sizes.size import evaluate


class Network:
    """A network that was built for a request."""

    def __init__(self, request: BuildRequest, interpreter: Any) -> None:
        self.request = request
        self._interpreter = interpreter  # its contents live as long
        self._net = interpreter.ctx.net
        layers = [self._net.get_layer(number) for number in range(self._net.num_layers)]
        self._makers = {
            layer.get_output(position).name: layer for layer in layers for position in range(layer.num_outputs)
        }

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the outputs. `tensors`: the region's inputs that are inputs of the engine, in its order."""
        layouts = [self.request.inputs[position] for position in self.request.engine_inputs]
        values: dict[str, torch.Tensor] = {}
        for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            assert isinstance(layout, Layout)
            entering = self._net.get_input(number)
            values[entering.name] = tensor.permute(layout.order).contiguous()
            _check(entering, values[entering.name])
        results = []
        for number, layout in enumerate(self.request.outputs):
            result = self._value(self._net.get_output(number), values)
            results.append(result.permute([layout.order.index(d) for d in range(len(layout.order))]))
        return results

    def check(self, sizes: Mapping[str, int], *, below: int = 2) -> None:
        """Compare with eager on random tensors. `sizes`: symbol name -> size. Integers must be equal, floats nearly. Integer inputs are from 0
        to `below`."""
        assert all(size <= self.request.ranges[name].most for name, size in sizes.items()), self.request.ranges
        graph = graph_from_text(self.request.graph, FakeTensorMode())
        make_constants(graph, self.request)
        generator = torch.Generator().manual_seed(0)
        given: list[Any] = []
        for position, each in enumerate(self.request.inputs):
            if position in self.request.constants:
                continue
            given.append(
                _random(each.spec, sizes, below, generator) if isinstance(each, Layout) else evaluate(each, sizes)
            )
        with torch.no_grad():
            expected = graph(*given)
        found = self.run([each for each in given if isinstance(each, torch.Tensor)])
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)

    def _value(self, wanted: Any, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute a value depth first, without recursion, as networks are deep."""
        left = [wanted]
        while left:
            tensor = left[-1]
            if tensor.name in values:
                left.pop()
                continue
            layer = self._makers[tensor.name]
            read = [layer.get_input(i) for i in range(layer.num_inputs)]
            missing = [each for each in read if each is not None and each.name not in values]
            if missing:
                left += missing
                continue
            inputs = [None if each is None else values[each.name] for each in read]
            values[tensor.name] = _run(layer, inputs)
            _check(tensor, values[tensor.name])
        return values[wanted.name]


def _random(spec: TensorSpec, sizes: Mapping[str, int], below: int, generator: torch.Generator) -> torch.Tensor:
    shape, strides = ([evaluate(size, sizes) for size in each] for each in (spec.shape, spec.strides))
    made = torch.empty_strided(shape, strides, dtype=spec.torch_dtype)
    if spec.torch_dtype.is_floating_point:
        return made.copy_(torch.randn(shape, generator=generator) / 3)
    return made.copy_(torch.randint(0, below, shape, generator=generator))


def network_of(region: Region) -> Network:
    """The network of a region; the engine is built too."""
    from torch_hybrid_backend.engines.tensorrt import adapter

    seen: list[Any] = []
    plain = adapter._Interpreter._populate_trt_builder_config
    request = BuildRequest.of(region, ranges_of(region))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            adapter._Interpreter, "_populate_trt_builder_config", lambda self: seen.append(self) or plain(self)
        )
        build(request.to_bytes(), lambda done: True)
    return Network(request, *seen)


def _check(tensor: Any, value: torch.Tensor) -> None:
    """Check that a value has the dtype and sizes that TensorRT reports."""
    assert value.dtype is _dtype(tensor.dtype), (tensor.name, value.dtype, tensor.dtype)
    told = _dims(tensor.shape)
    if told is not None:  # else TensorRT knows no rank
        fits = [known in (-1, size) for known, size in zip(told, value.shape, strict=True)]
        assert all(fits), (tensor.name, tuple(value.shape), told)


def _dtype(dtype: Any) -> torch.dtype:
    names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "BOOL": "bool"}
    found = getattr(torch, names.get(dtype.name, dtype.name.lower()))
    assert isinstance(found, torch.dtype)
    return found


# --- layers -----------------------------------------------------------------------------------------------------------------------------


def _run(layer: Any, inputs: Sequence[Any]) -> torch.Tensor:
    from torch_hybrid_backend.engines.tensorrt.adapter import trt

    kind = layer.type.name
    if kind not in _LAYERS:
        raise NotImplementedError(f"a layer {kind} of TensorRT's")
    name, function = _LAYERS[kind]
    layer.__class__ = getattr(
        trt, name
    )  # as TensorRT's documentation has it: what is found in a network has no attributes of its kind
    try:
        return function(layer, *inputs)
    finally:
        layer.__class__ = trt.ILayer


def _constant(layer: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(layer.weights)).reshape(tuple(layer.shape))


def _shuffle(layer: Any, x: torch.Tensor, shape: torch.Tensor | None = None) -> torch.Tensor:
    wanted = _dims(layer.reshape_dims) if shape is None else shape.tolist()
    x = x.permute(tuple(layer.first_transpose)[: x.dim()])
    if wanted is not None:
        zeros = {d: x.shape[d] for d, size in enumerate(wanted) if size == 0 and layer.zero_is_placeholder}
        x = x.reshape([zeros.get(d, size) for d, size in enumerate(wanted)])
    return x.permute(tuple(layer.second_transpose)[: x.dim()])


def _dims(dims: Any) -> list[int] | None:
    """Sizes; None if they are not set. TensorRT-RTX 1.5 then has dimensions that cannot be read, 1.6 has None."""
    try:
        return None if dims is None else list(dims)
    except ValueError:
        return None


def _slice(layer: Any, x: torch.Tensor, *given: torch.Tensor | None) -> torch.Tensor:
    names = ("start", "shape", "stride")
    told = (*given, None, None, None)[: len(names)]
    start, size, stride = (
        list(getattr(layer, name)) if own is None else own.tolist() for name, own in zip(names, told, strict=True)
    )
    assert layer.mode.name == "STRICT_BOUNDS"
    for dim, (first, count, step) in enumerate(zip(start, size, stride, strict=True)):
        places = first + step * torch.arange(count)
        assert count >= 0, (layer.name, size)
        assert not count or (int(places.min()) >= 0 and int(places.max()) < x.shape[dim]), (
            layer.name,
            start,
            size,
            stride,
        )
        x = x.index_select(dim, places)
    return x


def _gather(layer: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    assert bool((places >= 0).all()), layer.name
    places, axis, mode = places.long(), layer.axis, layer.mode.name
    if mode == "ELEMENT":
        return x.gather(axis, places)
    if mode != "DEFAULT":
        raise NotImplementedError(f"gathering in the mode {mode}")
    assert layer.num_elementwise_dims == 0
    return x.index_select(axis, places.reshape(-1)).reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))


def _fill(layer: Any, shape: torch.Tensor | None = None, first: Any = None, steps: Any = None) -> torch.Tensor:
    assert layer.operation.name == "LINSPACE"
    sizes = list(layer.shape) if shape is None else shape.tolist()
    dtype = _dtype(layer.to_type)
    filled = torch.full(sizes, layer.alpha if first is None else first.item(), dtype=dtype)
    given = [layer.beta] * len(sizes) if steps is None else steps.tolist()
    for dim, (size, step) in enumerate(zip(sizes, given, strict=True)):
        numbers = (step * torch.arange(size)).to(dtype)
        filled = filled + numbers.reshape([size if d == dim else 1 for d in range(len(sizes))])
    return filled


def _elementwise(layer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.dtype is y.dtype, (layer.name, x.dtype, y.dtype)
    assert x.dim() == y.dim(), (layer.name, x.shape, y.shape)
    whole = not x.dtype.is_floating_point
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "SUM": torch.add,
        "SUB": torch.sub,
        "PROD": torch.mul,
        "DIV": (lambda a, b: torch.div(a, b, rounding_mode="trunc")) if whole else torch.div,
        "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "POW": torch.pow,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "EQUAL": torch.eq,
        "GREATER": torch.gt,
        "LESS": torch.lt,
        "AND": torch.logical_and,
        "OR": torch.logical_or,
        "XOR": torch.logical_xor,
    }
    return functions[layer.op.name](x, y)


def _unary(layer: Any, x: torch.Tensor) -> torch.Tensor:
    names = {"NOT": "logical_not", "RECIP": "reciprocal"}
    operator: Any = getattr(torch, names.get(layer.op.name, layer.op.name.lower()))
    return operator(x)  # type: ignore[no-any-return]


def _activation(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.type.name == "GELU_ERF":
        return torch.nn.functional.gelu(x)
    operator: Any = getattr(torch, layer.type.name.lower())
    return operator(x)  # type: ignore[no-any-return]


def _reduce(layer: Any, x: torch.Tensor) -> torch.Tensor:
    dims = [d for d in range(x.dim()) if layer.axes >> d & 1]
    kind, keep = layer.op.name, layer.keep_dims
    if kind == "PROD":
        for d in reversed(dims):
            x = x.prod(d, keepdim=keep, dtype=x.dtype)
        return x
    functions = {"SUM": torch.sum, "AVG": torch.mean, "MAX": torch.amax, "MIN": torch.amin}
    options = {"dtype": x.dtype} if kind in ("SUM", "AVG") else {}
    return functions[kind](x, dims, keepdim=keep, **options)  # type: ignore[operator, no-any-return]


def _product(layer: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert a.dim() == b.dim()
    turned = [x.mT if op.name == "TRANSPOSE" else x for x, op in ((a, layer.op0), (b, layer.op1))]
    assert all(op.name != "VECTOR" for op in (layer.op0, layer.op1))
    return torch.matmul(*turned)


def _select(layer: Any, which: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.dtype is y.dtype
    return torch.where(which, x, y)


def _unsqueeze(layer: Any, x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    rank = x.dim() + axes.numel()
    for d in sorted(int(axis) % rank for axis in axes):
        x = x.unsqueeze(d)
    return x


def _squeeze(layer: Any, x: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    gone = {int(axis) % x.dim() for axis in axes}
    assert all(x.shape[d] == 1 for d in gone), (layer.name, x.shape, gone)
    return x.reshape([size for d, size in enumerate(x.shape) if d not in gone])


def _concatenation(layer: Any, *given: torch.Tensor) -> torch.Tensor:
    assert all(a.dtype is b.dtype for a, b in itertools.pairwise(given)), layer.name
    return torch.cat(given, layer.axis)


_LAYERS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "ACTIVATION": ("IActivationLayer", _activation),
    "CAST": ("ICastLayer", lambda layer, x: x.to(_dtype(layer.to_type))),
    "CONCATENATION": ("IConcatenationLayer", _concatenation),
    "CONSTANT": ("IConstantLayer", _constant),
    "ELEMENTWISE": ("IElementWiseLayer", _elementwise),
    "FILL": ("IFillLayer", _fill),
    "GATHER": ("IGatherLayer", _gather),
    "IDENTITY": ("IIdentityLayer", lambda layer, x: x),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", _product),
    "REDUCE": ("IReduceLayer", _reduce),
    "SELECT": ("ISelectLayer", _select),
    "SHAPE": ("IShapeLayer", lambda layer, x: torch.tensor(x.shape)),
    "SHUFFLE": ("IShuffleLayer", _shuffle),
    "SLICE": ("ISliceLayer", _slice),
    "SOFTMAX": ("ISoftMaxLayer", lambda layer, x: x.softmax(layer.axes.bit_length() - 1)),
    "SQUEEZE": ("ISqueezeLayer", _squeeze),
    "UNARY": ("IUnaryLayer", _unary),
    "UNSQUEEZE": ("IUnsqueezeLayer", _unsqueeze),
}
