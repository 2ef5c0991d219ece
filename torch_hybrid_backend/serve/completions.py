"""OpenAI's /v1/completions by a file that generates text: requests, texts with stop strings, and answers, whole or as a stream of events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from torch_hybrid_backend.artifact.generation import Sampling
from torch_hybrid_backend.artifact.tokenizer import token_texts
from torch_hybrid_backend.errors import ArgumentError, HybridError, RequestError, did_you_mean, failures
from torch_hybrid_backend.serve.protocol import json_of
from torch_hybrid_backend.serve.served_model import ServedModel

_LOG = logging.getLogger("ray.serve")

# Members of a request that would change the answer and are not served, with the values that change nothing.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, 0),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
# Members of OpenAI's that change nothing in an answer.
_WITHOUT_EFFECT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_SERVED = (
    "max_tokens",
    "model",
    "prompt",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
)
_KNOWN = (*_SERVED, *_FIXED, *_WITHOUT_EFFECT)
_STREAM_OPTIONS = ("include_obfuscation", "include_usage")
_DEFAULT_TOKENS = 16
_MOST_STOPS = 4
_LONGEST_STOP = 256  # each new token is compared with every beginning of a stop string


class Generates(Protocol):
    """A service that generates tokens."""

    def tokens(self, model: ServedModel, tokens: Iterator[int]) -> AsyncGenerator[int, None]:
        """The tokens of a generation, when its turn comes."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A request. `stops`: texts that end the answer. `stop_tokens`: tokens that do, and are no part of it."""

    model: ServedModel
    prompt: Sequence[int]
    tokens: Iterator[int]
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    stream: bool
    usage_in_stream: bool
    tokenizer: Any
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


def read_completion(body: bytes, model: ServedModel, tokenizer: Any) -> Completion:
    """The request in a body. Raises RequestError: 404 for another model, 400 for what the model cannot do."""
    said = json_of(body)
    if not isinstance(said, dict):
        raise RequestError("the body must be a JSON object")
    if (name := said.get("model")) is None:
        raise RequestError(f'"model" is missing; this server has {model.name!r}')
    if name != model.name:
        raise RequestError(f"there is no model {name!r}; this server has {model.name!r}", 404)
    if not model.generates:
        raise RequestError(f"{model.name} does not generate text: send requests to /v2/models/{model.name}/infer")
    _refuse_unknown(said, _KNOWN, _SERVED, "the request")
    for member, harmless in _FIXED.items():
        if said.get(member) not in harmless:
            raise RequestError(
                f"{member} is {said[member]!r}; this server knows {' or '.join(map(repr, harmless[1:]))} alone"
            )
    streams, with_usage = _streaming(said)
    stops = [] if said.get("stop") in (None, "") else said["stop"]
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(each, str) and 1 <= len(each) <= _LONGEST_STOP for each in stops)
    ):
        raise RequestError(
            f"stop is {stops!r}; it must be a string of 1 to {_LONGEST_STOP} letters, or a list of at most {_MOST_STOPS} of them"
        )
    if stops and tokenizer is None:
        raise RequestError("stop needs a tokenizer, which this server was started without: send stop_token_ids")
    prompt = _prompt(said.get("prompt"), tokenizer, model.vocabulary)
    temperature, top_k, top_p = _or(said.get("temperature"), 1.0), said.get("top_k"), said.get("top_p")
    stop_tokens = said.get("stop_token_ids")
    if stop_tokens is not None:
        _check_stop_tokens(stop_tokens, model.vocabulary)
    most = _or(said.get("max_tokens"), _DEFAULT_TOKENS)
    if type(most) is not int or most < 1:
        raise RequestError(f"max_tokens is {most!r}; it must be a whole number, at least 1")
    settings = model.model.manifest.generation
    assert settings is not None
    room = settings.max_length - len(prompt)
    try:
        if temperature == 0:  # nothing is drawn, and clients send top_p all the same
            Sampling(1.0, top_k, top_p)
            top_k = top_p = None
        tokens = model.model.generate(
            prompt,
            min(most, room) if room > 0 else most,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=said.get("seed"),
            stop_tokens=stop_tokens,
        )
    except ArgumentError as error:
        raise RequestError(str(error)) from error
    return Completion(
        model,
        prompt,
        tokens,
        tuple(stops),
        frozenset(settings.stop_tokens if stop_tokens is None else stop_tokens),
        streams,
        with_usage,
        tokenizer,
    )


async def answer(completion: Completion, service: Generates) -> dict[str, Any]:
    """The whole answer."""
    parts = [part async for part in _parts(completion, service)]
    text, ids = "".join(part.text for part in parts), [token for part in parts for token in part.ids]
    return {**_said(completion, text, ids, parts[-1].reason), "usage": _usage(completion, parts[-1].count)}


