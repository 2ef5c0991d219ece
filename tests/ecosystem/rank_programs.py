"""Programs of ranks that tests/ecosystem/test_distributed.py runs: `ranks.run_ranks` calls one function in each process, with the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters as dynamo_counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_hybrid_backend
from benchmarks.distributed import SMALL, Training
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import CompiledRegion, CompiledRegionBase, EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Supported, Verdict
from torch_hybrid_backend.driver import session
from torch_hybrid_backend.driver.hybrid_graph import HybridGraph
from torch_hybrid_backend.ranks import agreement

WORLD, STEPS, RATE = 2, 3, 0.1
TRAINED_STEPS = 20

Gradients = dict[str, torch.Tensor]


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, one below the other."""
    gather = getattr(
        functional, "all_gather_single", functional.all_gather_tensor
    )  # the old name warns since torch 2.13
    return gather(tensor, 0, torch.distributed.group.WORLD)


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    return functional.all_reduce(tensor, "sum", torch.distributed.group.WORLD)


class Gathering(nn.Module):
    """Each rank owns some rows of a matrix; the forward gathers them all."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ all_gather(self.w).t())


class _SlowEngine(EngineBase):
    """Takes every operator, rounds otherwise than eager, and is slower."""

    name = "slow"

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [_SlowRegion(region) for region in regions]


class _SlowRegion(CompiledRegionBase):
    def __init__(self, region: Region) -> None:
        self._region = region

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        time.sleep(0.02)
        exact = self._region.graph_module(*[tensor.double() for tensor in inputs])
        return [output.float() for output in exact]


class Replicated(nn.Module):
    """A product, summed over the ranks, and what each rank computes for itself of the sum."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = nn.Linear(512, 512)
        self.head = nn.Linear(512, 512)
        generator = torch.Generator().manual_seed(rank)
        nn.init.normal_(self.own.weight, generator=generator)
        nn.init.normal_(self.head.weight, generator=torch.Generator().manual_seed(7))
        nn.init.zeros_(self.own.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(all_reduce(self.own(x)).softmax(-1)).log_softmax(-1)


def replicated(rank: int) -> dict[str, Any]:
    """Values that each rank computes of a sum over the ranks, call by call, and in eager."""
    session.ENGINES = (("slow", lambda config, services: _SlowEngine()), *session.ENGINES[-1:])
    model = Replicated(rank)
    fast = torch.compile(model, backend="hybrid")
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(4, 512, generator=generator) for _ in range(4)]
    with torch.no_grad():
        return {"results": [fast(x) for x in inputs], "eager": [model(x) for x in inputs]}


def one_in_eager(rank: int) -> dict[str, Any]:
    """The results of some calls of the chain, which rank 1 runs in eager."""
    agreement.PATIENCE_S = 1.0
    model = Chain()
    run = torch.compile(model, backend="hybrid") if rank == 0 else model
    with torch.no_grad():
        return {"results": [run(x) for x in chain_inputs(rank)]}


