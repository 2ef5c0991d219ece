"""Sampling, and the steps of a generation, on a decoder that is a table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_hybrid_backend.artifact.generation import Sampling, TextGenerator
from torch_hybrid_backend.artifact.manifest import Generation
from torch_hybrid_backend.errors import ArgumentError, HybridError

_VOCABULARY, _CHUNK, _MAX_LENGTH = 10, 4, 10


class _Counting:
    """A decoder that says the next number after the last token, and notes what it is given."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.calls: list[tuple[list[int], list[int], int]] = []

    def __call__(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        ids, positions, *last = leaves
        assert ids.shape == (1, self._tokens)
        at = int(last[0]) if last else 0
        self.calls.append((ids[0].tolist(), positions.tolist(), at))
        return [torch.nn.functional.one_hot((ids[:, at] + 1) % _VOCABULARY, _VOCABULARY).float()]


@pytest.fixture
def generator() -> TextGenerator:
    settings = Generation("prefill", "decode", _MAX_LENGTH, (9,))
    prefill, decode = _Counting(_CHUNK), _Counting(1)
    return TextGenerator(settings, _CHUNK, _VOCABULARY, prefill, decode, threading.RLock(), lambda: None)


def _generated(generator: TextGenerator, ids: Any, count: int | None = None, stops: Any = None) -> Iterator[int]:
    return generator.generate(ids, count, Sampling(), None, stops)


def test_a_prompt_is_read_in_chunks(generator: TextGenerator) -> None:
    """The last chunk is filled up; one that would end behind the cache begins earlier. The last token needs no call of its own."""
    assert list(_generated(generator, [1, 2, 3, 4, 5], 2)) == [6, 7]
    assert generator._prefill.calls == [([1, 2, 3, 4], [0, 1, 2, 3], 3), ([5, 0, 0, 0], [4, 5, 6, 7], 0)]  # type: ignore[attr-defined]
    assert generator._decode.calls == [([6], [5], 0)]  # type: ignore[attr-defined]
    generator._prefill.calls.clear()  # type: ignore[attr-defined]
    assert list(_generated(generator, range(9), 1)) == [9]
    assert generator._prefill.calls[2] == ([6, 7, 8, 0], [6, 7, 8, 9], 2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ids", [[7], (7,), torch.tensor([7]), torch.tensor([[7]], dtype=torch.int32)])
def test_stop_tokens_end_a_text(generator: TextGenerator, ids: Any) -> None:
    """The stop token is the last one; those of the file count unless others are given, and the file's room ends every text."""
    assert list(_generated(generator, ids)) == [8, 9]
    assert list(_generated(generator, ids, stops=[8])) == [8]
    assert list(_generated(generator, ids, stops=())) == [8, 9, 0, 1, 2, 3, 4, 5, 6]


def test_a_later_generation_ends_an_earlier_one(generator: TextGenerator) -> None:
    first = _generated(generator, [1])
    assert next(first) == 2
    assert next(_generated(generator, [5])) == 6
    with pytest.raises(HybridError, match="another generation"):
        next(first)


@pytest.mark.parametrize(
    ("ids", "count", "stops", "said"),
    [
        ([], None, None, "the prompt has no tokens"),
        ([[1], [2]], None, None, r"ids of one prompt.*"),
        ([1.5], None, None, "ids is float32"),
        ("text", None, None, "must be a list or a tensor of token ids"),
        ([3, 10], None, None, "token 10; the model knows 0 to 9"),
        (range(10), None, None, "10 tokens, and the cache has room for 10"),
        ([1], 0, None, "from 1 to 9"),
        ([1], 10, None, "larger max_length"),
        ([1], None, "</s>", "must be a list of token ids"),
    ],
)
def test_wrong_arguments_are_told_at_once(
    generator: TextGenerator, ids: Any, count: Any, stops: Any, said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        _generated(generator, list(ids) if isinstance(ids, range) else ids, count, stops)


@pytest.mark.parametrize("seed", [-1, 1.5, 2**63])
def test_wrong_seeds(generator: TextGenerator, seed: Any) -> None:
    with pytest.raises(ArgumentError, match="seed is"):
        generator.generate([1], 1, Sampling(), seed, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1, "top_p": 1.5}, "above 0 and at most 1"),
        ({"top_k": 5}, "temperature 0 draws none"),
    ],
)
def test_wrong_settings_of_sampling(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Sampling(**given)


def test_sampling_draws_from_the_likeliest_tokens() -> None:
    """Each setting leaves some of four tokens with the probabilities 1/2, 1/4, 1/8, 1/8."""
    logits = torch.tensor([0.25, 0.125, 0.5, 0.125]).log()

    def drawn(**given: Any) -> set[int]:
        sampling, generator = Sampling(temperature=1.0, **given), torch.Generator().manual_seed(0)
        return {sampling.choose(logits, generator) for _ in range(200)}

    assert Sampling().choose(logits) == 2
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=1) == {2}
    assert drawn(top_k=2) == {0, 2}
    assert drawn(top_k=100) == {0, 1, 2, 3}
    assert drawn(top_p=0.1) == {2}
    assert drawn(top_p=0.6) == {0, 2}
    assert drawn(top_k=3, top_p=0.7) <= {0, 2}


@pytest.mark.parametrize("temperature", [1e-310, 1e-39, 1e-6])
def test_tiny_temperatures_take_the_likeliest_token(temperature: float) -> None:
    logits, generator = torch.tensor([0.25, -torch.inf, 3e4, 2.9e4]), torch.Generator().manual_seed(0)
    for given in ({}, {"top_k": 2, "top_p": 0.9}):
        assert Sampling(temperature, **given).choose(logits, generator) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-5, 1e39, 1e300, 10**400])
def test_other_extreme_temperatures_draw(temperature: float) -> None:
    logits, generator = torch.tensor([0.25, -torch.inf, 3e4, 3e4]), torch.Generator().manual_seed(0)
    drawn = {Sampling(temperature).choose(logits, generator) for _ in range(100)}
    assert drawn == ({2, 3} if temperature < 1 else {0, 2, 3})


def test_seeds() -> None:
    """A seed gives the same tokens again, and leaves PyTorch's own random numbers alone."""
    sampling, logits = Sampling(temperature=1.0), torch.zeros(50)
    torch.manual_seed(0)
    mine = [sampling.choose(logits) for _ in range(5)]
    torch.manual_seed(0)
    sampling.choose(logits, torch.Generator().manual_seed(3))
    assert [sampling.choose(logits) for _ in range(5)] == mine
