"""Completions, asked by the package openai and by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.artifact.decoder_for_tests import exported_decoder
from tests.serve.conftest import Cluster
from torch_hybrid_backend import load
from torch_hybrid_backend.artifact.tokenizer import open_tokenizer
from torch_hybrid_backend.errors import RequestError
from torch_hybrid_backend.serve import deployment
from torch_hybrid_backend.serve.completions import _Stops, read_completion
from torch_hybrid_backend.serve.served_model import ServedModel

openai = pytest.importorskip("openai")
_PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return exported_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def client(cluster: Cluster, decoder: tuple[Path, Path]) -> Iterator[Any]:
    """A client of a server of the decoder."""
    file, tokenizer = decoder
    address = cluster.run(deployment(file, tokenizer=tokenizer), "texts")
    yield openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60)
    cluster.delete("texts")


def _expected(decoder: tuple[Path, Path], count: int, **given: Any) -> list[int]:
    return list(load(decoder[0]).generate(_PROMPT, count, stop_tokens=(), **given))


def test_openais_client_gets_the_models_tokens(client: Any, decoder: tuple[Path, Path]) -> None:
    """Whole and as a stream, greedy and drawn, by ids and by text; the text is the tokenizer's."""
    tokenizer = open_tokenizer(decoder[1])
    assert [model.id for model in client.models.list()] == ["model"]
    for given in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        drawn = {} if not given["temperature"] else given
        expected = _expected(decoder, 8, **drawn)
        asked = {"model": "model", "prompt": _PROMPT, "max_tokens": 8, "extra_body": {"stop_token_ids": []}, **given}
        whole = client.completions.create(**asked)
        (choice,) = whole.choices
        assert (choice.token_ids, choice.finish_reason) == (expected, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 8)
        parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert [token for part in parts for each in part.choices for token in each.token_ids] == expected
        assert parts[-1].usage.completion_tokens == 8
        streamed = "".join(each.text for part in parts for each in part.choices)
        assert streamed == choice.text
        assert tokenizer.decode(expected).startswith(streamed)
    text = client.completions.create(model="model", prompt="the cat", temperature=0, max_tokens=4)
    ids = client.completions.create(model="model", prompt=tokenizer.encode("the cat").ids, temperature=0, max_tokens=4)
    assert text.choices == ids.choices


def test_stops(client: Any, decoder: tuple[Path, Path]) -> None:
    """A stop token and a stop string end the answer, and are no part of it."""
    expected = _expected(decoder, 8)
    asked = {"model": "model", "prompt": _PROMPT, "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked, extra_body={"stop_token_ids": []}).choices[0].text
    (choice,) = client.completions.create(**asked, extra_body={"stop_token_ids": [expected[2]]}).choices
    cut = expected[: expected.index(expected[2])]
    assert (choice.token_ids, choice.finish_reason) == (cut, "stop")
    stop = whole[len(whole) // 2 :][:2]
    (choice,) = client.completions.create(**asked, stop=stop, extra_body={"stop_token_ids": []}).choices
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_generations_at_once_take_turns(client: Any, decoder: tuple[Path, Path]) -> None:
    """Each has the cache alone, also where another's client leaves amid its stream."""
    expected = _expected(decoder, 12)

    def ask(number: int) -> list[int]:
        asked = {
            "model": "model",
            "prompt": _PROMPT,
            "temperature": 0,
            "max_tokens": 12,
            "extra_body": {"stop_token_ids": []},
        }
        if number % 3:
            tokens: list[int] = client.completions.create(**asked).choices[0].token_ids
            return tokens
        with client.completions.create(**asked, stream=True) as stream:
            first = next(iter(stream)).choices[0].token_ids
        return [*first, *expected[1:]]

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(18))) == [expected] * 18


def test_wrong_requests_are_openais_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="n is 2; this server knows 1 alone"):
        client.completions.create(model="model", prompt="a", n=2)


def test_a_long_prompt_does_not_hold_up_other_requests(decoder: tuple[Path, Path]) -> None:
    """Requests of the same event loop are answered while the tokenizer works, which takes it a good part of a second here."""
    testclient = pytest.importorskip("starlette.testclient", reason="needs the extra serve")
    from torch_hybrid_backend.serve.web import application

    service = _Texts(ServedModel(decoder[0]), _Watched(open_tokenizer(decoder[1])))
    body = {"model": "model", "prompt": "the cat and the dog " * 10_000}
    answered: list[float] = []
    with testclient.TestClient(application(service)) as client, ThreadPoolExecutor(1) as thread:  # type: ignore[arg-type]
        asking = thread.submit(client.post, "/v1/completions", json=body)
        while not asking.done():
            assert client.get("/v2/health/ready").status_code == 200
            answered.append(time.perf_counter())
        answer = asking.result()
    assert (answer.status_code, "the file has room for 32" in answer.text) == (400, True), answer.text
    begin, end = service.tokenizer.span
    assert sum(begin < when < end for when in answered) > 3


class _Texts:
    """A service with a tokenizer that generates nothing."""

    max_body_bytes = 2**20

    def __init__(self, model: ServedModel, tokenizer: _Watched) -> None:
        self.model, self.tokenizer = model, tokenizer

    def answered(self, status: int) -> None:
        pass


class _Watched:
    """A tokenizer. `span`: when its last call began and ended."""

    span = (0.0, 0.0)

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tokenizer, name)

        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args)
            self.span = begin, time.perf_counter()
            return result

        return call


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": None}, "prompt must be a text or a list"),
        ({"prompt": ["a", "b"]}, "one of them"),
        ({"prompt": "a"}, "needs a tokenizer"),
        ({"prompt": [99999]}, "the model knows 0 to"),
        ({"prompt": [1] * 40}, "the file has room for 32"),
        ({"prompt": []}, "at least one"),
        ({"max_tokens": 0}, "max_new_tokens is 0"),
        ({"max_tokens": "4"}, "max_new_tokens is '4'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 2}, "top_p is 2"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"stop": "x"}, "stop needs a tokenizer"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": "x" * 257}, "1 to 256 letters"),
        ({"stop_token_ids": "x"}, "stop_tokens is"),
        ({"logprobs": 2}, "logprobs is 2"),
        ({"echo": True}, "echo is True"),
    ],
)
def test_wrong_requests(decoder: tuple[Path, Path], given: dict[str, Any], said: str) -> None:
    body = json.dumps({"model": "model", "prompt": _PROMPT, **given}).encode()
    with pytest.raises(RequestError, match=said) as caught:
        read_completion(body, ServedModel(decoder[0]), None)
    assert caught.value.status == 400


def test_half_a_surrogate_pair_is_no_text(decoder: tuple[Path, Path]) -> None:
    body = b'{"model": "model", "prompt": "a\\ud800"}'
    with pytest.raises(RequestError, match="the tokenizer refuses the prompt"):
        read_completion(body, ServedModel(decoder[0]), open_tokenizer(decoder[1]))


def test_stop_strings_across_parts() -> None:
    """The begin of a stop string is held back until it is clear."""
    stops = _Stops(["END", "EX"])
    assert [stops.add(text) for text in ("abE", "Nx", "E", "XY")] == [
        ("ab", False),
        ("ENx", False),
        ("", False),
        ("", True),
    ]
    stops = _Stops(["END"])
    assert stops.add("aEN") == ("a", False)
    assert stops.rest() == "EN"
