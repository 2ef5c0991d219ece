"""Ranks that agree on how they compute, in processes; what they agree by: tests/ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ecosystem import rank_programs
from tests.ecosystem.rank_programs import chain_reference
from tests.ecosystem.ranks import free_port, needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize("agree", [True, pytest.param(False, marks=pytest.mark.full)])
def test_replicated_values(agree: bool, tmp_path: Path) -> None:
    """Values that ranks compute for themselves of equal ones are equal to the last bit, though only rank 0 would choose the engine. Without
    agreement they are not."""
    agreement = {"HYBRID_RANKS_AGREE": str(int(agree))}
    first, second = run_ranks(
        rank_programs.replicated, tmp_path, ({**agreement, "HYBRID_PREFER_KERNELS": "1"}, agreement)
    )
    torch.testing.assert_close(first["results"], second["results"])
    assert all(map(torch.equal, first["results"], second["results"])) == agree
    assert not all(map(torch.equal, first["results"], first["eager"]))


@pytest.mark.full
def test_a_cold_cache_beside_a_warm_one(tmp_path: Path) -> None:
    """A rank whose kernels are on disk waits for the one that compiles them, and both run the same."""
    for call in ("cold", "warm beside cold"):
        (tmp_path / call).mkdir()
        settings = tuple(
            {"HYBRID_CACHE_DIR": str(tmp_path / (f"{rank}" if call == "cold" or rank else "new"))} for rank in (0, 1)
        )
        ranks = run_ranks(rank_programs.tensor_parallel, tmp_path / call, settings)
        torch.testing.assert_close(ranks[0]["inference"], ranks[1]["inference"], rtol=0, atol=0)
        torch.testing.assert_close(ranks[0]["gradients"], ranks[1]["gradients"], rtol=0, atol=0)


@pytest.mark.full
def test_a_rank_that_does_not_compile(tmp_path: Path) -> None:
    """Nobody waits for it longer than patience says; all run in eager."""
    ranks = run_ranks(rank_programs.one_in_eager, tmp_path)
    torch.testing.assert_close([rank["results"] for rank in ranks], chain_reference())
    written = (tmp_path / "0.err").read_text()
    assert written.count("eager runs a graph with collectives on all ranks") == 1
    assert "rank 1 did not come within" in written


@pytest.mark.full
def test_a_rank_that_compiles_alone(tmp_path: Path) -> None:
    """A rank sees that the others run what they have, and does not wait as long as for one that may come."""
    ranks = run_ranks(rank_programs.compiled_alone, tmp_path)
    for first, second in zip(ranks[0]["results"], ranks[1]["results"], strict=True):
        torch.testing.assert_close(first, second)
    assert ranks[0]["seconds"] < 30
    assert "rank 1 has this call compiled already" in (tmp_path / "0.err").read_text()


def test_an_error_of_any_kind_in_a_first_call(tmp_path: Path) -> None:
    """The other ranks hear of it, and run in eager; the error is raised as it is."""
    ranks = run_ranks(rank_programs.raising_first_call, tmp_path)
    torch.testing.assert_close([[rank["result"]] for rank in ranks], [calls[:1] for calls in chain_reference()])
    assert ranks[0]["seconds"] < 40
    assert "rank 1 raised KeyError in its first call" in (tmp_path / "0.err").read_text()


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    """A rank that is killed ends the others' calls, with an error that names it."""
    ranks = run_ranks(rank_programs.killed_rank, tmp_path, killed=1)
    assert "RankError: rank 1 of the job of 2 no longer takes part" in ranks[0]["error"]


@pytest.mark.full
def test_a_dead_rank_of_four_is_named(tmp_path: Path) -> None:
    """The error names it on every rank; those that met it first, and end, are not taken for dead."""
    *others, _ = run_ranks(rank_programs.killed_rank, tmp_path, ({},) * 4, killed=3)
    for rank in others:
        assert "RankError: rank 3 of the job of 4 no longer takes part" in rank["error"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("killed", "named"), [(2, "rank 2 of the job of 3 no longer takes part"), (0, "Rank 0 holds it, or the agent")]
)
def test_a_dead_rank_of_a_job_that_met_over_tcp(killed: int, named: str, tmp_path: Path) -> None:
    """The error names it; so does the one for rank 0, with which the store is gone."""
    store = {"RANKS_STORE": f"tcp://127.0.0.1:{free_port()}"}
    ranks = run_ranks(rank_programs.killed_rank, tmp_path, (store,) * 3, killed=killed)
    for rank in range(3):
        assert rank == killed or named in ranks[rank]["error"]
