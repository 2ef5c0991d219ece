"""Training on several ranks, compiled beside eager: the time of a step, over gloo on one machine.

    python -m benchmarks.distributed --ways data,fsdp,tensor --world 2,4 --out build/distributed.json

Each rank trains one model twice in turns, compiled and in eager, on equal batches. The ranks share the machine's cores; a rank has one thread
unless --threads says more. tests/ecosystem/test_training_ranks.py trains the same models, small, and compares losses and parameters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parents[1]
RATE = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the model, and of a rank's batch."""

    width: int
    heads: int
    hidden: int
    layers: int
    batch: int
    tokens: int


SMALL = Size(width=32, heads=4, hidden=64, layers=2, batch=2, tokens=8)
FULL = Size(width=512, heads=8, hidden=1408, layers=4, batch=4, tokens=128)


class Attention(nn.Module):
    """Llama's attention: rotary positions, causal. The number of heads follows from the weights, which ranks may share."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.each = size.width // size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(size.tokens), 1e4 ** -(torch.arange(0, self.each, 2) / self.each))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin


class Block(nn.Module):
    """A block of Llama's. `is_checkpointed`: its activations are computed again in the backward."""

    def __init__(self, size: Size, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            return checkpoint(self._computed, x, use_reentrant=False)
        return self._computed(x)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Some blocks, with equal weights on all ranks."""

    def __init__(self, size: Size, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(size, is_checkpointed=is_checkpointed) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# A way of sharing the work: makes the model, and what is called, of sizes and the backend (None: eager).
Way = Callable[[Size, str | None], tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]


def _compiled(model: Any, backend: str | None) -> Any:
    return model if backend is None else torch.compile(model, backend=backend)


def data(size: Size, backend: str | None) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """DistributedDataParallel, with buckets of 1 MiB."""
    model = Model(size)
    return model, _compiled(DistributedDataParallel(model, bucket_cap_mb=1), backend)


def checkpointed(size: Size, backend: str | None) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """DistributedDataParallel with activation checkpointing: each block is compiled by itself, with its checkpoint."""
    model = Model(size, is_checkpointed=True)
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend)
    return model, DistributedDataParallel(model)


def fsdp(size: Size, backend: str | None) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """FSDP2: each block compiled and sharded."""
    model = Model(size)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        if backend is not None:
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def tensor(size: Size, backend: str | None) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Tensor parallelism: each rank has some heads of the attention, and some of the hidden features."""
    model = Model(size)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    columns, rows = ("attention.q", "attention.k", "attention.v", "gate", "up"), ("attention.o", "down")
    plan: dict[str, Any] = {**dict.fromkeys(columns, ColwiseParallel()), **dict.fromkeys(rows, RowwiseParallel())}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model, _compiled(model, backend)


WAYS: dict[str, Way] = {"data": data, "checkpointed": checkpointed, "fsdp": fsdp, "tensor": tensor}


class Training:
    """A model that is trained step by step, on batches that depend on the step, and on the rank unless all ranks compute one model."""

    def __init__(self, way: str, size: Size, backend: str | None) -> None:
        self.model, self._call = WAYS[way](size, backend)
        self._size = size
        self._seed = 0 if way == "tensor" else 1000 * torch.distributed.get_rank()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self._step = 0

    def step(self) -> float:
        """Train a step; return its loss."""
        generator = torch.Generator().manual_seed(self._seed + self._step)
        x, wanted = torch.randn(2, self._size.batch, self._size.tokens, self._size.width, generator=generator)
        self._optimizer.zero_grad()
        loss = (self._call(x) - wanted).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._step += 1
        return loss.item()

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole copies of the parameters."""
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each way with each number of ranks, write the file, print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--world", default="2,4", help="numbers of ranks")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--backends", default="hybrid", help="beside eager: hybrid, inductor")
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed of each")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "distributed.json")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    from benchmarks import machine

    record: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "results": []}
    for way in arguments.ways.split(","):
        for world in map(int, arguments.world.split(",")):
            record["results"].append({"way": way, "world": world, "ms": _measured(way, world, arguments)})
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(report(record))
    return 0


def report(record: dict[str, Any]) -> str:
    """A row for each way and number of ranks."""
    backends = list(record["results"][0]["ms"])
    lines = ["way | ranks | " + " | ".join(f"{each}, ms a step | eager / {each}" for each in backends), ""]
    lines[1] = "|".join(["---"] * (2 + 2 * len(backends)))
    for row in record["results"]:
        eager = row["ms"]["eager"]
        cells = [f"{row['ms'][each]:.1f} | {eager / row['ms'][each]:.2f}" for each in backends]
        lines.append(f"{row['way']} | {row['world']} | " + " | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def _measured(way: str, world: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a step on the slowest rank, by backend."""
    with tempfile.TemporaryDirectory() as folder:
        given = (way, world, arguments.size, arguments.threads, arguments.backends.split(","), arguments.rounds, folder)
        torch.multiprocessing.spawn(_rank, given, nprocs=world)  # type: ignore[no-untyped-call]
        times = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: max(each[name] for each in times) for name in times[0]}


def _rank(
    rank: int, way: str, world: int, size: str, threads: int, backends: list[str], rounds: int, folder: str
) -> None:
    torch.set_num_threads(threads)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", datetime.timedelta(minutes=10), rank=rank, world_size=world
    )
    sizes = SMALL if size == "small" else FULL
    trainings = {"eager": Training(way, sizes, None), **{each: Training(way, sizes, each) for each in backends}}
    for training in trainings.values():
        for _ in range(3):
            training.step()
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for name, training in trainings.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            training.step()
            taken[name].append(time.perf_counter() - start)
    medians = {name: 1e3 * statistics.median(each) for name, each in taken.items()}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(medians))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
