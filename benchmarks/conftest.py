"""`pytest benchmarks/`: the benchmarks as pytest-benchmark's tests, with its statistics, JSON and comparison of runs.

    pytest benchmarks/                                        two models, every peer, batch 1: some minutes
    pytest benchmarks/ --models all --batch 1,8               everything: hours
    pytest benchmarks/ --precision int8                       each peer's own way of it
    pytest benchmarks/ --benchmark-json now.json; pytest-benchmark compare ...

Not part of the tests: a plain `pytest` collects tests/ only.
"""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.catalogue import MODELS
from torch_hybrid_backend.bench.peers import BASELINES, FLOAT32, PRECISIONS, Peer, by_name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption("--models", default="resnet50,minilm", help="names, comma separated, or all; default: %(default)s")
    group.addoption("--peers", default="all", help="names, comma separated, or all; default: %(default)s")
    group.addoption(
        "--precision",
        choices=PRECISIONS,
        default=FLOAT32,
        help="other than float32: with eager and hybrid in float32; default: %(default)s",
    )
    group.addoption("--batch", default="1", help="batch sizes, comma separated; default: %(default)s")
    group.addoption("--threads", type=int, default=0, help="default: torch's")
    group.addoption("--seconds", type=float, default=10.0, help="timing of one model, all peers; default: %(default)s")
    group.addoption("--size", choices=("small", "full"), default="full", help="default: %(default)s")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise pytest.UsageError("the benchmarks need pytest-benchmark: pip install pytest-benchmark, or make bench")


def chosen(config: pytest.Config, option: str, legal: list[str]) -> list[str]:
    """The choice that an option names. Raises UsageError for a name that is not legal."""
    text: str = config.getoption(option)
    names = legal if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in legal]:
        raise pytest.UsageError(f"{option}: unknown {', '.join(unknown)}; legal: all, {', '.join(legal)}")
    return names


def chosen_peers(config: pytest.Config) -> list[Peer]:
    """The peers that are named; below float32 the baselines first."""
    peers = [by_name()[name] for name in chosen(config, "--peers", list(by_name()))]
    return peers if config.getoption("--precision") == FLOAT32 else [*BASELINES, *peers]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "peer" not in metafunc.fixturenames:
        return
    models = chosen(metafunc.config, "--models", list(MODELS))
    peers = [peer.name for peer in chosen_peers(metafunc.config)]
    batches = [int(batch) for batch in metafunc.config.getoption("--batch").split(",")]
    rows = [(model, batch) for model in models for batch in batches]
    metafunc.parametrize("peer", peers)
    metafunc.parametrize("row", rows, ids=[f"{model}-{batch}" for model, batch in rows], scope="session")
