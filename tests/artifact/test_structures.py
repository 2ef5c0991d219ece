"""Structures come back from files, also where their classes are not imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps

from torch_hybrid_backend.artifact.structures import NamedResults, structure_from_text

ROOT = Path(__file__).parents[2]
_UNKNOWN = treespec_dumps(tree_flatten(([1, 2], 3))[1]).replace("builtins.list", "elsewhere.Output")


@dataclass
class Pair:
    """Registered as users do."""

    left: torch.Tensor
    right: torch.Tensor


def test_known_classes_come_back() -> None:
    torch.export.register_dataclass(Pair, serialized_type_name="tests.Pair")
    leaves, structure = tree_flatten({"a": [Pair(torch.ones(1), torch.zeros(1))], "b": None})
    found = structure_from_text(treespec_dumps(structure), of_results=True)
    assert found == structure
    assert isinstance(tree_unflatten(leaves, found)["a"][0], Pair)


def test_names_stand_in_for_a_class() -> None:
    """The results are a dict with attributes."""
    text = _UNKNOWN.replace(
        '"elsewhere.Output", "context": "null"', '"elsewhere.Output", "context": "[\\"logits\\", \\"states\\"]"'
    )
    results, last = tree_unflatten([1, 2, 3], structure_from_text(text, of_results=True))
    assert results == {"logits": 1, "states": 2}
    assert (results.logits, last) == (1, 3)
    assert isinstance(results, NamedResults)
    with pytest.raises(AttributeError, match="the results are logits, states; there is no loss"):
        _ = results.loss


def test_another_class_is_refused() -> None:
    """Classes without names, and all classes of arguments, must be known."""
    for of_results in (True, False):
        with pytest.raises(NotImplementedError, match=r"elsewhere\.Output"):
            structure_from_text(_UNKNOWN, of_results=of_results)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """Its results have their names in a process that does not import transformers."""
    transformers = pytest.importorskip("transformers")
    from torch_hybrid_backend import export

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model, ids = transformers.BertModel(config).eval(), torch.tensor([[1, 2, 3]])
    export(model, (ids,), tmp_path / "bert.hybrid", options={"placement": "estimate"})
    code = (
        "import sys, torch, torch_hybrid_backend as t; m = t.load(sys.argv[1]); r = m(torch.tensor([[1, 2, 3]]))\n"
        "assert 'transformers' not in sys.modules; print(tuple(r.last_hidden_state.shape), list(r))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bert.hybrid")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "(1, 3, 32) ['last_hidden_state', 'pooler_output']"
