"""Progress on a terminal, in a file, and silent."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from torch_hybrid_backend.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """The drawings, one by one."""
        return [line.strip() for line in self.getvalue().replace("\x1b[A", "").split("\r") if line.strip()]


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    """With a bar, the steps, the time so far and the time left, and the note; it is gone at the end, and what was said stays."""
    stream = Terminal()
    with Progress("tuning", 3, stream=stream) as progress:
        for note in ("a", "", "c"):
            time.sleep(0.15)
            progress.step(note)
        progress.say("it gained 3%")
    first = stream.lines[0]
    assert first.startswith("tuning ")
    assert "0/3 [00:00]" in first
    assert any("1/3 [00:00<00:00], a" in line for line in stream.lines)
    assert any("3/3 [00:00<00:00], c" in line for line in stream.lines)
    assert "it gained 3%\n" in stream.getvalue()
    assert stream.getvalue().endswith("\r")


def test_steps_that_others_count() -> None:
    """Their number may grow meanwhile."""
    stream = Terminal()
    with Progress("tuning", stream=stream) as progress:
        for done, total in ((2, 5), (5, 9)):
            time.sleep(0.15)
            progress.reach(done, total, "3% less")
    assert any("2/5 [00:00<00:00], 3% less" in line for line in stream.lines)
    assert any("5/9 [00:00<00:00], 3% less" in line for line in stream.lines)


def test_a_terminal_that_has_no_size_is_drawn_on() -> None:
    """A pseudo-terminal whose size nobody set has no rows and columns."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream, Progress("tuning", 3, stream=stream) as progress:
        assert os.get_terminal_size(slave) == (0, 0)
        time.sleep(0.15)
        progress.step("a")
        assert "tuning" in os.read(master, 4096).decode()
    os.close(master)


def test_a_file_gets_only_what_is_said() -> None:
    """A log of a server or of CI is no place for a line that is rewritten."""
    stream = io.StringIO()
    with Progress("tuning", 3, stream=stream) as progress:
        progress.step("a")
        progress.say("it gained 3%")
    assert stream.getvalue() == "it gained 3%\n"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_it_can_be_silent(stream: io.StringIO) -> None:
    """Stages of a silent task are silent too."""
    with Progress("first call", shown=False, stream=stream) as progress:
        progress.say("nothing")
        with Progress("compiling kernels", 2) as stage:
            stage.step()
            stage.say("nothing")
    assert stream.getvalue() == ""


def test_a_stage_shares_the_line_of_its_task() -> None:
    """After it the task has the line again."""
    stream = Terminal()
    with Progress("ResNet", stream=stream) as progress:
        with Progress("compiling kernels", 56) as stage:
            time.sleep(0.15)
            stage.step()
        time.sleep(0.15)
        progress.at("timing")
    assert any(line.startswith("ResNet: compiling kernels ") and "1/56 [00:00]" in line for line in stream.lines)
    assert stream.lines[-1].startswith("ResNet [00:00], timing")


def test_what_is_short_is_not_shown() -> None:
    """A second begins to count where the task began, in an earlier part of it too."""
    stream = Terminal()
    with Progress("ResNet", delay_s=2.0, stream=stream) as progress:
        progress.at("tracing")
    assert stream.lines == []
    with Progress("ResNet", delay_s=2.0, spent_s=3.0, stream=stream) as progress:
        progress.at("compiling")
    assert any("[00:03]" in line for line in stream.lines)


def test_the_seconds_go_on_where_a_step_takes_long() -> None:
    """Something is drawn without any event."""
    stream = Terminal()
    with Progress("ResNet", delay_s=0.5, stream=stream):
        time.sleep(2.2)
    assert any("[00:02]" in line for line in stream.lines)


def test_threads_have_lines_of_their_own() -> None:
    """A task of another thread is no stage of this one's."""
    stream = Terminal()

    def work() -> None:
        with Progress("in the background", stream=stream):
            pass

    with Progress("ResNet", stream=stream):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert any(line.startswith("in the background ") for line in stream.lines)
