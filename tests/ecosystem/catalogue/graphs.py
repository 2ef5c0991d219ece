"""torch_geometric: networks on graphs, which differ in size from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.ecosystem.case import Case, Inputs
from tests.ecosystem.libraries import load

_FEATURES, _HIDDEN, _CLASSES, _RELATIONS = 64, 128, 10, 4
_PAPERS, _AUTHORS = "paper", "author"
_WRITES, _CITES, _WRITTEN = (_AUTHORS, "writes", _PAPERS), (_PAPERS, "cites", _PAPERS), (_PAPERS, "by", _AUTHORS)


def _size(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


def _edges(count: int, sources: int, targets: int) -> torch.Tensor:
    """(2, count) int64."""
    return torch.stack([torch.randint(0, sources, (count,)), torch.randint(0, targets, (count,))])


def _graph() -> Inputs:
    """About 500 nodes and 4,000 edges."""
    nodes = _size(480, 520)
    return torch.randn(nodes, _FEATURES), _edges(_size(3900, 4100), nodes, nodes)


def _weighted() -> Inputs:
    """A graph with four features on each edge."""
    x, edges = _graph()
    return x, edges, torch.randn(edges.shape[1], 4)


def _typed() -> Inputs:
    """A graph whose edges are of `_RELATIONS` kinds."""
    x, edges = _graph()
    return x, edges, torch.randint(0, _RELATIONS, (edges.shape[1],))


def _molecules() -> Inputs:
    """32 small graphs in one: features, edges, and the graph of each node."""
    sizes = torch.randint(12, 24, (32,))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    edges = torch.cat([_edges(40, int(n), int(n)) + at for n, at in zip(sizes, starts, strict=True)], 1)
    return torch.randn(int(sizes.sum()), _FEATURES), edges, torch.arange(32).repeat_interleave(sizes)


def _atoms() -> Inputs:
    """Numbers of 4 x 20 atoms, where they are, and the molecule of each."""
    return torch.randint(1, 10, (80,)), 2 * torch.randn(80, 3), torch.arange(4).repeat_interleave(20)


def _literature() -> Inputs:
    papers, authors = _size(280, 320), _size(90, 110)
    return (
        {_PAPERS: torch.randn(papers, _FEATURES), _AUTHORS: torch.randn(authors, _FEATURES)},
        {
            _WRITES: _edges(900, authors, papers),
            _CITES: _edges(1500, papers, papers),
            _WRITTEN: _edges(900, papers, authors),
        },
    )


def _stack(name: str, layers: int = 3, **settings: Any) -> Callable[[], nn.Module]:
    """A ready model of the library: `layers` convolutions of its kind with ReLUs between them."""
    return lambda: getattr(load("torch_geometric.nn"), name)(_FEATURES, _HIDDEN, layers, _CLASSES, **settings)


class Convolutions(nn.Module):
    """Two convolutions of one kind, made by `make(inputs, outputs)`, which get all arguments after the features."""

    def __init__(self, make: Callable[[int, int], nn.Module], hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.first, self.second = make(_FEATURES, hidden), make(hidden, _CLASSES)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """x: (nodes, features).  Returns: (nodes, classes)."""
        result: torch.Tensor = self.second(self.first(x, *others).relu(), *others)
        return result


def _convolutions(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(load("torch_geometric.nn"), name)
        return Convolutions(lambda inputs, outputs: kind(inputs, outputs, **settings))

    return make


def _edge_networks() -> nn.Module:
    """NNConv: the weights of each edge come from a network on the edge's features."""
    kind = load("torch_geometric.nn").NNConv

    def make(inputs: int, outputs: int) -> nn.Module:
        layer: nn.Module = kind(
            inputs, outputs, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, inputs * outputs))
        )
        return layer

    return Convolutions(make, hidden=16)


