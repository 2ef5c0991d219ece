"""Several processes that compute together over gloo: what rank_programs.py runs on each rank, against eager in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ecosystem import rank_programs
from tests.ecosystem.rank_programs import (
    RATE,
    STEPS,
    WORLD,
    Gradients,
    batches,
    blocks,
    chain_reference,
    gradients_of,
    network,
)
from tests.ecosystem.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of the programs of `one_by_one`, by rank."""
    return run_ranks(rank_programs.one_by_one, tmp_path_factory.mktemp("ranks"))


def test_a_parameter_that_changes_on_one_rank(found: list[dict[str, Any]]) -> None:
    """An all-gather of a parameter runs in every call, on every rank: also where the parameter changed on one rank alone."""
    ranks = [rank["gathered_parameter"] for rank in found]
    first, second = (rank["w"] for rank in ranks)
    before, after = (torch.relu(torch.ones(4, 16) @ torch.cat([w, second]).t()) for w in (first / 2, first))
    for rank in ranks:
        torch.testing.assert_close(rank["results"], [before, before, after, after])


@pytest.mark.full  # that ranks agree on eager is tested by tests/ranks and by test_replicated_values of test_ranks.py
@pytest.mark.parametrize(("agree", "engines"), [("1", [{"eager"}, {"eager"}]), ("0", [{"eager"}, {"eager", "tvm"}])])
def test_engines_that_differ_between_the_ranks(agree: str, engines: list[set[str]], tmp_path: Path) -> None:
    """Eager runs the graph on all ranks, unless each is to choose for itself. The ranks issue the same collectives in the same order, whoever
    runs what is between them."""
    ranks = run_ranks(
        rank_programs.chain,
        tmp_path,
        ({"HYBRID_RANKS_AGREE": agree, "HYBRID_DISABLE_ENGINES": "tvm"}, {"HYBRID_RANKS_AGREE": agree}),
    )
    assert [rank["engines"] for rank in ranks] == engines
    torch.testing.assert_close([rank["results"] for rank in ranks], chain_reference())


def test_regions_that_fail_on_one_rank(found: list[dict[str, Any]]) -> None:
    """Regions that raise in a later call on one rank are run by eager there, in that very call, and no collective runs twice."""
    ranks = [rank["failing_regions"] for rank in found]
    assert [rank["failed"] for rank in ranks] == [3, 0]
    torch.testing.assert_close([rank["results"] for rank in ranks], chain_reference())


def test_collectives_waited_for_late(found: list[dict[str, Any]]) -> None:
    """Nothing touches what a collective still writes: results behind views, in lists and in given memory are complete when they are read."""
    for rank in found:
        torch.testing.assert_close(rank["overlapping"]["results"], rank["overlapping"]["expected"])


def test_an_error_on_one_rank_reaches_the_others(tmp_path: Path) -> None:
    """Under HYBRID_STRICT a region that fails raises on its rank; the others raise, and do not wait, as soon as that rank has left."""
    failed, left = run_ranks(rank_programs.failing_regions, tmp_path, ({"HYBRID_STRICT": "1"},) * WORLD)
    assert "RegionError" in failed["error"]
    assert "the engine's third call fails" in failed["error"]
    assert "by peer" in left["error"]


def _gradients(model: nn.Module, ranks: Sequence[int]) -> list[Gradients]:
    """The gradients of each step, averaged over the ranks' batches, in eager and one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            (model(batches(rank)[step]).square().mean() / len(ranks)).backward()
        history.append(gradients_of(model))
        optimizer.step()
    return history


def _check_gradients(ranks: Sequence[dict[str, Any]], expected: list[Gradients]) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["gradients"], expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(ranks[0]["gradients"], ranks[1]["gradients"], rtol=0, atol=0)


@pytest.mark.full  # two processes that both compile
def test_data_parallel(tmp_path: Path) -> None:
    """DDP: each rank compiles the pieces that DDPOptimizer cuts; the gradients of every step equal eager's, and are the same on both."""
    ranks = run_ranks(rank_programs.data_parallel, tmp_path)
    _check_gradients(ranks, _gradients(network(), range(WORLD)))
    assert all(rank["graphs"] >= 3 for rank in ranks)


@pytest.mark.full
def test_fully_sharded_by_block(tmp_path: Path) -> None:
    """FSDP2: blocks sharded and compiled one by one; the gradients of every step equal eager's, and are the same on both ranks."""
    ranks = run_ranks(rank_programs.fully_sharded, tmp_path)
    _check_gradients(ranks, _gradients(blocks(), range(WORLD)))
    assert all(rank["graphs"] >= 1 for rank in ranks)


@pytest.mark.full  # two processes that both compile forward and backward; `make test` has collectives in graphs above
@pytest.mark.parametrize(
    "settings", [({}, {}), ({"HYBRID_DISABLE_ENGINES": "tvm"}, {})], ids=["same engines", "other engines"]
)
def test_tensor_parallel(settings: Sequence[dict[str, str]], tmp_path: Path) -> None:
    """DTensor, the collectives in the graph: gradients and results equal eager's on both ranks, whoever runs what. What both ranks compute
    for themselves, as a bias's gradient, is the same to the last bit."""
    ranks = run_ranks(rank_programs.tensor_parallel, tmp_path, settings)
    model = blocks()
    _check_gradients(ranks, _gradients(model, [0]))
    for rank in ranks:
        with torch.no_grad():
            torch.testing.assert_close(rank["inference"], [model(x) for x in batches(0)], rtol=1e-3, atol=1e-5)
        assert rank["graphs"] >= 2
