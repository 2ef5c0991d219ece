"""On which device operators run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.core.device import CPU, Device
from torch_hybrid_backend.graph.devices import device_of, is_on_host

aten = torch.ops.aten
FIRST, SECOND = Device("cuda", 0), Device("cuda", 1)


def devices_of(fn: Callable[..., object], *inputs: tuple[str, tuple[int, ...]]) -> dict[str, Device | None]:
    """The device of each operator of the function's graph, for inputs on a device, of a shape."""
    with FakeTensorMode():
        graph = make_fx(fn)(*(torch.empty(shape, device=device) for device, shape in inputs)).graph
    return {node.name: device_of(node) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("device", [CPU, FIRST, SECOND, Device("meta")], ids=str)
def test_operators_run_where_their_tensors_are(device: Device) -> None:
    """Views, operators of several results, what picks one of those, and tensors made of nothing."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = aten.max.dim(x, 0)
        return values + 1, indices, aten.permute(x, [1, 0]), aten.zeros([3], device=x.device)

    found = devices_of(fn, (str(device), (2, 3)))
    assert set(found.values()) == {device}
    assert len(found) == 6


def test_a_graph_is_on_the_host_where_every_tensor_is() -> None:
    """Also those that an operator returns among several, and those that it moves."""
    cases = {
        "host": (lambda x: aten.max.dim(x, 0)[0] + 1, "cpu", True),
        "device": (lambda x: x + 1, "cuda:0", False),
        "moved": (lambda x: x.to("meta"), "cpu", False),
        "split": (lambda x: [part.to("cpu") for part in x.split(1)], "cuda:0", False),
    }
    for name, (fn, device, expected) in cases.items():
        with FakeTensorMode():
            assert is_on_host(make_fx(fn)(torch.empty(2, 3, device=device))) is expected, name


def test_a_number_on_the_host_is_no_device_of_its_own() -> None:
    """A tensor of no dimensions on the CPU may be an operand anywhere; computed with its like, it is the CPU's."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.add(y, 1), aten.mul(x, y), aten.mul(y, x)

    assert devices_of(fn, ("cuda:1", (4,)), ("cpu", ())) == {"add": CPU, "mul": SECOND, "mul_1": SECOND}


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_what_leaves_a_device_has_none(shape: tuple[int, ...]) -> None:
    """Copies between devices, of tensors without dimensions too: the host would wait for those of a GPU. What fills one from a number of
    the host's does not read a device."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten._to_copy(x, device="cpu"), aten._to_copy(x, device="cuda:1"), aten._to_copy(y, device="cuda:0")

    found = devices_of(fn, ("cuda:0", shape), ("cpu", shape))
    assert found == {"_to_copy": None, "_to_copy_1": None, "_to_copy_2": None if shape else FIRST}


def test_a_mixture_has_none() -> None:
    """Indices on the CPU for rows on a GPU: PyTorch copies them, kernels could not."""
    with FakeTensorMode():
        rows, places = torch.empty(4, 5, device="cuda"), torch.empty(3, dtype=torch.int64)
        graph = make_fx(lambda x, i: aten.index(x, [i]))(rows, places).graph
    assert [device_of(node) for node in graph.nodes if node.op == "call_function"] == [None]


def test_arithmetic_on_sizes_is_the_hosts() -> None:
    """Arithmetic of nothing but sizes, which makes no tensor, runs where sizes are."""
    graph = make_fx(lambda x: aten.full([x.shape[0] + 1], 0.0, device=x.device), tracing_mode="symbolic")(
        torch.empty(4)
    ).graph
    found = {str(node.target): device_of(node) for node in graph.nodes if node.op == "call_function"}
    assert found["aten.sym_size.int"] == CPU
    assert found["<built-in function add>"] == CPU
