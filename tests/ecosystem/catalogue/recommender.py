"""Recommenders: tables of embeddings, sums over bags of them, and small networks on top, as the papers describe them."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tests.ecosystem.case import Case, Inputs

_TABLES, _ROWS, _WIDTH, _DENSE = 8, 5000, 32, 13


def _network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Bags(nn.Module):
    """A table for each categorical feature; each sample sums or averages a bag of its rows."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(_ROWS, _WIDTH, mode=mode) for _ in range(_TABLES))

    def forward(self, numbers: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        """numbers: (k,) int64 each; offsets: (batch,) int64, where each sample's bag begins.  Returns: (batch, tables, width)."""
        bags = zip(self.tables, numbers, offsets, strict=True)
        return torch.stack([table(rows, starts) for table, rows, starts in bags], 1)


class DeepLearningRecommender(nn.Module):
    """DLRM (Naumov et al. 2019): the products of all pairs of embeddings, beside the dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags()
        self.bottom = _network(_DENSE, 256, 64, _WIDTH)
        pairs = (_TABLES + 1) * _TABLES // 2
        self.top = _network(pairs + _WIDTH, 256, 128, 1)
        self.register_buffer("lower", torch.tril_indices(_TABLES + 1, _TABLES + 1, -1), persistent=False)

    def forward(self, dense: torch.Tensor, numbers: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        """dense: (batch, features).  Returns: click probabilities, (batch, 1)."""
        low = self.bottom(dense)
        vectors = torch.cat([low[:, None], self.bags(numbers, offsets)], 1)
        products = (vectors @ vectors.mT)[:, self.lower[0], self.lower[1]]
        return torch.sigmoid(self.top(torch.cat([low, products], 1)))


class DeepFactorization(nn.Module):
    """DeepFM (Guo et al. 2017): a factorisation machine and a network over the same embeddings; one table with an offset for each field."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(_TABLES * _ROWS, _WIDTH), nn.Embedding(_TABLES * _ROWS, 1)
        self.register_buffer("starts", torch.arange(_TABLES) * _ROWS, persistent=False)
        self.deep = _network(_TABLES * _WIDTH, 256, 128, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """numbers: (batch, tables) int64.  Returns: (batch, 1)."""
        places = numbers + self.starts
        vectors = self.table(places)
        second = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(places).sum(1) + second + self.deep(vectors.flatten(1)))


class CrossNetwork(nn.Module):
    """DCN-v2 (Wang et al. 2021): layers that multiply the features by a linear map of themselves, then the best items."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags("mean")
        width = _TABLES * _WIDTH
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = _network(width, 256, 128)
        self.items = nn.Linear(width + 128, 1000)

    def forward(self, numbers: list[torch.Tensor], offsets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns: the ten best items' scores and numbers, (batch, 10) each."""
        x = first = self.bags(numbers, offsets).flatten(1)
        for layer in self.cross:
            x = first * layer(x) + x
        best, which = self.items(torch.cat([x, self.deep(first)], 1)).topk(10)
        return best, which


class TwoTowers(nn.Module):
    """Retrieval: users by a bag of what they saw, items by their features, all against all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(_ROWS, 64, mode="mean", padding_idx=0)
        self.item = nn.Embedding(_ROWS, 64)
        self.user_network, self.item_network = _network(64, 128, 64), _network(64, 128, 64)

    def forward(self, histories: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """histories: (users, length) int64, padded with 0; items: (items,) int64.  Returns: cosines, (users, items)."""
        users = nn.functional.normalize(self.user_network(self.seen(histories)), dim=1)
        wares = nn.functional.normalize(self.item_network(self.item(items)), dim=1)
        return users @ wares.mT


class SequentialAttention(nn.Module):
    """SASRec (Kang & McAuley 2018): causal attention over what a user saw; the next item's scores."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(_ROWS, 64, padding_idx=0), nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """seen: (users, 50) int64.  Returns: (users, items)."""
        x = self.items(seen) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        scores: torch.Tensor = self.layers(x, mask=mask, is_causal=True)[:, -1] @ self.items.weight.mT
        return scores


def _bags(batch: int = 128) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each table, bags of 0 to 5 rows: how many there are in all differs from call to call."""
    lengths = [torch.randint(0, 6, (batch,)) for _ in range(_TABLES)]
    numbers = [torch.randint(0, _ROWS, (int(each.sum()),)) for each in lengths]
    return numbers, [each.cumsum(0) - each for each in lengths]


def _with_dense() -> Inputs:
    return torch.randn(128, _DENSE), *_bags()


CASES = (
    Case("recommender/dlrm", DeepLearningRecommender, _with_dense),
    Case(
        "recommender/dlrm_training",
        DeepLearningRecommender,
        _with_dense,
        train=True,
        reason="Embedding bags run in eager, forward and backward; Dynamo's guards cost more than the small layers gain",
    ),
    Case("recommender/deep_fm", DeepFactorization, lambda: (torch.randint(0, _ROWS, (128, _TABLES)),)),
    Case("recommender/cross_network", CrossNetwork, _bags),
    Case(
        "recommender/two_towers",
        TwoTowers,
        lambda: (torch.randint(0, _ROWS, (64, 20)), torch.randint(0, _ROWS, (200,))),
        quick=True,
    ),
    Case("recommender/sequential", SequentialAttention, lambda: (torch.randint(1, _ROWS, (16, 50)),)),
)
