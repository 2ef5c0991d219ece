"""Messages to a worker of `benchmarks.deploy`: export a model, and time the file's calls beside those of the live plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torch_hybrid_backend
from torch_hybrid_backend.backend import hybrid
from torch_hybrid_backend.bench.worker import State, Work
from torch_hybrid_backend.measuring.measure import measure

_SECONDS = 3.0  # for each of the calls


@dataclass(frozen=True, slots=True)
class Export:
    """Message: export the model."""

    work: Work
    file: Path

    def answer(self, _state: State) -> None:
        model, inputs = self.work.build()
        torch_hybrid_backend.export(model, inputs.args, self.file, kwargs=inputs.kwargs)


@dataclass(frozen=True, slots=True)
class BesideLive:
    """Message: time a file's calls in turns with those of the live plan, without guards, and of the compiled module. Answer: both ratios."""

    work: Work
    file: Path

    def answer(self, _state: State) -> dict[str, float]:
        model, inputs = self.work.build()
        loaded = torch_hybrid_backend.load(self.file)
        calls: list[Callable[[], object]] = [lambda: loaded(*inputs.args), *_live(model, inputs.args)]
        for call in calls:
            call()
        ours, live, compiled = (timing.median_us for timing in measure(calls, _SECONDS * len(calls)))
        return {"live_ratio": ours / live, "compiled_ratio": ours / compiled}


def _live(model: Any, inputs: tuple[Any, ...]) -> list[Callable[[], object]]:
    """The graph of a compiled model without Dynamo's guards around it, and the compiled model."""
    graphs: list[tuple[Callable[..., Any], list[Any]]] = []

    def backend(gm: Any, example_inputs: Any) -> Callable[..., Any]:
        compiled = hybrid(gm, example_inputs, options={"prefer_kernels": True})

        def called(*given: Any) -> Any:
            graphs[:] = [(compiled, list(given))]
            return compiled(*given)

        return called

    torch.compile(model, backend=backend, dynamic=False)(*inputs)
    (graph, given) = graphs[0]
    torch.compiler.reset()
    whole = torch.compile(model, backend="hybrid", dynamic=False, options={"prefer_kernels": True})
    return [lambda: graph(*given), lambda: whole(*inputs)]
