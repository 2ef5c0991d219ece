"""Recurrent networks as users write them: torch's layers, packed sequences, cells in a loop, attention over an encoder's states."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.ecosystem.case import Case

_VOCABULARY, _WIDTH = 500, 128


class Tagger(nn.Module):
    """A two-way LSTM over padded sentences of known lengths, packed; a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _WIDTH, 12)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """words: (batch, longest) int64; lengths: (batch,) int64.  Returns: (batch, longest, tags)."""
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        tags: torch.Tensor = self.head(states)
        return tags


class SpeechGru(nn.Module):
    """Strided convolutions over a spectrogram, then a two-way GRU, then letters: the plan of Deep Speech 2."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 16, (11, 5), (2, 2), (5, 2)),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
            nn.Conv2d(16, 16, (11, 5), (2, 1), (5, 2)),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
        )
        self.gru = nn.GRU(16 * 20, _WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * _WIDTH, 29)

    def forward(self, spectrogram: torch.Tensor) -> torch.Tensor:
        """spectrogram: (batch, 1, 80, frames).  Returns: log probabilities, (batch, frames / 2, letters)."""
        x = self.front(spectrogram).flatten(1, 2).mT
        return self.head(self.gru(x)[0]).log_softmax(-1)  # type: ignore[no-any-return]


class Translator(nn.Module):
    """A GRU reads, a GRU cell with dot-product attention writes 12 words, each chosen greedily."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.reader = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.writer = nn.GRUCell(2 * _WIDTH, _WIDTH)
        self.head = nn.Linear(2 * _WIDTH, _VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """words: (batch, length) int64.  Returns: logits, (batch, 12, vocabulary)."""
        states, last = self.reader(self.embedding(words))
        state, word = last[0], torch.zeros_like(words[:, 0])
        context, steps = torch.zeros_like(state), []
        for _ in range(12):
            state = self.writer(torch.cat([self.embedding(word), context], 1), state)
            weights = torch.einsum("bld,bd->bl", states, state).softmax(-1)
            context = torch.einsum("bl,bld->bd", weights, states)
            logits = self.head(torch.cat([state, context], 1))
            word = logits.argmax(-1)
            steps.append(logits)
        return torch.stack(steps, 1)


class Letters(nn.Module):
    """A language model of LSTM cells in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.cells = nn.ModuleList([nn.LSTMCell(_WIDTH, _WIDTH), nn.LSTMCell(_WIDTH, _WIDTH)])
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """words: (batch, length) int64.  Returns: (batch, length, vocabulary)."""
        empty = torch.zeros(words.shape[0], _WIDTH, device=words.device, dtype=self.embedding.weight.dtype)
        states = [(empty, empty) for _ in self.cells]
        outputs = []
        for step in self.embedding(words).unbind(1):
            x = step
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = states[number][0]
            outputs.append(x)
        logits: torch.Tensor = self.head(torch.stack(outputs, 1))
        return logits


class ConvolutionalLstm(nn.Module):
    """ConvLSTM (Shi et al. 2015): the next frame of a clip."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(1 + 32, 4 * 32, 3, padding=1)
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        """clip: (batch, frames, 1, h, w).  Returns: (batch, 1, h, w)."""
        state = memory = clip.new_zeros(clip.shape[0], 32, *clip.shape[-2:])
        for frame in clip.unbind(1):
            update, forget, output, new = self.gates(torch.cat([frame, state], 1)).chunk(4, 1)
            memory = forget.sigmoid() * memory + update.sigmoid() * new.tanh()
            state = output.sigmoid() * memory.tanh()
        predicted: torch.Tensor = self.head(state)
        return predicted


def _words(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (batch, length))


_TRACED = {"allow_rnn": True}
_UNTRACED = "Dynamo runs torch's recurrent layers, and the code around them, in eager unless its allow_rnn is set"

CASES = (
    Case(
        "recurrent/tagger",
        Tagger,
        lambda: (_words(8, 40), torch.randint(5, 40, (8,)).index_fill(0, torch.tensor(0), 40)),
        reason=_UNTRACED,
        not_exported="must be tuple of ints",  # packed sequences: sizes that depend on data
    ),
    Case("recurrent/speech_gru", SpeechGru, lambda: (torch.randn(2, 1, 80, 120),), quick=True),
    Case("recurrent/translator", Translator, lambda: (_words(4, 20),), reason=_UNTRACED),
    Case("recurrent/speech_gru_traced", SpeechGru, lambda: (torch.randn(2, 1, 80, 120),), dynamo=_TRACED),
    Case("recurrent/translator_traced", Translator, lambda: (_words(4, 20),), dynamo=_TRACED),
    Case("recurrent/letters", Letters, lambda: (_words(4, 24),)),
    Case("recurrent/letters_training", Letters, lambda: (_words(4, 16),), train=True),
    Case("recurrent/convolutional_lstm", ConvolutionalLstm, lambda: (torch.randn(2, 6, 1, 32, 32),)),
)
