"""Decoders of transformers as files: their tokens are those of transformers' `generate`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_hybrid_backend import compile_generation, export_generation, load
from torch_hybrid_backend.artifact.model import LoadedModel
from torch_hybrid_backend.errors import ArgumentError, NotExportableError

transformers = pytest.importorskip("transformers")

_FAST = {"placement": "estimate", "strict": True}
_MAX_LENGTH, _PREFILL = 48, 8
_VOCABULARY = 101
_LLAMA = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "sliding window": ("MistralConfig", "MistralForCausalLM", _LLAMA | {"sliding_window": 8}),
}


def _model(name: str) -> Any:
    config, model, settings = _MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():  # logits far enough apart that rounding decides nothing
        for parameter in made.parameters():
            parameter.mul_(3)
    return made


@pytest.fixture(scope="module", params=_MODELS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    """A model, and the same from a file."""
    model = _model(request.param)
    path = tmp_path_factory.mktemp("generation") / "model.hybrid"
    report = export_generation(model, path, max_length=_MAX_LENGTH, prefill_length=_PREFILL, options=_FAST)
    assert report.entries == ("prefill", "decode")
    assert not report.python_parts
    assert not report.needs_torch
    return model, load(path)


def _expected(model: Any, prompt: torch.Tensor, count: int, **given: Any) -> list[int]:
    with torch.no_grad():
        every = model.generate(prompt, max_new_tokens=count, **{"do_sample": False, **given})
    return list(every[0, prompt.shape[1] :].tolist())


@pytest.mark.parametrize("length", [1, 7, 8, 9, 20, 43])
def test_greedy_tokens(decoder: tuple[Any, LoadedModel], length: int) -> None:
    """For prompts of less than a chunk, of a chunk, of several, and one whose last chunk would end behind the cache."""
    model, loaded = decoder
    prompt = torch.randint(2, _VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    count = min(12, _MAX_LENGTH - length)
    assert list(loaded.generate(prompt, count)) == _expected(model, prompt, count)


def test_sampled_tokens(decoder: tuple[Any, LoadedModel]) -> None:
    """With a seed they are those that transformers draws behind `torch.manual_seed`."""
    model, loaded = decoder
    prompt = torch.tensor([[5, 6, 7]])
    for given in ({"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"temperature": 2.0, "top_p": 0.8}):
        torch.manual_seed(11)
        expected = _expected(model, prompt, 16, do_sample=True, **{"top_k": 0, "top_p": 1.0, **given})
        assert list(loaded.generate([5, 6, 7], 16, seed=11, **given)) == expected


def test_the_stop_token_of_the_model(decoder: tuple[Any, LoadedModel]) -> None:
    _, loaded = decoder
    generation = loaded._manifest.generation
    assert generation is not None
    assert generation.stop_tokens == (1,)
    first = next(loaded.generate([5, 6, 7], 1))
    assert list(loaded.generate([5, 6, 7], 10, stop_tokens=[first])) == [first]


def test_a_token_writes_its_position_only(decoder: tuple[Any, LoadedModel]) -> None:
    """Both entries change the same states, row by row: no call copies a cache."""
    _, loaded = decoder
    prefill, decode = loaded._manifest.entries
    for entry in (prefill, decode):
        assert {type(update).__name__ for update in entry.updates} == {"RowsUpdate"}
    assert {update.target for update in prefill.updates} == {update.target for update in decode.updates}
    assert len(loaded._manifest.states) == len(decode.updates)


def test_a_generation_begins_with_an_empty_cache(decoder: tuple[Any, LoadedModel]) -> None:
    """Also behind one that left numbers in the cache that are none."""
    _, loaded = decoder
    expected = list(loaded.generate([9, 8], 8))
    for state in loaded._states:
        state.fill_(torch.nan)
    assert list(loaded.generate([9, 8], 8)) == expected


def test_two_models_of_one_file_in_two_threads(decoder: tuple[Any, LoadedModel]) -> None:
    _, loaded = decoder
    models, prompts = [load(loaded._path), load(loaded._path)], [[5, 6, 7], [8, 9]]
    expected = [list(loaded.generate(prompt, 20)) for prompt in prompts]
    found: dict[int, list[list[int]]] = {0: [], 1: []}

    def call(number: int) -> None:
        for _ in range(5):
            found[number].append(list(models[number].generate(prompts[number], 20)))

    threads = [threading.Thread(target=call, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [tokens] * 5 for number, tokens in enumerate(expected)}


def test_weights_in_4_bits_are_in_the_file_once(tmp_path: Path) -> None:
    """Prefill and decode read the same packed weights, and agree: the logits of a token are the same by either way."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA | sizes)).eval()
    options = {"placement": "measure", "precision": "int4-weights", "precision_tolerance": 1.0}
    report = export_generation(model, tmp_path / "model.hybrid", max_length=32, prefill_length=8, options=options)
    assert report.size_bytes < 0.5 * 4 * sum(parameter.numel() for parameter in model.parameters())
    loaded = load(report.path)
    packed = [
        {number for number in entry.slots if loaded._manifest.constants[number].dtype == "int32"}
        for entry in loaded._manifest.entries
    ]
    assert packed[0] == packed[1] != set()
    ids = torch.randint(0, _VOCABULARY, (1, 8))
    prefill, decode = loaded.entry("prefill"), loaded.entry("decode")
    at_once = prefill(ids, torch.arange(8), torch.tensor([7]))
    loaded.reset()
    for position in range(8):
        one_by_one = decode(ids[:, position : position + 1], torch.tensor([position]))
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-3, atol=1e-3)


