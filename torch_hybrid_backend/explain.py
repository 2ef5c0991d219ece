"""explain(): compile a model, call it once, and tell where every operator runs and why."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.plan import Plan
from torch_hybrid_backend.report import Explanation


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, object] | None = None, **kwargs: Any
) -> Explanation:
    """The plans of every graph that `model(*args, **kwargs)` compiles, in order.

    The model is compiled anew (earlier compilations of it stay valid) and called once, in the caller's grad mode; under grad mode
    only the forward graph is compiled by the call, as nothing calls backward. `options` as for `torch.compile`. The result
    prints as text; `to_json()` and `to_html()` give the other forms.

        with torch.no_grad():
            print(torch_hybrid_backend.explain(model, x))
    """
    config = Config.from_env(os.environ).with_options(options, None)
    plans: list[Plan] = []
    # Dynamo recognises a compilation by its backend object: a new partial is a new compilation.
    backend = functools.partial(compile_graph, config=config, on_plan=plans.append)
    torch.compile(model, backend=backend)(*args, **kwargs)
    return Explanation(tuple(plans))
