"""Decoders as modules of tensors: the cache is written at the positions that a call names."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")


@torch.no_grad()
def test_positions_choose_what_is_written_and_seen() -> None:
    """A sequence in two pieces gives the logits of the sequence at once, in whatever the cache held before; only its positions change."""
    from torch_hybrid_backend.driver.decoder import Decoder

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    decoder = Decoder(model, 16)
    assert not any(buffer.any() for name, buffer in decoder.named_buffers() if name.startswith(("keys", "values")))
    decoder.keys_1.fill_(5.0)
    ids = torch.randint(0, 50, (1, 9))
    decoder(ids[:, :4], torch.arange(4), torch.tensor([3]))
    last = decoder(ids[:, 4:], torch.arange(4, 9))
    fourth = decoder(ids[:, 4:], torch.arange(4, 9), torch.tensor([3]))
    expected = model(ids).logits
    torch.testing.assert_close(last, expected[:, 8])
    torch.testing.assert_close(fourth, expected[:, 7])
    assert (decoder.keys_1[:, :, 9:] == 5).all()
    assert (decoder.keys_1[:, :, :9] != 5).all()