# A file of each model takes the same steps, above.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name != "Llama" else ()) for name in _MODELS]
)
def test_in_this_process(name: str) -> None:
    """A compiled decoder returns transformers' tokens, greedy and drawn, for prompts of any length, with the weights as they are."""
    torch.compiler.reset()
    model = _model(name)
    decoder = compile_generation(model, max_length=_MAX_LENGTH, prefill_length=_PREFILL, options=_FAST)
    for length in (1, 8, 20, 43):
        prompt = torch.randint(2, _VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
        count = min(8, _MAX_LENGTH - length)
        assert list(decoder.generate(prompt, count)) == _expected(model, prompt, count)
    drawn = {"temperature": 1.5, "top_k": 5, "top_p": 0.8}
    prompt = torch.tensor([[5, 6, 7]])
    torch.manual_seed(11)
    expected = _expected(model, prompt, 16, do_sample=True, **drawn)
    assert list(decoder.generate([5, 6, 7], 16, seed=11, **drawn)) == expected
    head = model.get_output_embeddings()
    before = list(decoder.generate([5, 6, 7], 8))
    with torch.no_grad():
        head.weight.copy_(head.weight.flip(0))
    after = _expected(model, prompt, 8)
    assert list(decoder.generate([5, 6, 7], 8)) == after != before


def test_two_decoders_are_apart() -> None:
    """Decoders of models of other sizes, whose loops are the same code, each run their own graph, and a replaced weight counts."""
    torch.compiler.reset()
    models = [_model("Llama"), _model("GPT-2")]
    decoders = [compile_generation(model, max_length=16, prefill_length=4, options=_FAST) for model in models]
    prompt = torch.tensor([[5, 6, 7]])
    for _ in range(2):
        for model, decoder in zip(models, decoders, strict=True):
            assert list(decoder.generate([5, 6, 7], 8)) == _expected(model, prompt, 8)
        models[0].lm_head.weight = nn.Parameter(models[0].lm_head.weight.detach().flip(0))


@pytest.mark.parametrize(
    ("model", "given", "error", "said"),
    [
        (lambda: nn.Linear(2, 2), {}, ArgumentError, "a Linear; it must be a decoder of transformers"),
        (lambda: torch.compile(_model("Llama")), {}, ArgumentError, "compiled model"),
        (lambda: _model("Llama").train(), {}, ArgumentError, r"call model.eval\(\) first"),
        (lambda: _model("GPT-2"), {"max_length": 65}, ArgumentError, "from 2 to 64 .the most positions"),
        (lambda: _model("GPT-2"), {"max_length": 1}, ArgumentError, "max_length is 1"),
        (lambda: _model("GPT-2"), {"prefill_length": 0}, ArgumentError, "from 1 to 16"),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
            ).eval(),
            {},
            NotExportableError,
            "takes decoders whose layers all keep keys and values",
        ),
    ],
)
def test_refusals(model: Any, given: dict[str, Any], error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        export_generation(model(), tmp_path / "model.hybrid", **{"max_length": 16, **given})
    with pytest.raises(error, match=said):
        compile_generation(model(), **{"max_length": 16, **given})


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match="pip install transformers"):
        export_generation(nn.Linear(2, 2), tmp_path / "model.hybrid", max_length=16)