async def events(completion: Completion, service: Generates) -> AsyncGenerator[bytes, None]:
    """The answer as events, token by token."""
    count = 0
    try:
        async with aclosing(_parts(completion, service)) as parts:
            async for part in parts:
                count = part.count
                yield _event(_said(completion, part.text, part.ids, part.reason))
    except failures(Exception) as error:  # the status has been sent: clients read the error among the events
        _LOG.exception("a stream of tokens failed")
        yield _event(failed(error))
        return
    if completion.usage_in_stream:
        yield _event({**_said(completion, "", [], None), "choices": [], "usage": _usage(completion, count)})
    yield b"data: [DONE]\n\n"


def failed(error: Exception) -> dict[str, Any]:
    """The body of an answer about an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
    message = str(error) if isinstance(error, HybridError) else f"{type(error).__name__}: {error}"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an answer. `count`: of the tokens up to it. `reason`: why the answer ends with it, None if it goes on."""

    text: str
    ids: list[int]
    reason: str | None
    count: int


async def _parts(completion: Completion, service: Generates) -> AsyncGenerator[_Part, None]:
    text_of, stops = token_texts(completion.tokenizer), _Stops(completion.stops)
    count = 0
    # A generation that ends early lets the next one begin at once.
    async with aclosing(service.tokens(completion.model, completion.tokens)) as tokens:
        async for token in tokens:
            count += 1
            if token in completion.stop_tokens:
                yield _Part(stops.rest(), [], "stop", count)
                return
            shown, is_over = stops.add(text_of(token))
            yield _Part(shown, [token], "stop" if is_over else None, count)
            if is_over:
                return
    yield _Part(stops.rest(), [], "length", count)


class _Stops:
    """Text that comes in parts, up to the first stop string. The begin of what may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and True if a stop string ends it."""
        held = self._held + text
        found = [at for at in map(held.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        kept = max((n for stop in self._stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept], False

    def rest(self) -> str:
        """The text that was held back."""
        return self._held


def _refuse_unknown(said: Mapping[str, Any], known: Sequence[str], served: Sequence[str], what: str) -> None:
    """Raise RequestError for a member that is not known, whatever its value."""
    for member in said:
        if member not in known:
            raise RequestError(
                f"{what} has {member!r}, which this server does not know. {did_you_mean(member, known)}It serves {', '.join(served)}"
            )


def _streaming(said: Mapping[str, Any]) -> tuple[bool, bool]:
    """Flags of an answer: the answer is a stream, the stream ends with the usage. Raises RequestError."""
    options = _or(said.get("stream_options"), {})
    if not isinstance(options, dict):
        raise RequestError(f'stream_options is {options!r}; it must be an object, such as {{"include_usage": true}}')
    _refuse_unknown(options, _STREAM_OPTIONS, _STREAM_OPTIONS, "stream_options")
    return _flag(said, "stream"), _flag(options, "include_usage")


def _flag(said: Mapping[str, Any], member: str) -> bool:
    value = said.get(member)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{member} is {value!r}; it must be true or false")
    return value is True


def _check_stop_tokens(given: object, vocabulary: int) -> None:
    if not isinstance(given, list) or not all(type(each) is int and 0 <= each < vocabulary for each in given):
        raise RequestError(f"stop_token_ids is {given!r}; it must be a list of token ids from 0 to {vocabulary - 1}")


def _prompt(given: Any, tokenizer: Any, vocabulary: int) -> Sequence[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        if tokenizer is None:
            raise RequestError(
                "a prompt of text needs a tokenizer, which this server was started without: send token ids"
            )
        try:
            # `encode` would keep Python's lock until it returns.
            (encoding,) = tokenizer.encode_batch([given])
        except failures(Exception) as error:  # of tokenizers: Exception itself, TypeError for half a surrogate pair
            raise RequestError(f"the tokenizer refuses the prompt: {error}") from error
        ids: list[int] = encoding.ids
        return ids
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise RequestError("prompt must be a text or a list of token ids, one of them")
    for each in given:
        if not 0 <= each < vocabulary:
            raise RequestError(
                f"the prompt has the token {each}; the model knows 0 to {vocabulary - 1}: use the tokenizer of this model"
            )
    return given


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _said(completion: Completion, text: str, ids: list[int], reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": ids, "logprobs": None, "finish_reason": reason}
    return {
        "id": completion.id,
        "object": "text_completion",
        "created": completion.created,
        "model": completion.model.name,
        "choices": [choice],
    }


def _usage(completion: Completion, count: int) -> dict[str, int]:
    prompt = len(completion.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def _event(said: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(said, separators=(',', ':'))}\n\n".encode()