def compiled_alone(rank: int) -> dict[str, Any]:
    """The results of four calls with a sum over the ranks; in the third, rank 0 alone has another batch. The seconds of that call."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))

    def summed(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(torch.tanh(x @ weight).sum(0)) @ weight

    fast = torch.compile(summed, backend="hybrid", dynamic=False)
    results, seconds = [], 0.0
    for call in range(4):
        x = torch.full((6 if call == 2 and rank == 0 else 4, 16), float(rank + call))
        start = time.monotonic()
        results.append(fast(x))
        seconds = time.monotonic() - start if call == 2 else seconds
    return {"results": results, "seconds": seconds}


def raising_first_call(rank: int) -> dict[str, Any]:
    """The result of a call and its seconds. On rank 1 the first call raises an error, of which a program may make what it likes, and eager
    answers."""
    model, x = Chain(), chain_inputs(rank)[0]
    fast = torch.compile(model, backend="hybrid")
    start = time.monotonic()
    with torch.no_grad():
        if rank == 0:
            return {"result": fast(x), "seconds": time.monotonic() - start}
        chosen = HybridGraph._assign_and_check

        def fails(*_: object) -> Any:
            raise KeyError("region")

        HybridGraph._assign_and_check = fails  # type: ignore[method-assign]
        try:
            fast(x)
        except KeyError:
            HybridGraph._assign_and_check = chosen  # type: ignore[method-assign]
            return {"result": model(x), "seconds": time.monotonic() - start}
    raise AssertionError("the first call did not raise")


def killed_rank(rank: int) -> dict[str, Any]:
    """The error that ranks get for the one that RANKS_KILLED names, which dies after its first call."""
    fast = torch.compile(Chain(), backend="hybrid")
    x = torch.ones(4, 16)
    with torch.no_grad():
        fast(x)
        if rank == int(os.environ["RANKS_KILLED"]):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(1000):
                fast(x)
        except Exception as raised:
            return {"error": f"{type(raised).__name__}: {raised}"}
    return {"error": ""}


def _trained(way: str, backend: str | None) -> dict[str, Any]:
    training = Training(way, SMALL, backend)
    counter = dynamo_counters["stats"]["unique_graphs"]
    losses = [training.step() for _ in range(TRAINED_STEPS)]
    return {
        "losses": losses,
        "parameters": training.parameters(),
        "graphs": dynamo_counters["stats"]["unique_graphs"] - counter,
    }


def trained(rank: int) -> dict[str, Any]:
    """The losses of some steps, and the parameters after them, compiled and in eager, of the way that RANKS_WAY names."""
    way = os.environ["RANKS_WAY"]
    return {"hybrid": _trained(way, "hybrid"), "eager": _trained(way, None)}


def gathered_parameter(rank: int) -> dict[str, Any]:
    """The results before and after the parameter of rank 0 alone changed, and at the end the parameter."""
    model = Gathering(rank)
    fast = torch.compile(model, backend="hybrid")
    x = torch.ones(4, 16)
    results = []
    with torch.no_grad():
        for call in range(4):
            if call == 2 and rank == 0:
                model.w.mul_(2)
            results.append(fast(x))
    return {"results": results, "w": model.w.detach()}


class Chain(nn.Module):
    """Three collectives. The last waits for no other: cut into as few regions as can be, it could run before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randn(16, 16, generator=torch.Generator().manual_seed(7)) / 4)

    def forward(self, x: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor] = all_reduce) -> torch.Tensor:
        first = reduce(torch.tanh(x @ self.w))
        second = reduce(torch.tanh(first @ self.w))
        third = reduce(torch.sigmoid(x @ self.w + 1))
        return torch.cat([second, third]) @ self.w


def _run_chain(model: Chain, rank: int) -> list[torch.Tensor]:
    fast = torch.compile(model, backend="hybrid")
    with torch.no_grad():
        return [fast(x) for x in chain_inputs(rank)]


def chain_inputs(rank: int) -> list[torch.Tensor]:
    """Inputs that one rank calls the chain with."""
    return [torch.full((4, 16), float(rank + call)) for call in range(4)]


def chain_reference() -> list[list[torch.Tensor]]:
    """The results of each rank's calls: the chain over all ranks' inputs at once, where a reduction sums the ranks' rows."""

    def reduce(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(WORLD, 4, -1).sum(0).repeat(WORLD, 1)

    calls = zip(*(chain_inputs(rank) for rank in range(WORLD)), strict=True)
    results = [Chain()(torch.cat(inputs), reduce) for inputs in calls]
    second_and_third = [result.view(2, WORLD, 4, -1) for result in results]
    return [[parts[:, rank].flatten(0, 1) for parts in second_and_third] for rank in range(WORLD)]


def chain(rank: int) -> dict[str, Any]:
    """The results of some calls, and who runs the operators."""
    model = Chain()
    results = _run_chain(model, rank)
    with torch.no_grad():
        (plan,) = torch_hybrid_backend.explain(model, chain_inputs(rank)[0]).plans
    return {"results": results, "engines": {node.engine for node in plan.nodes}}


class _FailingEngine(EngineBase):
    """Takes every operator; on rank 0 each of its regions raises in its third call."""

    name = "failing"

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.failed = 0

    def supports(self, node: torch.fx.Node) -> Verdict:
        return Supported()

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> list[CompiledRegion | Exception]:
        return [_FailingRegion(self, region, 3 if self._rank == 0 else 0) for region in regions]


class _FailingRegion(CompiledRegionBase):
    def __init__(self, engine: _FailingEngine, region: Region, fails_in: int) -> None:
        self._engine, self._region, self._calls_left = engine, region, fails_in

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._engine.failed += 1
            raise ValueError("the engine's third call fails")
        return [output.clone() for output in self._region.graph_module(*inputs)]


def failing_regions(rank: int) -> dict[str, Any]:
    """The results of some calls, in whose third the regions of rank 0 fail; the error that ended them; how many regions failed."""
    engine = _FailingEngine(rank)
    session.ENGINES = (("failing", lambda config, services: engine), *session.ENGINES[-1:])
    results: list[torch.Tensor] = []
    error = ""
    try:
        results = _run_chain(Chain(), rank)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"results": results, "error": error, "failed": engine.failed}


