"""Decoders that generate text: compiled in this process, or exported to a file. Part of the wiring."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from torch_hybrid_backend.arguments import described, is_compiled
from torch_hybrid_backend.artifact.generation import Run, Sampling, TextGenerator
from torch_hybrid_backend.artifact.manifest import Generation
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.driver.export import ExportReport, check_path, exported_program, write_programs
from torch_hybrid_backend.errors import ArgumentError
from torch_hybrid_backend.torch_private import compile_lock

_PREFILL, _DECODE = "prefill", "decode"
# A chunk of that many tokens keeps matrix products busy; a short prompt pays for all of it.
_PREFILL_LENGTH = 64


def export_generation(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    max_length: int,
    prefill_length: int | None = None,
    options: Mapping[str, object] | None = None,
) -> ExportReport:
    """Compile a causal language model of transformers and write it to one file, which generates text by `load(path).generate(...)`.

    model: such as `AutoModelForCausalLM.from_pretrained(...)`, on the CPU and in evaluation mode. max_length: the positions of its cache, which
    are the most tokens of a prompt and its answer together. prefill_length: prompts are read in chunks of that many tokens; None: 64. options:
    as for `export`; `{"precision": "int4-weights"}` makes the fastest files.

    The file has two entries over one set of weights and one cache, for one sequence at a time: `prefill(ids, positions, last)` and
    `decode(ids, positions)`. Both return the logits of one token. The model's end-of-text tokens are in the file as well.

    Raises ArgumentError for a model that is none of transformers', NotExportableError for one whose layers keep something else than keys and
    values, and what `export` raises.

        torch_hybrid_backend.export_generation(model, "chat.hybrid", max_length=2048, options={"precision": "int4-weights"})
    """
    transformers_model = _checked_model(model, "export_generation")
    path = check_path(Path(path))
    config = Config.from_env(os.environ).with_options(options, None)
    prefill_length = _checked_lengths(transformers_model, max_length, prefill_length)

    from torch_hybrid_backend.driver.decoder import Decoder

    decoder = Decoder(transformers_model, max_length)
    ids, middle = _samples(transformers_model, max_length, prefill_length)
    calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {
        _PREFILL: ((ids, torch.arange(prefill_length), torch.tensor([prefill_length - 1])), {}),
        _DECODE: ((ids[:, :1].clone(), middle), {}),
    }
    generation = Generation(_PREFILL, _DECODE, max_length, _stop_tokens(transformers_model))
    with compile_lock:  # what traces graphs is global in PyTorch
        programs = {entry: exported_program(decoder, *call) for entry, call in calls.items()}
        return write_programs(model, programs, calls, path, config, generation)


def compile_generation(
    model: torch.nn.Module,
    *,
    max_length: int,
    prefill_length: int | None = None,
    options: Mapping[str, object] | None = None,
) -> CompiledDecoder:
    """Compile a causal language model of transformers for generating text in this process.

    Arguments are as for `export_generation`. The decoder returns the tokens of transformers' `generate`, by a loop that calls compiled code
    alone: it makes no mask, and no guard is checked. The model's weights are live: those that are written to, loaded or replaced count from
    the next token on. Other changes of the model (layers, adapters, `train()`) are not noticed: compile it again.

    Raises ArgumentError for a model that is none of transformers', NotExportableError for one whose layers keep something else than keys and
    values, and what compilation raises.

        decoder = torch_hybrid_backend.compile_generation(model, max_length=2048, options={"precision": "int4-weights"})
        for token in decoder.generate(tokenizer.encode("Once upon a time"), 100):
            print(tokenizer.decode([token]), end="", flush=True)
    """
    transformers_model = _checked_model(model, "compile_generation")
    Config.from_env(os.environ).with_options(options, None)
    prefill_length = _checked_lengths(transformers_model, max_length, prefill_length)
    return CompiledDecoder(transformers_model, max_length, prefill_length, options or {})


class CompiledDecoder:
    """A decoder that `compile_generation` returns. Threads may use it in turns: each generation begins with an empty cache."""

    def __init__(self, model: Any, max_length: int, prefill_length: int, options: Mapping[str, object]) -> None:
        from torch_hybrid_backend.driver.decoder import Decoder

        decoder = Decoder(model, max_length)

        def prefill(ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
            return decoder(ids, positions, last)  # type: ignore[no-any-return]

        def decode(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return decoder(ids, positions)  # type: ignore[no-any-return]

        self._name = type(model).__name__
        read, step = _without_guards(prefill, options), _without_guards(decode, options)
        ids, middle = _samples(model, max_length, prefill_length)
        read([ids, torch.arange(prefill_length), torch.tensor([prefill_length - 1])])
        (logits,) = step([ids[:, :1].clone(), middle])
        settings = Generation(_PREFILL, _DECODE, max_length, _stop_tokens(model))
        self._generator = TextGenerator(
            settings, prefill_length, logits.shape[-1], read, step, threading.RLock(), decoder.reset
        )

    def generate(
        self,
        ids: Sequence[int] | torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> Iterator[int]:
        """Iterate over the tokens that follow a prompt. Arguments, tokens and errors are those of `LoadedModel.generate`; None for
        `max_new_tokens` fills the cache."""
        sampling = Sampling(temperature, top_k, top_p)
        return self._generator.generate(ids, max_new_tokens, sampling, seed, stop_tokens)

    def __repr__(self) -> str:
        return f"CompiledDecoder({self._name})"


def _without_guards(function: Callable[..., torch.Tensor], options: Mapping[str, object]) -> Run:
    """`function` compiled for the first call's tensors, whatever they are later.

    Dynamo looks graphs up by a function's code, and without guards any would do: the code is this function's own.
    """
    assert isinstance(function, FunctionType)
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    given: dict[str, Any] = {**options, "guard_filter_fn": lambda guards: [False] * len(guards)}
    compiled = torch.compile(own, backend="hybrid", fullgraph=True, dynamic=False, options=given)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [compiled(*tensors)]

    return run


def _samples(model: Any, max_length: int, prefill_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (1, prefill_length) to compile for, and the position (1,) of a token: engines are chosen for one with some others before it."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, prefill_length), generator=random), torch.tensor([max_length // 2])


def _checked_lengths(model: Any, max_length: int, prefill_length: int | None) -> int:
    """The tokens of a chunk. Raises ArgumentError for lengths that the model does not have."""
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    _check_length("max_length", max_length, 2, longest, "the most positions that the model knows")
    prefill_length = min(_PREFILL_LENGTH, max_length) if prefill_length is None else prefill_length
    _check_length("prefill_length", prefill_length, 1, max_length, "max_length")
    return prefill_length


def _checked_model(model: Any, function: str) -> Any:
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"{function} needs transformers, which is not installed here: pip install transformers"
        ) from error
    if is_compiled(model) or is_compiled(getattr(model, "forward", None)):
        raise ArgumentError(f"{function} got a compiled model; pass the model that was given to torch.compile")
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ArgumentError(
            f"{function} got {described(model)}; it must be a decoder of transformers that generates text, such as "
            "AutoModelForCausalLM.from_pretrained(...); `export` takes other models, with several entries where they have them"
        )
    if model.config.is_encoder_decoder:
        raise ArgumentError(f"{type(model).__name__} has an encoder; {function} takes decoders without one")
    if model.training:
        raise ArgumentError(
            f"{type(model).__name__} is in training mode, where layers drop values: call model.eval() first"
        )
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ArgumentError(f"{type(model).__name__} is not on the CPU: call model.to('cpu') first")
    return model


def _check_length(name: str, value: object, least: int, most: int | None, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        legal = f"at least {least}" if most is None else f"from {least} to {most} ({why})"
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number, {legal}")


def _stop_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, as transformers' `generate` has them."""
    config = model.generation_config if model.generation_config is not None else model.config
    tokens = config.eos_token_id
    return tuple(tokens) if isinstance(tokens, list | tuple) else () if tokens is None else (tokens,)
