"""Models of libraries that users combine with the backend give eager's results, whole, without a fault.

`catalogue/` has the models. Most libraries are in a folder apart, and each of their models runs in a process of its own; a few small ones
run here, in every run of the tests. The judge is that of the zoo (`trial`); speed is no matter here but for docs/ecosystem.md.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from tests.ecosystem.case import Case
from tests.ecosystem.catalogue import CASES, images
from tests.ecosystem.libraries import missing
from tests.ecosystem.run import try_alone
from tests.ecosystem.trial import Outcome, Trial, attempt

_THREADS = 2


@pytest.fixture(autouse=True)
def placement_of_users(settings: pytest.MonkeyPatch) -> None:
    """Placement times its candidates, as it does for users: estimates leave the small products of text generation to eager."""
    settings.delenv("HYBRID_PLACEMENT")


def _judge(case: Case, outcome: Outcome) -> None:
    assert not outcome.wrong or case.ill_conditioned
    assert not case.unexplained(outcome.faults)
    assert outcome.graphs or case.reason  # else nothing was compiled, and eager was compared with itself


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.quick])
def test_small_models_equal_eager(name: str) -> None:
    """Three calls with different inputs equal eager's, or are as near to float64; no warning of the backend."""
    case = CASES[name]
    if missing(case.library):
        pytest.skip(missing(case.library))
    _judge(case, attempt(case))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [case.name for case in CASES.values() if not case.quick])
def test_models_equal_eager(name: str, tmp_path: Path) -> None:
    """The same of every other model, each in a process of its own."""
    case = CASES[name]
    if missing(case.library):
        pytest.skip(missing(case.library))
    log = tmp_path / "log"
    found = try_alone(Trial(name, _THREADS, 0.0), log)
    assert "raises" not in found or case.reason, f"{found['raises']}\n{log.read_text()[-4000:]}"
    if "raises" not in found:
        _judge(case, Outcome(**found))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_models_of_timm_are_those_of_the_seed() -> None:
    """The forty models of timm were drawn, not chosen: the seed that is printed draws them again."""
    if missing("timm"):
        pytest.skip(missing("timm"))
    print(f"timm's models are drawn by seed {images.SEED}: {', '.join(images.DRAWN)}")
    with multiprocessing.get_context("spawn").Pool(1) as alone:  # timm stays out of this process
        assert alone.apply(images.draw, (images.SEED,)) == images.DRAWN
