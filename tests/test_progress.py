"""Progress on a terminal, in a log file, and silent."""

from __future__ import annotations

import io

import pytest

from torch_hybrid_backend.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _three_steps(stream: io.StringIO, *, shown: bool = True, seconds: float = 1.0) -> str:
    now = 0.0

    def clock() -> float:
        return now

    with Progress("tuning", 3, shown=shown, stream=stream, clock=clock) as progress:
        for note in ("a", "", "c"):
            now += seconds
            progress.step(note)
        progress.say("it gained 3%")
    return stream.getvalue()


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    """With a bar, the steps, the time left by what the steps so far took, and the note."""
    text = _three_steps(Terminal())
    first, *_, last = text.split("\r\x1b[K")[1:]
    assert first == "tuning: |########                | 1/3, 2 s left, a"
    assert "| 3/3, 0 s left, c" in text
    assert last == "it gained 3%\n\n"


def test_a_file_has_a_plain_line_now_and_then() -> None:
    """No more than one in ten seconds, and what is said in any case."""
    assert _three_steps(io.StringIO()) == "it gained 3%\n"
    lines = _three_steps(io.StringIO(), seconds=10.0).splitlines()
    assert lines == ["tuning: 1/3, 20 s left, a", "tuning: 2/3, 10 s left", "tuning: 3/3, 0 s left, c", "it gained 3%"]


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_it_can_be_silent(stream: io.StringIO) -> None:
    """Not even a line feed."""
    assert _three_steps(stream, shown=False) == ""


def test_what_is_being_done_counts_for_no_step() -> None:
    """Before the first step nothing tells how long the rest takes."""
    stream = Terminal()
    with Progress("benchmarks", 2, stream=stream, clock=lambda: 0.0) as progress:
        progress.at("ResNet-50")
        progress.step()
    assert stream.getvalue().split("\r\x1b[K")[1] == "benchmarks: |                        | 0/2, ResNet-50"
