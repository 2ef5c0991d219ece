"""TensorRT's log as ours, by the thread in which something is said. No TensorRT is needed for that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_hybrid_backend.engines.tensorrt.log import TheirLog

OURS = "torch_hybrid_backend.engines.tensorrt.log"


@pytest.fixture
def theirs() -> Iterator[logging.Logger]:
    """A logger as torch_tensorrt has it, which passes on what is a warning or worse."""
    logger = logging.getLogger("theirs")
    logger.setLevel(logging.WARNING)
    yield logger
    logger.filters.clear()


def test_what_is_said_in_a_section_is_ours_and_what_others_say_is_not(
    theirs: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is at most INFO of ours: what it means for the user is in what is raised."""
    log = TheirLog(theirs)
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(1) as other:
        with log.heard() as heard:
            theirs.error("ours")
            theirs.info("below their level")
            other.submit(theirs.error, "another's").result(10)
        theirs.warning("afterwards")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (OURS, "INFO", "TensorRT: ours"),
        ("theirs", "ERROR", "another's"),
        ("theirs", "WARNING", "afterwards"),
    ]
    assert heard.errors == ["ours"]
    assert heard.why == "ours"


def test_a_build_is_heard_at_every_level_and_from_its_own_threads(
    theirs: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """While another thread's records go where they go, and only from their level on."""
    log = TheirLog(theirs)
    text = (
        "Layers:\nName: linear, LayerType: gemm, Inputs: [ Datatype: Half], Outputs: [ Datatype: Half], TacticName: x"
    )
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(1) as other:
        with log.heard(fully=True) as heard:
            other.submit(theirs.debug, "of a thread of the builder").result(10)
            theirs.debug(text)
        assert heard.why == "it says no reason"
    assert heard.layers == ["gemm: linear (Half -> Half)"]
    assert [record.getMessage() for record in caplog.records][:1] == ["TensorRT: of a thread of the builder"]
    assert theirs.level == logging.WARNING


def test_sections_of_threads_overlap(theirs: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """The first to come is the first to go: each hears its own, and the level is as it was."""
    log = TheirLog(theirs)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        sections = [log.heard(fully=True), log.heard(fully=True)]
        heard = [t.submit(s.__enter__).result(10) for t, s in zip((first, second), sections, strict=True)]
        for thread, word in ((first, "one"), (second, "two")):
            thread.submit(theirs.error, word).result(10)
        first.submit(sections[0].__exit__, None, None, None).result(10)
        assert theirs.level == logging.DEBUG
        second.submit(theirs.error, "three").result(10)
        second.submit(sections[1].__exit__, None, None, None).result(10)
    assert [each.errors for each in heard] == [["one"], ["two", "three"]]
    assert theirs.level == logging.WARNING


def test_a_level_that_somebody_sets_meanwhile_stays(theirs: logging.Logger) -> None:
    """A user's, in another thread."""
    with TheirLog(theirs).heard(fully=True):
        theirs.setLevel(logging.ERROR)
    assert theirs.level == logging.ERROR
