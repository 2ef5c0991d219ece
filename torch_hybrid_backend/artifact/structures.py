"""Structures of arguments and results (pytrees), as they stand in files."""

from __future__ import annotations

import functools
import json
from typing import Any

from torch_hybrid_backend.torch_private import (
    PYTREE_TYPES_BY_NAME,
    TreeSpec,
    register_pytree_node,
    treespec_loads,
)

_NAME = "torch_hybrid_backend.NamedResults"


class NamedResults(dict[str, Any]):
    """Results by name, also as attributes.

    `LoadedModel` returns them in place of a class that is not known to PyTorch where the file is opened, as that of a model of transformers is
    where nobody has imported transformers.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the results are {', '.join(self)}; there is no {name}") from None


def structure_from_text(text: str, *, of_results: bool = False) -> TreeSpec:
    """The structure that `treespec_dumps` wrote. `of_results`: `NamedResults` stand in for classes with names that are not known here.

    Raises NotImplementedError for another class that is not known.
    """
    if of_results:
        _register()
        protocol, tree = json.loads(text)
        text = json.dumps([protocol, _known(tree)])
    return treespec_loads(text)


def _known(tree: dict[str, Any]) -> dict[str, Any]:
    children = [_known(child) for child in tree["children_spec"]]
    if tree["type"] is None or tree["type"] in PYTREE_TYPES_BY_NAME or not _has_names(tree):
        return {**tree, "children_spec": children}
    return {"type": _NAME, "context": tree["context"], "children_spec": children}


def _has_names(tree: dict[str, Any]) -> bool:
    """True if the context of a node is a list of names, one for each child."""
    try:
        names = json.loads(tree["context"])
    except (TypeError, ValueError):
        return False
    return (
        isinstance(names, list) and len(names) == len(tree["children_spec"]) and all(isinstance(n, str) for n in names)
    )


@functools.cache
def _register() -> None:
    register_pytree_node(
        NamedResults,
        lambda results: (list(results.values()), list(results)),
        lambda values, names: NamedResults(zip(names, values, strict=True)),
        serialized_type_name=_NAME,
    )
