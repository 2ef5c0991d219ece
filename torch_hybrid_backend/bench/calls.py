"""Arguments and results of a model's calls: arguments, batches, and the tensors in both.

inputs = Inputs((image,), {"mask": mask})
outputs = inputs.batched(8).call(model)
tensors(outputs)                                # from a tensor, a tuple, a dict, a dataclass, an output of transformers
model, inputs = as_tensors_only(model, inputs)  # the same model, which takes and returns only tensors
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten


@dataclass(frozen=True, slots=True)
class Inputs:
    """Positional and keyword arguments of a call. Tensors may be nested in tuples, lists and dicts."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def call(self, model: Callable[..., Any]) -> Any:
        """The outputs of `model` for these inputs."""
        return model(*self.args, **self.kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, in the order of the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, torch.Tensor)]

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same arguments, each tensor replaced by `change(tensor)`."""
        args, kwargs = tree_map_only(torch.Tensor, change, (self.args, dict(self.kwargs)))
        return Inputs(args, kwargs)

    def floats(self, dtype: torch.dtype) -> Inputs:
        """The same arguments, with floating-point tensors converted to `dtype`."""
        return self.mapped(lambda value: value.to(dtype) if value.is_floating_point() else value)

    @property
    def batch(self) -> int | None:
        """The common size of dimension 0; None if there is none. Tensors without dimensions, or of size 1 beside larger ones, do not count."""
        sizes = {value.shape[0] for value in self.tensors() if value.ndim}
        sizes = sizes - {1} or sizes
        return next(iter(sizes)) if len(sizes) == 1 else None

    def batched(self, batch: int) -> Inputs:
        """The inputs, repeated or cut to `batch` rows along dimension 0. A tensor with one row stays if others have more: it is broadcast.

        Raises ArgumentError if the inputs have no common size along dimension 0."""
        rows = self.batch
        if rows is None:
            shapes = ", ".join(str(tuple(value.shape)) for value in self.tensors()) or "none"
            raise ArgumentError(
                f"--batch {batch} needs inputs with one size along dimension 0, and their shapes are {shapes}; give the factory a parameter"
                " `batch` and have it return inputs of that size"
            )
        chosen = torch.arange(batch) % rows
        return self.mapped(lambda x: _rows(x, chosen) if x.ndim and x.shape[0] == rows else x)


def _rows(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The chosen rows of `x`, in the memory format of `x`."""
    taken = x.detach().index_select(0, chosen)
    for form, ndim in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if x.ndim == ndim and x.is_contiguous(memory_format=form) and not x.is_contiguous():
            return taken.contiguous(memory_format=form)
    return taken


def tensors(outputs: object) -> list[torch.Tensor]:
    """The tensors in a model's outputs, in a stable order."""
    return list(_tensors(outputs))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for each in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, each.name))


def as_tensors_only(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Wrap a model so that it takes positional tensors and returns a tuple of tensors. Returns the wrapper and its inputs.

    Arguments that are no tensors become constants of the wrapper."""
    leaves, structure = tree_flatten((inputs.args, dict(inputs.kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return _TensorsOnly(model, leaves, structure), Inputs(tuple(given))


class _TensorsOnly(nn.Module):
    """Wrapper that calls a model with `leaves`, in which the wrapper's arguments replace the tensors."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any], structure: TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._structure = structure

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self._constants)
        for place, value in zip(self._places, given, strict=True):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, self._structure)
        return tuple(tensors(self.model(*args, **kwargs)))


class FunctionModule(nn.Module):
    """A function as a module in evaluation mode, for tools that take only modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.eval()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
