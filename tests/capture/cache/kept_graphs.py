"""Models whose graphs are kept, compiled and beside eager: in a process of its own, for what another process kept is to be found.

    python -m tests.capture.cache.kept_graphs NAME ...

writes what was found, as JSON, to stdout: for each name of `SUBJECTS` a `Found`. Those of torchao need it where it can be imported.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import torch_hybrid_backend
from tests.ecosystem.torchao_models import MODELS, Net

# Plans of eager segments: what is compared is capture's part, and kernels would take a minute. Nothing is timed: Dynamo's graph in eager could
# win, and what was kept would not run.
_compile = functools.partial(torch.compile, backend="hybrid", options={"engines": ["eager"], "placement": "estimate"})


@dataclasses.dataclass(frozen=True)
class Found:
    """traced: how many graphs AOTAutograd traced. output: a digest of the bytes of what the compiled model returned in its first and in its
    second call, which is the plan's. difference: the second's largest from eager's, as a share of eager's largest number."""

    traced: int
    output: str
    difference: float


class Int8Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-128, 128, (64, 96), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(64, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self.q, self.scales)


class Int4Packed(nn.Module):
    def __init__(self, group: int) -> None:
        super().__init__()
        q = torch.randint(0, 16, (64, 128), dtype=torch.int32)
        self.group = group
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2))
        self.register_buffer("moves", torch.randn(128 // group, 64, 2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.moves)


def _found(model: Callable[..., Any], x: torch.Tensor, compiled: Callable[..., Any] | None = None) -> Found:
    """`compiled`: what was compiled before, where the model is not."""
    counters.clear()
    compiled = compiled or _compile(model)
    first, second, eager = compiled(x), compiled(x), model(x)
    digest = hashlib.sha256()
    for output in (first, second):
        digest.update(bytes(output.contiguous().view(torch.uint8).flatten().tolist()))
    difference = float((second - eager).abs().max() / eager.abs().max())
    return Found(counters["aot_autograd"]["total"], digest.hexdigest(), difference)


def _autocast() -> Found:
    with torch.autocast("cpu", torch.bfloat16):
        return _found(Net().eval(), torch.randn(2, 3, 16, 16))


def _quantize(**options: Any) -> Found:
    x = torch.randn(2, 3, 16, 16)
    return _found(torch_hybrid_backend.quantize(Net().eval(), **options), x)


def _calibrated() -> Found:
    return _quantize(loader=[torch.randn(2, 3, 16, 16) for _ in range(4)], calibration="naive")


def _torchao(name: str) -> Found:
    model, x, _ = MODELS[name]()
    return _found(model, x)


def _linear(config: Any) -> nn.Sequential:
    from torchao.quantization import quantize_

    model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
    quantize_(model, config)
    return model


def _groups(size: int) -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(size))


def _of_8_bits() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def _rows() -> Any:
    """Parts of the shapes and dtypes that `_of_8_bits` has, under another class."""
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis

    return IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))


def _weights(config: Callable[[], Any]) -> Found:
    return _found(_linear(config()), torch.randn(4, 64))


def _replaced(before: Callable[[], Any], after: Callable[[], Any]) -> Found:
    """The second calls of a compiled model, whose weight became another meanwhile."""
    model, x = _linear(before()), torch.randn(4, 64)
    compiled = _compile(model)
    compiled(x)
    model[0].weight = _linear(after())[0].weight
    return _found(model, x, compiled)


def _returned() -> Found:
    """A graph with an output that is made of others."""
    model = _linear(_of_8_bits())

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return model(x), torch.clone(model[0].weight)

    compiled = _compile(function)
    return _found(lambda x: function(x)[1].dequantize(), torch.randn(4, 64), lambda x: compiled(x)[1].dequantize())


def _derived() -> Found:
    """A class of the program's own, which is a class of torchao's but for its name."""
    from torchao.quantization import Int8Tensor

    class Derived(Int8Tensor):
        pass

    model = _linear(_of_8_bits())
    names, metadata = model[0].weight.__tensor_flatten__()
    parts = {name: getattr(model[0].weight, name) for name in names}
    weight = Derived.__tensor_unflatten__(parts, metadata, None, None)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return _found(model, torch.randn(4, 64))


def _implemented() -> Found:
    """A product of the program's own for a class of torchao's: from now on, so this is the last subject of a process."""
    from torchao.quantization import Int8Tensor

    @Int8Tensor.implements_torch_function(nn.functional.linear)
    def doubled(_function: Any, _types: Any, args: tuple[Any, ...], _kwargs: Any) -> torch.Tensor:
        return nn.functional.linear(args[0], args[1].dequantize() * 2)

    return _weights(_of_8_bits)


SUBJECTS: Mapping[str, Callable[[], Found]] = {
    "int8pack_mm": lambda: _found(Int8Packed(), torch.randn(5, 96, dtype=torch.bfloat16)),
    "int4pack_mm": lambda: _found(Int4Packed(32), torch.randn(5, 128, dtype=torch.bfloat16)),
    "int4pack_mm, groups of 64": lambda: _found(Int4Packed(64), torch.randn(5, 128, dtype=torch.bfloat16)),
    "autocast": _autocast,
    "quantize": functools.partial(_quantize, calibration="none"),
    "quantize, calibrated": _calibrated,
    **{name: functools.partial(_torchao, name) for name in MODELS},
    "rows of int8": functools.partial(_weights, _of_8_bits),
    "rows of int8, another class": functools.partial(_weights, _rows),
    "groups of 32": functools.partial(_weights, functools.partial(_groups, 32)),
    "groups of 64": functools.partial(_weights, functools.partial(_groups, 64)),
    "replaced by groups of 64": functools.partial(
        _replaced, functools.partial(_groups, 32), functools.partial(_groups, 64)
    ),
    "replaced by another class": functools.partial(_replaced, _of_8_bits, _rows),
    "returned": _returned,
    "a class of the program's": _derived,
    "a method of the program's": _implemented,
}


def main() -> None:
    found = {}
    for name in sys.argv[1:]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.no_grad():
            found[name] = dataclasses.asdict(SUBJECTS[name]())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
