"""Fake tensors: sizes and strides of a spec, on the host, with independent size symbols."""

from __future__ import annotations

import torch

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.core.tensor_spec import TensorSpec
from torch_hybrid_backend.engines.tensorrt.fakes import Fakes
from torch_hybrid_backend.sizes.size import symbol


def test_tensors_of_a_spec() -> None:
    """Equal symbols are equal sizes, and different symbols differ, whatever their examples. The CPU stands for any device."""
    a, b = symbol("a", 8), symbol("b", 8)
    fakes = Fakes({"b": 8})
    x = fakes.tensor(TensorSpec((a, b, 3), "float16", (b * 3, 3, 1), Device("cuda", 1)))
    assert x.device.type == "cpu"
    assert x.dtype is torch.float16
    y = fakes.tensor(TensorSpec((a * 2, b), "float32", (1, a * 2), Device("cpu")))
    assert not fakes.assumptions()
    assert x.shape[0] * 2 == y.shape[0]
    assert y.stride(1) == y.shape[0]
    assert not fakes.assumptions()
    assert fakes.size(7) == 7
    assert bool(x.shape[0] == x.shape[1])
    assert fakes.assumptions()


def test_a_size_whose_example_is_1_stays_unknown() -> None:
    """PyTorch would specialize sizes 0 and 1."""
    fakes = Fakes()
    x = fakes.tensor(TensorSpec((symbol("n", 1), 4), "float32", (4, 1), Device("cpu")))
    assert not isinstance(x.shape[0], int)


def test_sizes_are_at_most_what_they_can_be() -> None:
    """Tracing decides by the bound, and assumes nothing. If the bound equals the example, the size stays a symbol."""
    fakes = Fakes({"a": 8, "b": 2, "c": 8}, {"a": 64, "b": 2})
    sizes = [fakes.size(symbol(name)) for name in "abc"]
    assert bool(sizes[0] <= 64)
    assert not fakes.assumptions()
    assert not isinstance(sizes[1], int)
    assert bool(sizes[2] <= 64)
    assert len(fakes.assumptions()) == 1


def test_new_tensors_are_on_the_host() -> None:
    """New tensors are on the CPU, whatever the default device is: a graph has one device."""
    fakes = Fakes()
    x = fakes.tensor(TensorSpec((2,), "float32", (1,), CPU))
    with torch.device("meta"):
        graph = fakes.traced(lambda x: x + torch.ones(2), [x])
    assert {node.meta["val"].device.type for node in graph.graph.nodes if "val" in node.meta} == {"cpu"}