class GraphClassifier(nn.Module):
    """Isomorphism convolutions with batch norms, then three ways of pooling a graph's nodes, then a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.library = load("torch_geometric.nn")
        self.convolutions = self.library.GIN(_FEATURES, _HIDDEN, 3, norm="batch_norm")
        self.head = nn.Linear(3 * _HIDDEN, _CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        """x: (nodes, features); graph: (nodes,) int64, ascending.  Returns: (32, classes)."""
        x = self.convolutions(x, edges)
        pools = (self.library.global_mean_pool, self.library.global_max_pool, self.library.global_add_pool)
        logits: torch.Tensor = self.head(torch.cat([pool(x, graph, 32) for pool in pools], 1))
        return logits


class Heterogeneous(nn.Module):
    """Two layers with a convolution for each kind of edge, then a head for each kind of node."""

    def __init__(self) -> None:
        super().__init__()
        library = load("torch_geometric.nn")

        def layer(width: int) -> nn.Module:
            made: nn.Module = library.HeteroConv(
                {
                    _WRITES: library.SAGEConv((width, width), _HIDDEN),
                    _CITES: library.GCNConv(width, _HIDDEN),
                    _WRITTEN: library.GATConv((width, width), _HIDDEN, add_self_loops=False),
                }
            )
            return made

        self.layers = nn.ModuleList([layer(_FEATURES), layer(_HIDDEN)])
        self.heads = nn.ModuleDict({kind: nn.Linear(_HIDDEN, _CLASSES) for kind in (_PAPERS, _AUTHORS)})

    def forward(self, x: dict[str, torch.Tensor], edges: dict[tuple[str, str, str], torch.Tensor]) -> dict[str, Any]:
        """x: (nodes, features) by kind of node; edges: (2, edges) int64 by kind of edge.  Returns: (nodes, classes) by kind."""
        for layer in self.layers:
            x = {kind: values.relu() for kind, values in layer(x, edges).items()}
        return {kind: self.heads[kind](values) for kind, values in x.items()}


class HeterogeneousAttention(nn.Module):
    """The heterogeneous graph transformer: attention with weights for each kind of node and edge."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = load("torch_geometric.nn").HGTConv(
            _FEATURES, _HIDDEN, ([_PAPERS, _AUTHORS], [_WRITES, _CITES, _WRITTEN]), heads=4
        )
        self.head = nn.Linear(_HIDDEN, _CLASSES)

    def forward(self, x: dict[str, torch.Tensor], edges: dict[tuple[str, str, str], torch.Tensor]) -> torch.Tensor:
        """Returns: (papers, classes)."""
        logits: torch.Tensor = self.head(self.layer(x, edges)[_PAPERS])
        return logits


def _schnet() -> nn.Module:
    """Continuous convolutions over all pairs within a molecule (the library's neighbour search needs an extension)."""

    def pairs(positions: torch.Tensor, molecule: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = positions.shape[0] // 4
        inside = torch.cartesian_prod(torch.arange(count), torch.arange(count)).T
        inside = inside[:, inside[0] != inside[1]]
        edges = torch.cat([inside + number * count for number in range(4)], 1)
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    model: nn.Module = load("torch_geometric.nn").SchNet(
        hidden_channels=64, num_filters=64, num_interactions=3, num_gaussians=32, interaction_graph=pairs
    )
    return model


# Of the same kind, but faster than eager: graphs that Dynamo takes whole (`gcn_whole`).
_CUT = "Graph breaks where a size depends on data; between them are sums over edges, for which no engine has a kernel"

_SUMS = "Sums over edges, for which no engine has a kernel, take most of its time"

CASES = (
    Case("torch_geometric/gcn", _stack("GCN"), _graph, reason=_CUT),
    Case(
        "torch_geometric/gcn_whole",
        _stack("GCN"),
        _graph,
        dynamo={"capture_dynamic_output_shape_ops": True},
        reason="Sizes depend on data: most of it runs in eager, from Python",
    ),
    Case("torch_geometric/sage", _stack("GraphSAGE", norm="layer_norm"), _graph),
    Case("torch_geometric/gat", _stack("GAT", heads=4), _graph),
    Case("torch_geometric/gat_v2", _stack("GAT", v2=True, heads=4), _graph),
    Case(
        "torch_geometric/pna",
        _stack(
            "PNA",
            layers=2,
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=torch.arange(40),
        ),
        _graph,
    ),
    Case("torch_geometric/relational", _convolutions("RGCNConv", num_relations=_RELATIONS), _typed, reason=_CUT),
    Case("torch_geometric/transformer", _convolutions("TransformerConv", heads=1, edge_dim=4), _weighted),
    Case("torch_geometric/chebyshev", _convolutions("ChebConv", K=3), _graph, reason=_CUT),
    Case("torch_geometric/edge_networks", _edge_networks, _weighted, reason=_SUMS),
    Case("torch_geometric/graph_classifier", GraphClassifier, _molecules, reason=_SUMS),
    Case(
        "torch_geometric/heterogeneous",
        Heterogeneous,
        _literature,
        reason="Graph breaks make 20 graphs; Dynamo's backend `eager` takes as long",
    ),
    Case("torch_geometric/heterogeneous_attention", HeterogeneousAttention, _literature, reason=_CUT),
    Case("torch_geometric/schnet", _schnet, _atoms),
    Case("torch_geometric/gcn_training", _stack("GCN", layers=2), _graph, train=True, reason=_CUT),
    Case(
        "torch_geometric/light_gcn",
        lambda: load("torch_geometric.nn").LightGCN(400, 64, 3),
        lambda: (_edges(4000, 400, 400), _edges(256, 400, 400)),
    ),
)
