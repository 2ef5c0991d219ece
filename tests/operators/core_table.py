"""The table of Core ATen operators in docs/operators.md: what the CPU engine does with each.

    python -m tests.operators.core_table docs/operators.md      # rewrites the table between its markers

PyTorch's own table of operators (`op_db`) is traced as capture traces it, and the engine is asked about each operator. Nothing is run.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from tests.operators import opinfos
from tests.operators.tasks import LONG, Task, spread
from tools.generated import replaced, rewrite
from torch_hybrid_backend.capture.decompositions import decomposition_table, whole_upsampling
from torch_hybrid_backend.core.deadline import Deadline
from torch_hybrid_backend.core.engine import EngineBase
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Refused, Verdict
from torch_hybrid_backend.engines.cpu.policy import POLICY
from torch_hybrid_backend.graph.operator_calls import why_python
from torch_hybrid_backend.loops.lowering import supports, table
from torch_hybrid_backend.partition.capability import capability
from torch_hybrid_backend.torch_private import OpOverload

START, END = "<!-- operators:start -->", "<!-- operators:end -->"
# Samples of each operator and dtype; more tell nothing new of Core ATen.
SAMPLES = {"float32": 3, "int64": 1}


_SIZES = frozenset(
    (
        torch.ops.aten.sym_size.int,
        torch.ops.aten.sym_stride.int,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.sym_storage_offset.default,
        torch.ops.aten.sym_is_contiguous.default,
    )
)
_MOST_SENTENCES = 4
_EMPTY = "a tensor has no elements"


class _Cpu(EngineBase):
    """The CPU engine as far as it judges operators."""

    name = "tvm"
    draws = True

    def supports(self, node: torch.fx.Node) -> Verdict:
        return supports(node, POLICY.abilities)

    def compile(self, regions: Sequence[Region], deadline: Deadline) -> Sequence[Exception]:
        raise NotImplementedError


@dataclass(slots=True)
class Forms:
    """Forms of an operator that the samples have: how many the engine takes; its refusals of others, by code and sentence; how many of
    these the plan calls PyTorch's operator for. Forms without elements do not count."""

    taken: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    called: int = 0


def core_operators() -> list[OpOverload]:
    """Every overload that PyTorch tags as Core ATen, by name."""
    names = (name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    overloads = (_overload(*name.partition(".")[::2]) for name in names)
    core = {overload for overload in overloads if overload is not None and torch.Tag.core in overload.tags}
    return sorted(core, key=str)


def _overload(name: str, overload: str) -> OpOverload | None:
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload or "default", None)


def forms(pattern: str = ".*") -> dict[object, Forms]:
    """The forms of each operator in the graphs of PyTorch's table, or of those in it whose names match `pattern` entirely."""
    found: dict[object, Forms] = defaultdict(Forms)
    for kind, limit in SAMPLES.items():
        for name in opinfos.table():
            task = Task(name, kind)
            if name in LONG or not re.fullmatch(pattern, name) or not opinfos.supported(task):
                continue  # hundreds of samples, of operators that others have too
            samples = opinfos.samples(task)
            for position in spread(len(samples), limit):
                nodes = list(_traced(samples[position]))
                for node, (verdict,) in capability(nodes, [_Cpu()], strict=True).items():
                    _count(found[node.target], node, verdict)
    return found


def _count(of: Forms, node: torch.fx.Node, verdict: Verdict) -> None:
    if not isinstance(verdict, Refused):
        of.taken += 1
    elif verdict.why != _EMPTY:  # nothing to compute
        of.refused[verdict.code.value, verdict.why] += 1
        of.called += not why_python(node, draws=True)


def _traced(sample: Any) -> Iterator[torch.fx.Node]:
    leaves, structure = torch.utils._pytree.tree_flatten(sample.arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def run(*given: torch.Tensor) -> object:
        rest = iter(given)
        first, args, named = torch.utils._pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )
        return sample.subject.call(first, args, named)

    try:
        with warnings.catch_warnings(), whole_upsampling(), torch.no_grad():
            warnings.simplefilter("ignore")
            traced = make_fx(functionalize(run), decomposition_table(frozenset()), tracing_mode="fake")(*tensors)
    except Exception:  # what cannot be traced so tells nothing
        return
    yield from (node for node in traced.graph.nodes if isinstance(node.target, OpOverload))


def operator_table(found: Mapping[object, Forms]) -> str:
    """A row for each Core ATen operator."""
    lines = ["| operator | the engine | forms | of the others the plan calls | because |", "|---|---|---:|---:|---|"]
    for operator in core_operators():
        of = found.get(operator, Forms())
        refused = sum(of.refused.values())
        count = of.taken + refused
        sentences = Counter[tuple[str, str]]()
        for (code, why), times in of.refused.items():
            sentences[code, re.sub(r"\b\d+\b|\(\[u.*?\)", "N", why)] += times
        why = "; ".join(f"`{code}`: {sentence}" for (code, sentence), _ in sentences.most_common(_MOST_SENTENCES))
        cells = (
            f"`{operator}`",
            what(operator, of),
            f"{of.taken} of {count}" if count else "",
            f"{of.called} of {refused}" if refused else "",
            why.replace("|", "\\|"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def what(operator: OpOverload, of: Forms) -> str:
    """The treatment of an operator by the engine, in a word or two."""
    if operator in _SIZES:
        return "a size, known to the plan"
    if operator._schema.is_mutable:
        return "written as a function at capture"
    if operator in decomposition_table(frozenset()) and not of.taken:
        return "decomposed at capture"
    return "kernel" if operator in table() and (of.taken or not of.refused) else "PyTorch's operator"


if __name__ == "__main__":
    rewrite(sys.argv[1:], lambda text: replaced(text, START, END, operator_table(forms())))
