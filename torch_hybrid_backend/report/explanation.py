"""The result of `explain()`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_hybrid_backend.core.engine import CompiledRegion, KernelText
from torch_hybrid_backend.core.plan import GraphBreak, Plan
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.report.html import render_html
from torch_hybrid_backend.report.model_explorer import render_model_explorer
from torch_hybrid_backend.report.share import counted, graph_break_in_words
from torch_hybrid_backend.report.text import render_text


def render_json(plans: Sequence[Plan]) -> str:
    """The plans as a JSON object `{"plans": [...]}` of stable order. `Plan.from_json` reads an element of the list."""
    return _json({"plans": _plain(plans)})


def _plain(plans: Sequence[Plan]) -> list[object]:
    return [json.loads(plan.to_json()) for plan in plans]


def _json(told: Mapping[str, object]) -> str:
    return json.dumps(told, indent=2, sort_keys=True)


def _breaks_in_words(breaks: Sequence[GraphBreak]) -> str:
    lines = [f"{counted(len(breaks), 'graph break')}, where Dynamo leaves the model to Python:"]
    for where, *told in map(graph_break_in_words, breaks):
        lines += [f"  {where}", *(f"    {line}" for line in told)]
    return "\n".join(lines)


def _call_in_words(call_us: float, plans: Sequence[Plan]) -> str:
    """Time of a call of the model, inside and outside of graphs, in words."""
    profiles = [plan.profile for plan in plans if plan.profile is not None and not plan.profile.is_nested]
    inside = sum(profile.call_us for profile in profiles)
    outside = max(0.0, call_us - inside)
    return (
        f"a call of the model takes {time_in_words(call_us)}: {time_in_words(inside)} in {counted(len(profiles), 'graph')}, "
        f"{time_in_words(outside)} outside (guards of Dynamo, AOTAutograd's wrapper, Python between graphs)"
    )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Plans of the graphs that a call compiled, in the order of compilation. Prints as text.

    `compiled`: the compiled regions of each graph, by name and in order. `compiling`: the number of graphs that eager runs while they are
    compiled in the background; these have no plan yet. `call_us`: the median microseconds of a call of the model, if it was profiled.
    `graph_breaks`: places where Dynamo leaves the model to Python. `about`: the head of the page (model, machine, versions, date).
    """

    plans: tuple[Plan, ...]
    compiled: tuple[Mapping[str, CompiledRegion], ...] = field(default=(), compare=False, repr=False)

    compiling: int = 0
    now: Callable[[], Explanation] | None = field(default=None, compare=False, repr=False)
    call_us: float | None = None
    graph_breaks: tuple[GraphBreak, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        measured = [_call_in_words(self.call_us, self.plans)] if self.call_us is not None else []
        meanwhile = ["a graph: eager meanwhile: compiling"] * self.compiling
        breaks = [_breaks_in_words(self.graph_breaks)] if self.graph_breaks else []
        return "\n\n".join(
            [*measured, *breaks, *([render_text(self.plans)] if self.plans or not meanwhile else []), *meanwhile]
        )

    def updated(self) -> Explanation:
        """The explanation as of now, with the plans of graphs compiled meanwhile. `torch_hybrid_backend.wait_for_builds` waits for these."""
        return self if self.now is None else self.now()

    def to_json(self) -> str:
        """A JSON object with `plans`, `graph_breaks`, and `call_us`, which is null if the model was not profiled."""
        breaks = [dataclasses.asdict(found) for found in self.graph_breaks]
        return _json({"plans": _plain(self.plans), "graph_breaks": breaks, "call_us": self.call_us})

    def to_html(self) -> str:
        """A self-contained HTML page: the model as a graph of modules with their times, and tables."""
        return render_html(self.plans, self.about, self.graph_breaks)

    def to_model_explorer(self) -> str:
        """JSON for Model Explorer (`pip install ai-edge-model-explorer`). The name of the file must end with ".json"."""
        return render_model_explorer(self.plans)

    def write_kernels(self, folder: Path) -> list[Path]:
        """Write the text of each kernel to a file: a Triton program as a Python file that runs alone, a kernel of TVM as TIR.

        folder: created if it does not exist. Returns the files. A name begins with the number of the kernel's first call:
        "000_r0_row_softmax_0f3a....py". Raises OSError if a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[KernelText, Path] = {}
        texts = [(region, t) for graph in self.compiled for region, its in graph.items() for t in its.texts()]
        for number, (region, text) in enumerate(texts):
            if text not in written:
                written[text] = folder / f"{number:03}_{region}_{text.name}{text.suffix}"
                written[text].write_text(text.text)
        return list(written.values())
