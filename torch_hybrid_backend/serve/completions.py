"""OpenAI's /v1/completions by a file that generates text: requests, texts with stop strings, and answers, whole or as a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from torch_hybrid_backend.artifact.tokenizer import token_texts
from torch_hybrid_backend.errors import ArgumentError, HybridError, RequestError, failures
from torch_hybrid_backend.serve.served_model import ServedModel

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
    try:
        said = json.loads(body)
    except failures(ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise RequestError("the body must be a JSON object")
    if (name := said.get("model")) != model.name:
        raise RequestError(f"there is no model {name!r}; this server has {model.name!r}", 404)
    if not model.generates:
        raise RequestError(f"{model.name} does not generate text: send requests to /v2/models/{model.name}/infer")
    for member, harmless in _FIXED.items():
        if said.get(member) not in harmless:
            raise RequestError(
                f"{member} is {said[member]!r}; this server knows {' or '.join(map(repr, harmless[1:]))} alone"
            )
    stops = said.get("stop") or []
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
    prompt = _prompt(said.get("prompt"), tokenizer)
    temperature = _or(said.get("temperature"), 1.0)
    stop_tokens = said.get("stop_token_ids")
    settings = model.model.manifest.generation
    assert settings is not None
    room, most = settings.max_length - len(prompt), _or(said.get("max_tokens"), _DEFAULT_TOKENS)
    try:
        tokens = model.model.generate(
            prompt,
            min(most, room) if type(most) is int and room > 0 else most,
            temperature=temperature,
            # At temperature 0 nothing is drawn, and clients send top_p all the same.
            top_k=said.get("top_k") if temperature else None,
            top_p=said.get("top_p") if temperature else None,
            seed=said.get("seed"),
            stop_tokens=stop_tokens,
        )
    except ArgumentError as error:
        raise RequestError(str(error)) from error
    options = said.get("stream_options") or {}
    return Completion(
        model,
        prompt,
        tokens,
        tuple(stops),
        frozenset(settings.stop_tokens if stop_tokens is None else stop_tokens),
        said.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
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
    except HybridError as error:  # the status has been sent: clients read the error among the events
        yield _event(failed(error))
        return
    if completion.usage_in_stream:
        yield _event({**_said(completion, "", [], None), "choices": [], "usage": _usage(completion, count)})
    yield b"data: [DONE]\n\n"


def failed(error: Exception) -> dict[str, Any]:
    """The body of an answer about an error, as OpenAI's clients read it."""
    kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


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


def _prompt(given: Any, tokenizer: Any) -> Sequence[int]:
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