def _overlapping(x: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    """Collectives that are waited for late, through views, as lists and in given memory, with products between."""
    c10d = torch.ops._c10d_functional
    reduced = c10d.all_reduce(x.t() @ x, "sum", group)
    flat = reduced.view(-1)
    scattered = c10d.reduce_scatter_tensor(torch.tanh(x @ x), "sum", WORLD, group)
    gathered = c10d.all_gather_into_tensor_coalesced([x.sin(), x @ x], WORLD, group)
    middle = torch.tanh(c10d.wait_tensor(scattered) @ x)
    given = torch.empty_like(x)
    filled = c10d.all_gather_into_tensor_out(middle, WORLD, group, out=given)
    rest = [c10d.wait_tensor(value) + 1 for value in (*gathered, filled)]
    return c10d.wait_tensor(flat), *rest


def overlapping(rank: int) -> dict[str, Any]:
    """The results of some calls in eager and compiled, by an engine that takes whatever it is offered."""
    session.ENGINES = (("failing", lambda config, services: _FailingEngine(rank=-1)), *session.ENGINES[-1:])
    group = torch.distributed.group.WORLD.group_name
    fast = torch.compile(_overlapping, backend="hybrid")
    generator = torch.Generator().manual_seed(rank)
    # Large enough to be in flight for a while.
    inputs = [torch.randn(512, 512, generator=generator) for _ in range(3)]
    with torch.no_grad():
        return {"results": [fast(x, group) for x in inputs], "expected": [_overlapping(x, group) for x in inputs]}


def one_by_one(rank: int) -> dict[str, Any]:
    """The results of programs that need no settings of their own, by name. Starting processes takes most of their time."""
    found = {}
    for program in (gathered_parameter, failing_regions, overlapping):
        torch.compiler.reset()
        session._sessions.clear()  # the next program has engines of its own
        found[program.__name__] = program(rank)
    return found


def _train(
    model: nn.Module, fast: Callable[..., torch.Tensor], batches: list[torch.Tensor], gradients: Callable[[], Gradients]
) -> list[Gradients]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    history = []
    for x in batches:
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        history.append(gradients())
        optimizer.step()
    return history


def gradients_of(model: nn.Module) -> Gradients:
    """Copies of the whole gradients, by parameter."""
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
    }


def batches(rank: int) -> list[torch.Tensor]:
    """Batches that one rank trains on."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 24, generator=generator) for _ in range(STEPS)]


class Network(nn.Module):
    """Layers large enough to fill DDP's buckets of 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 512), nn.LayerNorm(512))
        self.middle = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU())
        self.last = nn.Linear(512, 5)

    # Its own code, not nn.Sequential's: DDP's forward breaks the graph, and Dynamo begins anew with the user's code only.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def network() -> nn.Module:
    """The same weights on each call."""
    torch.manual_seed(0)
    return Network()


def data_parallel(rank: int) -> dict[str, Any]:
    """The gradients of every step, and how many graphs DDPOptimizer cut: at the borders of the buckets, so that gradients travel early."""
    model = network()
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=counter)
    history = _train(model, fast, batches(rank), lambda: gradients_of(model))
    return {"gradients": history, "graphs": counter.frame_count}


class Block(nn.Module):
    """The two layers of a transformer's feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    """The same weights on each call."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def fully_sharded(rank: int) -> dict[str, Any]:
    """FSDP2, each block sharded and compiled by itself: the gradients of every step, and how many graphs were compiled."""
    model = blocks()
    mesh = init_device_mesh("cpu", (WORLD,))
    counter = CompileCounterWithBackend("hybrid")
    for block in model:
        fully_shard(block, mesh=mesh)
        block.compile(backend=counter)
    fully_shard(model, mesh=mesh)
    history = _train(model, model, batches(rank), lambda: gradients_of(model))
    return {"gradients": history, "graphs": counter.frame_count}


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Each rank holds half of the rows of `up` and of the columns of `down`: the gradients of every step, an inference, and how many graphs
    were compiled."""
    model = blocks()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    counter = CompileCounterWithBackend("hybrid")
    fast = torch.compile(model, backend=counter)
    history = _train(model, fast, batches(0), lambda: gradients_of(model))
    with torch.no_grad():
        inference = [fast(x) for x in batches(0)]
    return {"gradients": history, "inference": inference, "graphs": counter.frame_count}
