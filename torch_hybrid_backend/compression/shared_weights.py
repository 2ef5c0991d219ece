"""Pruned and shared weights: models whose weights have few distinct values, stored as indices into a small table.

Source: Han, Mao, Dally, "Deep Compression", ICLR 2016. docs/adr/0038-compressed-weights.md says how clusters and pruned weights are chosen.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import parametrize

from torch_hybrid_backend.arguments import check_module
from torch_hybrid_backend.compression.clusters import Floats, k_means, nearest
from torch_hybrid_backend.errors import ArgumentError, HybridError

Model = TypeVar("Model", bound=nn.Module)

FOUR_BIT_CLUSTERS = 16  # indices of more clusters take a byte each
_MOST_CLUSTERS = 256
# Smaller parameters are at most a percent of a model, with biases and scales of norms. A table would use up much of the gain.
_SMALLEST = 1024
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class SharedWeight(nn.Module):
    """Parametrization of a weight (torch.nn.utils.parametrize): it looks up the weight's elements in a table of values, by indices of clusters.

    indices: uint8, (shape[0], columns). Up to 16 clusters, a byte holds two indices of four bits, the lower bits first: columns =
    ceil(prod(shape[1:]) / 2), with zero behind the end of an odd row. With more clusters, a byte holds one index: columns = prod(shape[1:]).

    forward: table (clusters,), floating -> weight of `shape` and the table's dtype. The table is the parameter of the parametrized module. Its
    gradient is the sum over each cluster's weights, with which the paper fine-tunes.
    """

    indices: torch.Tensor

    def __init__(self, indices: torch.Tensor, shape: torch.Size, clusters: int) -> None:
        super().__init__()
        self.register_buffer("indices", indices)
        self.shape = shape
        self.is_packed = clusters <= FOUR_BIT_CLUSTERS

    def forward(self, table: torch.Tensor) -> torch.Tensor:
        index = self.indices
        if self.is_packed:
            index = torch.stack((index & 15, index >> 4), dim=-1).flatten(1)[:, : self.shape[1:].numel()]
        # `table[index]` takes three times as long (95 instead of 30 ms for 2.4 million weights).
        return table.index_select(0, index.to(torch.int32).reshape(-1)).view(self.shape)


def compress(
    model: Model, *, sparsity: float | None = None, clusters: int | None = None, exclude: Sequence[str] = ()
) -> Model:
    """Copy `model` with pruned weights, shared weights, or both. The copy has the same class and methods, and calls take and return the same.

    sparsity: the share of all elements to set to 0, between 0 and 1: those of the least magnitude, on a scale common to all weights. Each
    weight keeps its largest element. Without `clusters`, weights stay ordinary parameters, of which `save_compressed` makes a smaller file.
    clusters: the most values of each weight, 2 to 256, chosen by k-means, with 0 among them if elements are pruned. The values are a table, a
    parameter. Indices are a buffer, with 4 bits for each element up to 16 clusters, else 8 (`SharedWeight`).
    exclude: names of parameters that stay unchanged, such as "classifier.weight". `*` matches anything (`*.0.*`). The name of a module stands
    for all parameters in it.

    Weights are the parameters of float64, float32, bfloat16 or float16 with at least two dimensions and 1,024 elements. Tied weights stay tied.
    Weights that are parametrized already, and members of a ParameterList or ParameterDict, stay unchanged. Later changes of `model` do not
    change the copy. Compiled code sees changes of the copy's tables and indices, as of any parameter.

    Raises HybridError for a weight with NaN or infinity, and for a model without weights; ArgumentError for numbers out of range, an exclusion
    that matches nothing, and a `model` that is no module.
    """
    check_module(model, "compress")
    if sparsity is None and clusters is None:
        raise ArgumentError("nothing to do: give sparsity (between 0 and 1), clusters (2 to 256), or both")
    if sparsity is not None and not 0 < sparsity < 1:
        raise ArgumentError(f"sparsity={sparsity!r}: must be a share between 0 and 1, both excluded")
    if clusters is not None and not (isinstance(clusters, int) and 2 <= clusters <= _MOST_CLUSTERS):
        raise ArgumentError(f"clusters={clusters!r}: must be a whole number of 2 to {_MOST_CLUSTERS}")
    model = copy.deepcopy(model)
    weights = _weights(model, _matching(exclude, [name for name, _ in model.named_parameters(remove_duplicate=False)]))
    if not weights:
        raise HybridError(
            f"there is no weight to compress: a parameter of {', '.join(map(str, _DTYPES))}, at least 2 dimensions and {_SMALLEST} elements,"
            " not excluded"
        )
    for weight, places in weights:
        if not bool(torch.isfinite(weight).all()):
            raise HybridError(f"the weight {places[0].name} has NaN or infinity: mend it, or name it in `exclude`")
    pruned = [] if sparsity is None else _pruned([weight for weight, _ in weights], sparsity)
    for (weight, places), zero in itertools.zip_longest(weights, pruned):
        if clusters is None:
            weight.data = weight.data.masked_fill(torch.from_numpy(zero).view(weight.shape).to(weight.device), 0)
        else:
            table, indices = _shared(_values(weight), zero, clusters)
            shared = SharedWeight(
                _packed(torch.from_numpy(indices).view(weight.shape[0], -1), clusters), weight.shape, clusters
            )
            _install(places, shared, torch.from_numpy(table), weight)
    return model


def restore_form(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make those weights of `model` shared weights that are shared in `tensors`, the state of a compressed model of the same kind.

    Values are not copied. Raises HybridError if indices and table do not have the sizes of the model's weight, or an index is beyond the table.
    """
    by_name = {place.name: places for places in _places(model).values() for place in places}
    done: set[str] = set()
    for key, indices in tensors.items():
        name = weight_name(key)
        if not key.endswith(".0.indices") or name == key or name not in by_name or name in done:
            continue
        places = by_name[name]
        weight = getattr(places[0].module, places[0].attribute)
        table = tensors.get(key.removesuffix("0.indices") + "original")
        if table is None or not _fits(indices, table, weight):
            raise HybridError(
                f"{name}: the tensors under {key!r} are no shared weight of the shape {tuple(weight.shape)}"
            )
        shared = SharedWeight(torch.empty_like(indices), weight.shape, len(table))
        _install(places, shared, torch.empty_like(table), weight)
        done.update(place.name for place in places)


