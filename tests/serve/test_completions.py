"""Completions, asked by the package openai and by hand."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator
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
    assert (answer.status_code, "the cache has room for 32" in answer.text) == (400, True), answer.text
    begin, end = service.tokenizer.span
    assert sum(begin < when < end for when in answered) > 3


class _Texts:
    """A service with a tokenizer that generates nothing."""

    max_body_bytes = 2**20

    def __init__(self, model: ServedModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.statuses: list[int] = []

    def answered(self, status: int) -> None:
        self.statuses.append(status)


class _Failing(_Texts):
    """A service that fails at the second token."""

    async def tokens(self, model: ServedModel, tokens: Iterator[int]) -> AsyncGenerator[int, None]:
        yield next(tokens)
        raise ZeroDivisionError("of a token")


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
        ({"prompt": [1] * 40}, "the cache has room for 32"),
        ({"prompt": []}, "at least one"),
        ({"prompt": [10**20]}, "the prompt has the token 100000000000000000000; the model knows 0 to"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": "4"}, "max_tokens is '4'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 2}, "top_p is 2"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"stop": "x"}, "stop needs a tokenizer"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": "x" * 257}, "1 to 256 letters"),
        ({"stop": False}, "stop is False"),
        ({"stop_token_ids": "x"}, "stop_token_ids is 'x'"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": [1000]}, r"stop_token_ids is \[1000\]; it must be a list of token ids from 0 to"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is"),
        ({"stream": "yes"}, "stream is 'yes'; it must be true or false"),
        ({"stream": 1}, "stream is 1"),
        ({"stream_options": 3}, "stream_options is 3"),
        ({"stream_options": {"include_usage": 1}}, "include_usage is 1"),
        ({"stream_options": {"usage": True}}, "stream_options has 'usage'"),
        ({"temperature": 0, "top_p": "a"}, "top_p is 'a'"),
        ({"temprature": 0}, "has 'temprature', which this server does not know. Did you mean 'temperature'"),
        ({"repetition_penalty": 1.0}, "has 'repetition_penalty'"),
        ({"min_p": 0.1}, "has 'min_p'"),
        ({"min_tokens": 3}, "has 'min_tokens'"),
        ({"ignore_eos": True}, "has 'ignore_eos'"),
        ({"model": None}, '"model" is missing'),
        ({"logprobs": 2}, "logprobs is 2"),
        ({"echo": True}, "echo is True"),
    ],
)
def test_wrong_requests(decoder: tuple[Path, Path], given: dict[str, Any], said: str) -> None:
    body = json.dumps({"model": "model", "prompt": _PROMPT, **given}).encode()
    with pytest.raises(RequestError, match=said) as caught:
        read_completion(body, ServedModel(decoder[0]), None)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "given",
    [
        {"user": "a", "metadata": {"b": "c"}, "store": True},
        {
            "n": 1,
            "best_of": 1,
            "echo": False,
            "logprobs": None,
            "suffix": None,
            "logit_bias": {},
            "presence_penalty": 0.0,
        },
        {"stop": "", "stream": None, "stream_options": None, "temperature": 0, "top_p": 1},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_accepted(decoder: tuple[Path, Path], given: dict[str, Any]) -> None:
    body = json.dumps({"model": "model", "prompt": _PROMPT, **given}).encode()
    assert read_completion(body, ServedModel(decoder[0]), None).stream is (given.get("stream") is True)


def test_bodies_of_another_encoding(decoder: tuple[Path, Path]) -> None:
    with pytest.raises(RequestError, match="the body is no JSON in UTF-8"):
        read_completion("{}".encode("utf-16"), ServedModel(decoder[0]), None)


@pytest.mark.parametrize("temperature", [1e-39, 1e-310])
def test_tiny_temperatures_are_greedy(decoder: tuple[Path, Path], temperature: float) -> None:
    given = {"model": "model", "prompt": _PROMPT, "max_tokens": 8, "stop_token_ids": [], "seed": 1, "top_p": 0.9}
    body = json.dumps({**given, "temperature": temperature}).encode()
    assert list(read_completion(body, ServedModel(decoder[0]), None).tokens) == _expected(decoder, 8)


def test_failures_have_openais_shape(decoder: tuple[Path, Path]) -> None:
    """With the status 500, and amid a stream as its last event."""
    testclient = pytest.importorskip("starlette.testclient", reason="needs the extra serve")
    from torch_hybrid_backend.serve.web import application

    service = _Failing(ServedModel(decoder[0]), None)
    body = {"model": "model", "prompt": _PROMPT, "temperature": 0, "stop_token_ids": []}
    with testclient.TestClient(application(service)) as client:  # type: ignore[arg-type]
        whole = client.post("/v1/completions", json=body)
        stream = client.post("/v1/completions", json={**body, "stream": True})
    error = {"message": "ZeroDivisionError: of a token", "type": "server_error", "param": None, "code": None}
    assert (whole.status_code, whole.json()) == (500, {"error": error})
    *parts, last = stream.text.strip().split("\n\n")
    assert (len(parts), json.loads(last.removeprefix("data: "))) == (1, {"error": error})
    assert service.statuses == [500, 200]


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
