"""CapturedGraph: one functional ATen graph, as capture hands it to the passes and to the wiring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.fx

GraphKind = Literal["inference", "forward", "backward"]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """A functional ATen graph of static meaning.

    `graph_module` takes its placeholders in order and returns a flat tuple of values and literals (None, numbers);
    every placeholder, operator and get_attr tensor carries `meta["val"]` (a fake tensor or a SymInt), and operators
    that stem from the user's code carry `meta["stack_trace"]`. The strides of the outputs' `meta["val"]` are part of
    the contract: the compiled graph must return tensors of exactly those strides (AOTAutograd builds views and
    backward graphs upon them).

    `static_inputs`: names of placeholders that hold parameters or buffers which this graph does not mutate. They keep
    their identity from call to call; their contents may change between calls (an optimizer's step, `load_state_dict`).

    `writes_inputs`: whether a call changes what the user passed or a buffer; the graph only computes what is written. True where unknown.
    """

    graph_module: torch.fx.GraphModule
    kind: GraphKind
    static_inputs: frozenset[str]
    writes_inputs: bool = True
