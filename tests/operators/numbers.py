"""Calls whose numbers are known only at run time: each number of a sample in turn becomes others, small ones, large ones and negative ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

from tests.operators.values import tensors_of

# What an integer and what a float become, one after the other.
_INTEGERS: tuple[Callable[[int], int], ...] = (
    lambda n: n + 1,
    lambda n: -n - 1,
    lambda n: 0,
    lambda n: n + (1 << 31),
    lambda n: -n - (1 << 40),
    lambda n: 1 << 62,
)
_FLOATS: tuple[Callable[[float], float], ...] = (
    lambda x: 1.5 * x + 0.25,
    lambda x: -x,
    lambda x: 0.0,
    lambda x: 1e30,
    lambda x: math.inf,
    lambda x: math.nan,
)
_MAX_NUMBERS = 4  # of a call that are changed
_MAX_ELEMENTS = 1 << 22  # of a result: a size of 2^31 would fill the memory


@dataclasses.dataclass(frozen=True, slots=True)
class Numbered:
    """A call as a function of its tensors and numbers, which Dynamo takes for values known only at run time. Where no number goes in, the last
    tensor's first element takes its place. What comes out is copied: a view of what goes in would be no operator of the graph."""

    function: Callable[..., Any]
    given: Any

    def call(self, *arguments: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, self.function(*arguments)
        )

    @property
    def arguments(self) -> Any:
        leaves, form = tree_flatten(self.given)
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not any(map(_is_number, leaves)) and len(tensors) > 1 and leaves[tensors[-1]].numel():
            leaves[tensors[-1]] = leaves[tensors[-1]].flatten()[0].item()
        return tree_unflatten(leaves, form)

    def variants(self) -> Iterator[tuple[str, Any]]:
        """The arguments, first as they are, then with other numbers, and what was changed, in words."""
        found, form = tree_flatten_with_path(self.arguments)
        names, leaves = [keystr(path) for path, _ in found], [leaf for _, leaf in found]
        is_product = len(tensors_of(leaves)) == 3
        places = [k for k, leaf in enumerate(leaves) if _is_number(leaf)][:_MAX_NUMBERS]
        if not places:
            return
        yield "", tree_unflatten(leaves, form)
        for place in places:
            number = leaves[place]
            for change in _INTEGERS if type(number) is int else _FLOATS:
                changed = [*leaves[:place], change(number), *leaves[place + 1 :]]
                if is_product and names[place].endswith("['alpha']") and changed[place] == math.inf:
                    continue  # MKL's products (addmm) have NaN then, whatever the operands hold, and those of a batch have not
                arguments = tree_unflatten(changed, form)
                if self._is_small(arguments):
                    yield f"with {changed[place]} in place of {number}: ", arguments

    def _is_small(self, arguments: Any) -> bool:
        """True if the results have few elements, as far as can be told without computing them."""
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                leaves, form = tree_flatten(arguments)
                fakes = [mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                results = tensors_of(self.call(*tree_unflatten(fakes, form)))
        except Exception:  # what eager refuses, and what depends on data
            return False
        return all(result.numel() <= _MAX_ELEMENTS for result in results)


def _is_number(leaf: object) -> bool:
    return type(leaf) in (int, float)
