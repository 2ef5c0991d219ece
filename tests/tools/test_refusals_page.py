"""docs/refusals.md explains every refusal code, by what the code really says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_hybrid_backend.core.verdict import Reason, Refused
from torch_hybrid_backend.loops.lowering import supports

aten = torch.ops.aten
PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"
_SECTION = re.compile(
    r"^### `(?P<code>\w+)`\n\n- Meaning: \S.*?\n- Example: `(?P<example>.+)`\n- What to do: \S", re.DOTALL
)


def _examples() -> dict[str, str]:
    sections = re.split(r"^(?=###? )", PAGE.read_text(), flags=re.MULTILINE)
    found = [match for match in map(_SECTION.match, sections) if match]
    assert len(found) == sum(section.startswith("### ") for section in sections), (
        "a code lacks its meaning, example or advice"
    )
    return {match["code"]: match["example"] for match in found}


def test_every_code_has_its_section() -> None:
    """With its meaning, an example and what to do; there is none for a code that does not exist."""
    assert sorted(_examples()) == sorted(Reason), "docs/refusals.md and core/verdict.py have other codes"


@pytest.mark.parametrize(
    ("code", "function", "inputs"),
    [
        (Reason.UNKNOWN_OPERATOR, aten.lgamma.default, (torch.ones(4),)),
        (Reason.LIBRARY, lambda x: aten._fft_r2c.default(x, [0], 0, True), (torch.ones(4),)),
        (Reason.DTYPE, aten.sin.default, (torch.ones(4, dtype=torch.complex64),)),
        (Reason.ARGUMENT, lambda x: aten.upsample_bicubic2d.vec(x, [8, 8], False, None), (torch.ones(1, 1, 4, 4),)),
    ],
)
def test_examples_are_what_refusals_say(
    code: Reason, function: Callable[..., object], inputs: tuple[torch.Tensor, ...]
) -> None:
    """Examples are refused where a small graph shows them."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    verdicts = [supports(node) for node in graph.nodes if node.op == "call_function"]
    said = [verdict.why for verdict in verdicts if isinstance(verdict, Refused) and verdict.code is code]
    assert _examples()[code] in said
