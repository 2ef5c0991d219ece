"""Export of decoders that generate text. Part of the wiring."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_hybrid_backend.arguments import described, is_compiled
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
    transformers_model = _checked_model(model)
    path = check_path(Path(path))
    config = Config.from_env(os.environ).with_options(options, None)
    text = transformers_model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    _check_length("max_length", max_length, 2, longest, "the most positions that the model knows")
    prefill_length = min(_PREFILL_LENGTH, max_length) if prefill_length is None else prefill_length
    _check_length("prefill_length", prefill_length, 1, max_length, "max_length")

    from torch_hybrid_backend.driver.decoder import Decoder

    decoder = Decoder(transformers_model, max_length)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text.vocab_size, (1, prefill_length), generator=random)
    middle = torch.tensor([max_length // 2])  # engines are chosen for a token with some others before it
    calls: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {
        _PREFILL: ((ids, torch.arange(prefill_length), torch.tensor([prefill_length - 1])), {}),
        _DECODE: ((ids[:, :1].clone(), middle), {}),
    }
    generation = Generation(_PREFILL, _DECODE, max_length, _stop_tokens(transformers_model))
    with compile_lock:  # what traces graphs is global in PyTorch
        programs = {entry: exported_program(decoder, *call) for entry, call in calls.items()}
        return write_programs(model, programs, calls, path, config, generation)


def _checked_model(model: Any) -> Any:
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "export_generation needs transformers, which is not installed here: pip install transformers"
        ) from error
    if is_compiled(model) or is_compiled(getattr(model, "forward", None)):
        raise ArgumentError("export_generation got a compiled model; pass the model that was given to torch.compile")
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ArgumentError(
            f"export_generation got {described(model)}; it must be a decoder of transformers that generates text, such as "
            "AutoModelForCausalLM.from_pretrained(...); `export` takes other models, with several entries where they have them"
        )
    if model.config.is_encoder_decoder:
        raise ArgumentError(f"{type(model).__name__} has an encoder; export_generation takes decoders without one")
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
