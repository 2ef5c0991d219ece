"""Text generation by a decoder, from a file or compiled in this process: the prompt in chunks of a fixed length, then token by token.

The position of each token is an input of both entries, so one file serves prompts of every length. The last chunk is filled up with token 0
behind the prompt. No token of the prompt sees these: attention is causal, and each new token overwrites the keys and values at its position
before its query looks there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_hybrid_backend.arguments import described
from torch_hybrid_backend.artifact.manifest import Generation
from torch_hybrid_backend.errors import ArgumentError, HybridError, failures

# The tensors of a call of an entry -> its logits (1, vocabulary) alone.
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

# Below the first the likeliest token is taken: logits divided by less could be infinite. The second gives all tokens the same probability.
_LEAST_TEMPERATURE = 1e-5
_MOST_TEMPERATURE = 1e30


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of a token by its logits, as transformers' `generate` makes it: first the temperature, then `top_k`, then `top_p`.

    Raises ArgumentError for values that are none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ArgumentError(
                f"temperature is {self.temperature!r}; it must be a number that is not negative; 0 takes the likeliest token each time"
            )
        if self.top_k is not None and (not _is_whole(self.top_k) or self.top_k < 1):
            raise ArgumentError(
                f"top_k is {self.top_k!r}; it must be a whole number, at least 1, or None for all tokens"
            )
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ArgumentError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1, or None for all tokens")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ArgumentError(
                "top_k and top_p choose among tokens that are drawn, and temperature 0 draws none: give a temperature, such as 0.8"
            )

    def choose(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> int:
        """A token for logits (vocabulary,). `generator`: None draws from PyTorch's default one."""
        if self.temperature < _LEAST_TEMPERATURE:
            return int(logits.argmax())
        scores = logits.float() / min(self.temperature, _MOST_TEMPERATURE)
        if self.top_k is not None:
            smallest = scores.topk(min(self.top_k, len(scores))).values[-1]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        if self.top_p is not None:
            ascending, order = scores.sort()
            is_left_out = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            is_left_out[-1] = False
            scores = scores.index_fill(0, order[is_left_out], -torch.inf)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))


class TextGenerator:
    """Generates tokens by the two entries of a decoder.

    prefill: called with ids (1, chunk), positions (chunk,) and the index (1,) of the token whose logits it returns; decode: with one id and its
    position. A generation uses the decoder's states: where another one begins, the earlier one raises HybridError at its next token. `lock` is
    held by each call, `reset` sets the states back.
    """

    def __init__(
        self,
        settings: Generation,
        chunk: int,
        vocabulary: int,
        prefill: Run,
        decode: Run,
        lock: threading.RLock,
        reset: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._chunk, self._vocabulary = chunk, vocabulary
        self._prefill, self._decode = prefill, decode
        self._lock = lock
        self._reset = reset
        self._begun = 0

    def generate(
        self,
        ids: Any,
        max_new_tokens: int | None,
        sampling: Sampling,
        seed: int | None,
        stop_tokens: Sequence[int] | None,
    ) -> Iterator[int]:
        """The new tokens, each as it is chosen. Arguments are checked at once, not with the first token."""
        prompt = self._checked_prompt(ids)
        most = self._settings.max_length - len(prompt)
        if max_new_tokens is not None and (not _is_whole(max_new_tokens) or not 1 <= max_new_tokens <= most):
            raise ArgumentError(
                f"max_new_tokens is {max_new_tokens!r}; it must be a whole number from 1 to {most}, as the cache has room for "
                f"{self._settings.max_length} tokens and the prompt has {len(prompt)}: make it with a larger max_length, or give fewer"
            )
        stops = self._settings.stop_tokens if stop_tokens is None else stop_tokens
        if isinstance(stops, str) or not isinstance(stops, Sequence) or not all(map(_is_whole, stops)):
            raise ArgumentError(
                f"stop_tokens is {described(stops)}; it must be a list of token ids, or None for the model's"
            )
        if seed is not None and (not _is_whole(seed) or not 0 <= seed < 2**63):
            raise ArgumentError(
                f"seed is {seed!r}; it must be a whole number from 0 to 2^63 - 1, or None for PyTorch's own random numbers"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return self._tokens(
            prompt, max_new_tokens or most, lambda logits: sampling.choose(logits, generator), frozenset(stops)
        )

    def _tokens(
        self, prompt: list[int], count: int, choose: Callable[[torch.Tensor], int], stops: frozenset[int]
    ) -> Iterator[int]:
        with self._lock:
            self._begun += 1
            mine = self._begun
            self._reset()
            logits = self._logits_of(prompt)
        for position in range(len(prompt), len(prompt) + count):
            token = choose(logits)
            yield token
            if token in stops or position == len(prompt) + count - 1:
                return
            with self._lock:
                if self._begun != mine:
                    raise HybridError(
                        "another generation by this model has begun, and has the cache: finish one first, or make a decoder for each"
                    )
                (logits,) = self._decode([torch.tensor([[token]]), torch.tensor([position])])
                logits = logits[0]

    def _logits_of(self, prompt: list[int]) -> torch.Tensor:
        """The logits of the token behind a prompt."""
        for start in range(0, len(prompt), self._chunk):
            # A chunk that would end behind the cache begins earlier: its first tokens are then computed twice, to the same values.
            begin = min(start, self._settings.max_length - self._chunk)
            tokens = prompt[begin : begin + self._chunk]
            ids = torch.tensor([tokens + [0] * (self._chunk - len(tokens))])
            positions = torch.arange(begin, begin + self._chunk)
            (logits,) = self._prefill([ids, positions, torch.tensor([len(tokens) - 1])])
        first: torch.Tensor = logits[0]
        return first

    def _checked_prompt(self, ids: Any) -> list[int]:
        try:
            given = torch.as_tensor(ids)
        except failures(TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ArgumentError(f"ids is {described(ids)}; it must be a list or a tensor of token ids") from error
        shape = tuple(given.shape)
        if given.dim() == 2 and len(given) == 1:
            given = given[0]
        if not given.numel():
            raise ArgumentError("the prompt has no tokens; give at least one, such as the token that begins a text")
        if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
            raise ArgumentError(
                f"ids is {str(given.dtype).removeprefix('torch.')} {shape}; it must be the ids of one prompt, integers of the shape "
                "(n,) or (1, n)"
            )
        prompt: list[int] = given.tolist()
        wrong = [each for each in prompt if not 0 <= each < self._vocabulary]
        if wrong:
            raise ArgumentError(
                f"the prompt has the token {wrong[0]}; the model knows 0 to {self._vocabulary - 1}: use the tokenizer of this model"
            )
        if len(prompt) >= self._settings.max_length:
            raise ArgumentError(
                f"the prompt has {len(prompt)} tokens, and the cache has room for {self._settings.max_length}, the answer among them: "
                "shorten it, or make the decoder with a larger max_length"
            )
        return prompt


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
