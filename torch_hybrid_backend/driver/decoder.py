"""A transformers decoder as a module of tensors alone: token ids and positions in, logits out, keys and values in buffers.

transformers is imported here; `driver/generation.py` imports this module when it is needed.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import nn

from torch_hybrid_backend.errors import NotExportableError

# Without its types, which say less than its code does.
_caches: Any = importlib.import_module("transformers.cache_utils")


class Decoder(nn.Module):
    """A causal language model with a cache of `max_length` positions.

    Layers with a sliding window keep all positions too, and the model's mask hides what is behind the window. Raises NotExportableError for a
    model whose layers keep something else than keys and values.
    """

    def __init__(self, model: Any, max_length: int) -> None:
        super().__init__()
        self.model = model
        known = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in known
        self._takes_last = "logits_to_keep" in known
        self._layers = 0
        for number, layer in enumerate(_filled_cache(model, max_length).layers):
            shape = layer.keys.shape[:2]
            for name, tensor in (("keys", layer.keys), ("values", layer.values)):
                empty = tensor.new_zeros((*shape, max_length, tensor.shape[-1]))
                self.register_buffer(f"{name}_{number}", empty, persistent=False)
            self._layers += 1

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        """The logits (1, vocabulary) of the token behind the one at index `last` (1,); None: behind the last one.

        `ids` (1, n) stand at `positions` (n,), which follow one another.
        """
        layers = [
            _Layer(getattr(self, f"keys_{n}"), getattr(self, f"values_{n}"), positions) for n in range(self._layers)
        ]
        kept: Any = 1 if last is None else last
        given: dict[str, Any] = {"position_ids": positions[None]} if self._takes_positions else {}
        if self._takes_last:
            given["logits_to_keep"] = kept
        logits: torch.Tensor = self.model(
            input_ids=ids, past_key_values=_caches.Cache(layers=layers), use_cache=True, return_dict=True, **given
        ).logits
        if not self._takes_last and last is not None:
            logits = logits[:, last]
        return logits[:, -1]

    def reset(self) -> None:
        """Empty the cache."""
        for number in range(self._layers):
            getattr(self, f"keys_{number}").zero_()
            getattr(self, f"values_{number}").zero_()


class _Layer(_caches.CacheLayerMixin):  # type: ignore[misc]
    """The keys and values of one layer, written at positions that are given."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._positions = keys, values, positions
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return all."""
        return self._updated(self.keys, key_states), self._updated(self.values, value_states)

    def _updated(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        length = new.shape[2]
        # Kernels read one new position beside those that are held. Several are chosen by arithmetic on positions: no kernel writes rows at
        # positions of which only the call knows that no two are equal.
        chosen = None
        if length > 1:
            offsets = torch.arange(held.shape[2], device=held.device) - self._positions[0]
            is_new = (offsets >= 0) & (offsets < length)
            chosen = torch.where(is_new[:, None], new.index_select(2, offsets.clamp(0, length - 1)), held)
        held.index_copy_(2, self._positions, new)
        return held if chosen is None else chosen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of positions, and the first one."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """The number of tokens before the new ones."""
        return self._positions[0]

    def get_max_length(self) -> int:
        """The number of positions."""
        return int(self.keys.shape[2])


def _filled_cache(model: Any, max_length: int) -> Any:
    """A cache that the model has written one token to: its tensors then have the sizes and dtypes that the model needs."""
    cache = _caches.StaticCache(config=model.config, max_cache_len=max_length)
    for layer in cache.layers:
        if type(layer) not in (_caches.StaticLayer, _caches.StaticSlidingWindowLayer):
            raise NotExportableError(
                f"{type(model).__name__} has layers whose cache is a {type(layer).__name__}; text generation takes decoders whose layers "
                "all keep keys and values: full and sliding attention"
            )
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    return cache