def weight_name(key: str) -> str:
    """The name of the weight whose table or indices have this key in a module's state; for any other key, the key itself."""
    found = _SHARED.fullmatch(key)
    return f"{found['module'] or ''}{found['attribute']}" if found else key


_SHARED = re.compile(r"(?P<module>.+\.)?parametrizations\.(?P<attribute>[^.]+)\.(0\.indices|original)")


def _fits(indices: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> bool:
    if table.dim() != 1 or not 0 < len(table) <= _MOST_CLUSTERS or not table.is_floating_point() or weight.dim() < 2:
        return False
    columns = weight.shape[1:].numel()
    packed = len(table) <= FOUR_BIT_CLUSTERS
    if indices.dtype != torch.uint8 or indices.shape != (weight.shape[0], (columns + 1) // 2 if packed else columns):
        return False
    every = torch.maximum(indices & 15, indices >> 4) if packed else indices
    return not every.numel() or int(every.max()) < len(table)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Place of a parameter: its name in the model, its module, and the attribute of the module."""

    name: str
    module: nn.Module
    attribute: str


def _install(places: Sequence[_Place], shared: SharedWeight, table: torch.Tensor, weight: torch.Tensor) -> None:
    """Replace `weight` by a shared weight in all its places: a tied weight has several."""
    parameter = nn.Parameter(table.to(weight), weight.requires_grad)
    shared.to(weight.device)
    for place in places:
        if parametrize.is_parametrized(place.module, place.attribute):
            continue  # the same module under another name
        setattr(place.module, place.attribute, parameter)
        # Unsafe: the parametrization returns another shape than the table's.
        parametrize.register_parametrization(place.module, place.attribute, shared, unsafe=True)


def _places(model: nn.Module) -> dict[int, list[_Place]]:
    """All places of each parameter by id. Left out: parametrized weights, and members of a ParameterList or ParameterDict."""
    found: dict[int, list[_Place]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.ParameterList | nn.ParameterDict | parametrize.ParametrizationList):
            continue
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            found.setdefault(id(parameter), []).append(_Place(name, module, attribute))
    return found


def _weights(model: nn.Module, excluded: AbstractSet[str]) -> list[tuple[nn.Parameter, list[_Place]]]:
    """The weights to compress with their places. A tied weight is excluded if one of its names is."""
    places = _places(model)
    return [
        (parameter, places[id(parameter)])
        for parameter in model.parameters()
        if id(parameter) in places
        and parameter.dtype in _DTYPES
        and parameter.dim() >= 2
        and parameter.numel() >= _SMALLEST
        and excluded.isdisjoint(place.name for place in places[id(parameter)])
    ]


def _matching(patterns: Sequence[str], names: Sequence[str]) -> AbstractSet[str]:
    """The names that match a pattern, or lie in a module that does. Raises ArgumentError for a pattern that matches nothing."""
    if isinstance(patterns, str):
        raise ArgumentError(f"exclude={patterns!r}: must be a list or tuple of names")
    matching: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern) + fnmatch.filter(names, f"{pattern}.*")
        if not found:
            modules = {name.rpartition(".")[0] for name in names} - {""}
            near = difflib.get_close_matches(pattern, [*names, *modules], n=3, cutoff=0.5) or list(names)[:3]
            raise ArgumentError(f"nothing is named as {pattern!r} in `exclude`; near names: {', '.join(near)}")
        matching.update(found)
    return matching


def _values(weight: torch.Tensor) -> Floats:
    values: Floats = weight.detach().to("cpu", torch.float64).numpy().ravel()
    return values


def _pruned(weights: Sequence[torch.Tensor], sparsity: float) -> list[NDArray[np.bool_]]:
    """Masks of the pruned elements of each weight: the share `sparsity` of all elements, those with the lowest scores.

    The score of an element is its square, divided by the sum of all squares in its weight that are not smaller (layer-adaptive magnitude-based
    pruning: Lee et al., ICLR 2021). Scores put the magnitudes of layers on one scale. Each weight keeps its largest element.
    """
    scores = [_scores(_values(weight)) for weight in weights]
    sizes = [len(score) for score in scores]
    every = np.concatenate(scores)
    # The largest element of a weight has exactly the score 1, unless the weight is all zero; any other score is at most a half.
    count = min(round(sparsity * len(every)), len(every) - int(np.count_nonzero(every == 1)))
    pruned = np.zeros(len(every), dtype=np.bool_)
    pruned[np.argpartition(every, count - 1)[:count]] = True
    return np.split(pruned, np.cumsum(sizes)[:-1])


def _scores(values: Floats) -> NDArray[np.float32]:
    squares = values * values
    order = np.argsort(squares)
    not_smaller = np.cumsum(squares[order][::-1])[::-1]
    scores = np.zeros(len(values), dtype=np.float32)
    np.divide(squares[order], not_smaller, out=squares, where=not_smaller > 0)
    scores[order] = squares
    return scores


def _shared(values: Floats, pruned: NDArray[np.bool_] | None, clusters: int) -> tuple[Floats, NDArray[np.uint8]]:
    """The table (clusters,), and the index of each value. If elements are pruned, or many are zero, the first entry of the table is 0."""
    zero = values == 0
    keeps_zero = pruned is not None or np.count_nonzero(zero) * clusters >= len(values)
    zero = zero | pruned if pruned is not None else zero & keeps_zero
    first = int(keeps_zero)  # the first index of the other values
    rest = values[~zero]
    centres = k_means(rest, clusters - first) if len(rest) else rest
    indices = np.zeros(len(values), dtype=np.uint8)
    indices[~zero] = nearest(rest, centres) + first
    table = np.zeros(clusters)
    table[first : first + len(centres)] = centres
    return table, indices


def _packed(indices: torch.Tensor, clusters: int) -> torch.Tensor:
    """Pack uint8 indices (rows, columns) as `SharedWeight` has them."""
    if clusters > FOUR_BIT_CLUSTERS:
        return indices
    padded = nn.functional.pad(indices, (0, indices.shape[1] % 2))
    return padded[:, ::2] | padded[:, 1::2] << 4
