"""Tokenizers of decoders, by the package tokenizers: opened from their files, and texts of tokens as they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_hybrid_backend.errors import ArgumentError, failures


def open_tokenizer(path: Path) -> Any:
    """The tokenizer of a tokenizer.json. Raises ArgumentError for what is none, and where the package tokenizers is missing."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ArgumentError("a tokenizer needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_file(str(path))
    except failures(Exception) as error:  # tokenizers raises Exception itself
        raise ArgumentError(f"{path} is no tokenizer.json that can be read: {error}") from error


def token_texts(tokenizer: Any) -> Callable[[int], str]:
    """Function that takes each new token and returns the text that can be shown since: of some letters only the last token makes a text.

    Without a tokenizer (None) the text of a token is its id and a space.
    """
    if tokenizer is None:
        return lambda token: f"{token} "
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    return lambda token: stream.step(tokenizer, token) or ""
