"""TensorRT's messages in this package's log, by the thread that logs them. No TensorRT is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torch_hybrid_backend.engines.tensorrt.log import TensorRTLog

OURS = "torch_hybrid_backend.engines.tensorrt.log"


@pytest.fixture
def theirs() -> Iterator[logging.Logger]:
    """A logger like torch_tensorrt's, with the level WARNING."""
    logger = logging.getLogger("theirs")
    logger.setLevel(logging.WARNING)
    yield logger
    logger.filters.clear()


def test_what_is_said_in_a_section_is_ours_and_what_others_say_is_not(
    theirs: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors are logged at INFO at most: the exception says what they mean for the user."""
    log = TensorRTLog(theirs)
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(1) as other:
        with log.collect() as messages:
            theirs.error("ours")
            theirs.info("below their level")
            other.submit(theirs.error, "another's").result(10)
        theirs.warning("afterwards")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (OURS, "INFO", "TensorRT: ours"),
        ("theirs", "ERROR", "another's"),
        ("theirs", "WARNING", "afterwards"),
    ]
    assert messages.errors == ["ours"]
    assert messages.why == "ours"


def test_a_build_is_heard_at_every_level_and_from_its_own_threads(
    theirs: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile, records of other threads pass at their logger's own level."""
    log = TensorRTLog(theirs)
    text = (
        "Layers:\nName: linear, LayerType: gemm, Inputs: [ Datatype: Half], Outputs: [ Datatype: Half], TacticName: x"
    )
    with caplog.at_level(logging.DEBUG), ThreadPoolExecutor(1) as other:
        with log.collect(fully=True) as messages:
            other.submit(theirs.debug, "of a thread of the builder").result(10)
            theirs.debug(text)
        assert messages.why == "TensorRT gives no reason"
    assert messages.layers == ["gemm: linear (Half -> Half)"]
    assert [record.getMessage() for record in caplog.records][:1] == ["TensorRT: of a thread of the builder"]
    assert theirs.level == logging.WARNING


def test_sections_of_threads_overlap(theirs: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that enters first leaves first. Each collects its own messages, and the level is as before."""
    log = TensorRTLog(theirs)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        sections = [log.collect(fully=True), log.collect(fully=True)]
        messages = [t.submit(s.__enter__).result(10) for t, s in zip((first, second), sections, strict=True)]
        for thread, word in ((first, "one"), (second, "two")):
            thread.submit(theirs.error, word).result(10)
        first.submit(sections[0].__exit__, None, None, None).result(10)
        assert theirs.level == logging.DEBUG
        second.submit(theirs.error, "three").result(10)
        second.submit(sections[1].__exit__, None, None, None).result(10)
    assert [each.errors for each in messages] == [["one"], ["two", "three"]]
    assert theirs.level == logging.WARNING


def test_a_level_that_somebody_sets_meanwhile_stays(theirs: logging.Logger) -> None:
    """The user sets the level in another thread."""
    with TensorRTLog(theirs).collect(fully=True):
        theirs.setLevel(logging.ERROR)
    assert theirs.level == logging.ERROR
