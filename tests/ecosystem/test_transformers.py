"""transformers: pipelines and generate(), with dynamic and static KV caches, over compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.ecosystem import tiny_models
from tests.ecosystem.tiny_models import TEXTS


def _compile_forward(model: Any, **options: Any) -> None:
    """Compile the forward of a model, as transformers' guide does: the model stays what it is, its forward is compiled."""
    model.forward = torch.compile(model.forward, backend="hybrid", **options)


def test_feature_extraction_pipeline() -> None:
    """Features of texts of several lengths equal eager's."""
    model, tokenizer = tiny_models.encoder(), tiny_models.tokenizer()
    pipeline = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer, device="cpu")
    expected = pipeline(list(TEXTS), return_tensors=True)
    _compile_forward(model)
    for ours, theirs in zip(pipeline(list(TEXTS), return_tensors=True), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_text_classification_pipeline() -> None:
    """Scores of a padded batch, and of texts one by one, equal eager's."""
    model, tokenizer = tiny_models.classifier(), tiny_models.tokenizer()
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
    expected = [pipeline(list(TEXTS), batch_size=size) for size in (3, 1)]
    _compile_forward(model)
    for size, wanted in zip((3, 1), expected, strict=True):
        for ours, theirs in zip(pipeline(list(TEXTS), batch_size=size), wanted, strict=True):
            assert [score["label"] for score in ours] == [score["label"] for score in theirs]
            assert [score["score"] for score in ours] == pytest.approx([score["score"] for score in theirs], abs=1e-5)


@pytest.mark.full
def test_text_generation_pipeline() -> None:
    """Greedy text equals eager's, word for word."""
    model, tokenizer = tiny_models.gpt2(), tiny_models.tokenizer()
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = pipeline(list(TEXTS), **settings)
    _compile_forward(model)
    assert pipeline(list(TEXTS), **settings) == expected


def _generate(model: Any, **settings: Any) -> torch.Tensor:
    inputs = tiny_models.tokenizer()(list(TEXTS), return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    tokens: torch.Tensor = model.generate(**inputs, min_new_tokens=12, max_new_tokens=12, **settings)
    return tokens


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        pytest.param(tiny_models.gpt2, "dynamic", id="gpt2-dynamic"),
        pytest.param(tiny_models.llama, "static", id="llama-static"),
        pytest.param(tiny_models.gpt2, "static", id="gpt2-static", marks=pytest.mark.full),
        pytest.param(tiny_models.llama, "dynamic", id="llama-dynamic", marks=pytest.mark.full),
    ],
)
def test_generate(make: Any, cache: str) -> None:
    """Greedy tokens of a padded batch equal eager's, with a cache that grows and with one that is written in place."""
    model = make()
    expected = _generate(model, do_sample=False, cache_implementation=cache)
    _compile_forward(model)
    assert torch.equal(_generate(model, do_sample=False, cache_implementation=cache), expected)
    assert torch.equal(_generate(model, do_sample=False, cache_implementation=cache), expected)


@pytest.mark.full
def test_generate_compiles_a_step_once() -> None:
    """With a static cache, all steps but the first share one compilation."""
    model = tiny_models.llama()
    _compile_forward(model, dynamic=False)
    _generate(model, do_sample=False, cache_implementation="static")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _generate(model, do_sample=False, cache_implementation="static")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"do_sample": True, "top_k": 5}], ids=["beams", "sampling"])
def test_generate_strategies(settings: dict[str, Any]) -> None:
    """Beam search, which reorders the cache, and sampling from the same seed give eager's tokens."""
    model = tiny_models.gpt2()
    torch.manual_seed(0)
    expected = _generate(model, **settings)
    _compile_forward(model)
    torch.manual_seed(0)
    assert torch.equal(_generate(model, **settings), expected)


@pytest.mark.full
def test_compile_config_of_generate() -> None:
    """generate() itself compiles the decoding step with our backend where its compile_config names it."""
    model = tiny_models.llama()
    expected = _generate(model, do_sample=False, cache_implementation="static", disable_compile=True)
    config = transformers.CompileConfig(backend="hybrid", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True  # on CPU transformers compiles nothing of its own accord
    tokens = _generate(model, do_sample=False, cache_implementation="static", compile_config=config)
    assert torch.equal(tokens, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
