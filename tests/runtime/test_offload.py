"""Weights in a file instead of in memory: contents, aliases, writes, and that plans go on."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_hybrid_backend.runtime.native.ops import watches_writes
from torch_hybrid_backend.runtime.offload import OffloadedWeights, offload, pages_of

_MIB = 1 << 20


def _resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory that are in RAM."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    page = os.sysconf("SC_PAGE_SIZE")
    first, last = begin // page, -(-end // page)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * 8)
        entries = pages.read((last - first) * 8)
    present = sum(entries[at + 7] >> 7 for at in range(0, len(entries), 8))
    return present * page


def test_memory_is_freed_and_contents_stay(tmp_path: Path) -> None:
    """An offloaded tensor takes no memory, has its address and contents, and is in memory again once it is read."""
    tensor = torch.randn(1000, 1000)
    copy, address = tensor.clone(), tensor.data_ptr()
    moved = offload([tensor], tmp_path)
    moved.page_out()
    assert tensor.nbytes - 2 * os.sysconf("SC_PAGE_SIZE") <= moved.size_bytes <= tensor.nbytes
    assert _resident(tensor) < 0.1 * tensor.nbytes
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, copy)
    assert _resident(tensor) > 0.9 * tensor.nbytes
    moved.page_out()
    assert _resident(tensor) < 0.1 * tensor.nbytes
    assert not list(tmp_path.iterdir())  # the file has no name


def test_writes_outlive_page_out(tmp_path: Path) -> None:
    """Writes to an offloaded tensor, through it or an alias, are never lost."""
    tensor = torch.zeros(512, 512)
    array, view = tensor.numpy(), tensor[100:200]
    moved = offload([tensor, view], tmp_path)
    tensor[3, 5], array[100, 7], view[99, 511] = 1, 2, 3
    moved.page_out()
    assert (tensor[3, 5], tensor[100, 7], tensor[199, 511]) == (1, 2, 3)
    assert tensor.sum() == 6
    assert array.sum() == 6


@pytest.mark.parametrize("wrong", ["small", "shared", "empty", "sparse"])
def test_some_tensors_stay(wrong: str) -> None:
    """Small, shared, empty and sparse tensors stay in memory."""
    tensor = {
        "small": lambda: torch.randn(1000),
        "shared": lambda: torch.randn(1000, 1000).share_memory_(),
        "empty": lambda: torch.randn(0, 1000),
        "sparse": lambda: torch.eye(1000).to_sparse(),
    }[wrong]()
    assert pages_of([tensor]) == []


def test_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a place for the file weights stay in memory, and one warning says why."""
    tensor = torch.ones(500, 500)
    with caplog.at_level(logging.WARNING):
        assert offload([tensor], tmp_path / "missing") == OffloadedWeights(())
    assert "weights stay in memory" in caplog.text
    assert tensor.sum() == 250_000


def test_tensors_that_change_meanwhile(tmp_path: Path) -> None:
    """Nothing is moved if somebody wrote to the tensors while the file was written."""
    tensor = torch.ones(500, 500)
    assert offload([tensor], tmp_path, lambda: False).pages == ()


def test_memory_outlives_its_tensor(tmp_path: Path) -> None:
    """Memory of a tensor that died is ordinary memory, and is not paged out."""
    tensor = torch.randn(300, 300)
    moved = offload([tensor], tmp_path)
    del tensor
    gc.collect()
    others = [torch.full((300, 300), number) for number in range(8)]
    moved.page_out()
    assert [int(other.sum()) for other in others] == [90_000 * number for number in range(8)]


class _Net(nn.Module):
    """Convolutions, of which two share a weight, and a linear layer."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.middle = nn.Conv2d(64, 64, 3, padding=1)
        self.again = nn.Conv2d(64, 64, 3, padding=1)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(64, 10)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.middle(torch.relu(self.norm(self.first(x)))))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(torch.relu(self.again(x)).mean((2, 3)))


@pytest.fixture
def net() -> Iterator[_Net]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield _Net().eval()
    torch.compiler.reset()


def _compiled(net: nn.Module) -> nn.Module:
    options = {"offload_weights": True, "placement": "estimate", "strict": True, "progress": False}
    return torch.compile(net, backend="hybrid", options=options, dynamic=False)


def _check(net: nn.Module, fast: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)


needs_watch = pytest.mark.skipif(not watches_writes(), reason="this system cannot tell which pages were written to")


@needs_watch
@torch.no_grad()
@pytest.mark.parametrize("breaks", [False, True])
def test_models(net: _Net, breaks: bool) -> None:
    """A model's packed weights leave memory; calls at other sizes, eager calls, state_dict and changes of weights work as without it."""
    net.breaks = breaks
    fast, x = _compiled(net), torch.randn(2, 16, 8, 8)
    expected = net(x)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    result = fast(x)
    assert _resident(net.middle.weight) < 0.1 * net.middle.weight.nbytes
    fast(x)
    assert _resident(net.middle.weight) < 0.1 * net.middle.weight.nbytes  # calls do not read it
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    _check(net, fast, torch.randn(3, 16, 12, 12))
    net.middle.weight.data[3, 5] += 10  # no version counter tells of it
    _check(net, fast, x)
    net.middle.weight.mul_(0.5)
    _check(net, fast, x)
    net.load_state_dict(state)
    torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)


@needs_watch
def test_training_graphs_keep_their_weights(net: _Net) -> None:
    """Weights of graphs for training stay in memory."""
    net.train()
    fast = _compiled(net)
    fast(torch.randn(2, 16, 8, 8)).sum().backward()
    assert _resident(net.middle.weight) > 0.9 * net.middle.weight.nbytes


def test_memory_that_is_shared_stays(tmp_path: Path) -> None:
    """Writes to a tensor over a mapped file still reach the file."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(_MIB))
    tensor = torch.from_file(str(path), shared=True, size=_MIB // 4)
    assert not offload([tensor], tmp_path).pages
    tensor.fill_(1.0)
    assert path.read_bytes()[:4] == b"\0\0\x80?"
