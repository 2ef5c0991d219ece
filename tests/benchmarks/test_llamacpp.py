"""The benchmark's llama.cpp computes the model it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import decoding, llamacpp


def test_without_llama_cpp_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the benchmark needs it."""
    monkeypatch.setattr(llamacpp, "FOLDER", tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ModuleNotFoundError, match=r"make \.venv/llama_cpp"):
        llamacpp._llama_cpp()


@pytest.mark.skipif(not llamacpp.FOLDER.exists(), reason="llama.cpp is not built: make .venv/llama_cpp")
@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.05), ("Q4_0", 0.4)])
def test_logits_are_eagers(kind: str, most: float) -> None:
    """Token after token, and again after going back: heads, their rotation and the cache are those of the model."""
    pytest.importorskip("transformers")
    model = decoding.tiny_llama(1, 64)
    ids = [decoding._ids(tokens) for tokens in (3, 1)]
    with torch.no_grad():
        decoder = decoding.Decoder(model, 64)
        expected = [decoder(each) for each in ids]
        step = llamacpp.LlamaCpp(model, kind, 64, decoding._ids(decoding._PROMPT))
        for _ in range(2):
            for each, logits in zip(ids, expected, strict=True):
                assert float((step(each) - logits).norm() / logits.norm()) < most
            step.rewind()
