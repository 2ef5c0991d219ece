"""Builds in processes: results, deadlines, cancellation, remembered failures. The builders are real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_hybrid_backend.builds.builds import Builds
from torch_hybrid_backend.builds.failures import REMEMBERED_S
from torch_hybrid_backend.errors import (
    AccuracyError,
    BuildCancelledError,
    CompileError,
    CompilerCrashError,
    DeadlineError,
)
from torch_hybrid_backend.storage.store import Store

ROOT = Path(__file__).parents[2]

# What the child imports: the builders of these tests. Each says in the file of its request that it ran.
BUILDERS = """
import os, signal, sys, time
from pathlib import Path

def leave_process_id(note):
    # Whole at once: who sees the file can read it.
    unfinished = Path(note + ".new")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(note)

def upper(request, going_on):
    Path(request.decode()).open("a").write("x")
    assert going_on(0.5)
    print("this is no answer")
    return request.upper()

def until_told(request, going_on):
    leave_process_id(request.decode())
    while going_on(0.25):
        time.sleep(0.005)
    raise RuntimeError("stopped half-way")

def deaf(request, going_on):
    assert going_on(0.1)
    leave_process_id(request.decode())
    while True:
        time.sleep(60)

def busy(request, going_on):
    while True:
        pass

def fails(request, going_on):
    Path(request.decode()).open("a").write("x")
    raise ValueError("the layer is too wide")

def dies(request, going_on):
    sys.stderr.write("bad memory\\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)

def slow(request, going_on):
    with Path(request.decode()).open("a") as file:
        file.write("x")
    while not Path(request.decode() + ".go").exists():
        if not going_on(0.5):
            raise RuntimeError("stopped half-way")
        time.sleep(0.005)
    return request.upper()

def starved(request, going_on):
    Path(request.decode()).open("a").write("x")
    raise OSError(28, "No space left on device")

def wrong(request, going_on):
    return "text"
"""


class Workshop:
    """A store, a clock, and builds with the builders above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1_000_000.0
        self.store = Store(folder / "store")
        self.builds = self.anew()

    def anew(self, grace_s: float = 20.0, at_once: int = 2) -> Builds:
        """Builds of another process with the same store."""
        return Builds(self.store, "engines", grace_s=grace_s, at_once=at_once, clock=lambda: self.now)

    def note(self, name: str) -> Path:
        """The file that a builder writes when it runs."""
        return self.folder / name


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "builders_of_tests.py").write_text(BUILDERS)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    (tmp_path / "store").mkdir(mode=0o700)
    made = Workshop(tmp_path)
    yield made
    made.builds.close()


def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds, for at most half a minute."""
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_are_kept(shop: Workshop) -> None:
    """A key is built once: concurrent, later and other processes' requests share the result. A damaged entry is built anew."""
    request = str(shop.note("ran")).encode()
    called = threading.Event()
    first = shop.builds.start("key", "builders_of_tests:upper", request, 60)
    first.when_done(called.set)
    second = shop.builds.start("key", "builders_of_tests:upper", request, 60)
    assert first.result(60) == second.result(60) == request.upper()
    assert called.wait(10)
    assert first.done
    assert first.progress == 1.0
    found = shop.anew().start("key", "builders_of_tests:upper", request, 60)
    assert found.done
    assert found.result(0) == request.upper()
    assert shop.note("ran").read_text() == "x"

    path = shop.store.path_of("engines", "key")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    assert shop.anew().start("key", "builders_of_tests:upper", request, 60).result(60) == request.upper()
    assert shop.anew().start("key", "builders_of_tests:upper", request, 60, rebuild=True).result(60) == request.upper()
    assert shop.note("ran").read_text() == "xxx"


def test_failures_are_remembered_for_a_day(shop: Workshop) -> None:
    """A failed build is not repeated within a day, by this process or another. Other keys are built, and the same key a day later."""
    request = str(shop.note("ran")).encode()
    with pytest.raises(CompileError, match="ValueError: the layer is too wide") as raised:
        shop.builds.start("key", "builders_of_tests:fails", request, 60).result(60)
    assert "in fails" in raised.value.__notes__[0]
    shop.now += REMEMBERED_S - 1
    again = shop.anew().start("key", "builders_of_tests:fails", request, 60)
    assert again.done
    with pytest.raises(CompileError, match="the layer is too wide"):
        again.result(0)
    assert shop.note("ran").read_text() == "x"
    with pytest.raises(CompileError):
        shop.anew().start("other", "builders_of_tests:fails", request, 60).result(60)
    shop.now += 1
    with pytest.raises(CompileError):
        shop.anew().start("key", "builders_of_tests:fails", request, 60).result(60)
    assert shop.note("ran").read_text() == "xxx"


def test_results_of_no_use_are_not_built_again(shop: Workshop) -> None:
    """A rejected result is removed from the store, and counts as a failure for a day, in other processes too."""
    request = str(shop.note("a")).encode()
    shop.builds.start("a", "builders_of_tests:upper", request, 60).result(60)
    shop.builds.reject("a", AccuracyError("too far from eager"))
    again = shop.anew().start("a", "builders_of_tests:upper", request, 60)
    with pytest.raises(AccuracyError, match="too far from eager"):
        again.result(60)
    assert shop.note("a").read_text() == "x"
    shop.now += REMEMBERED_S
    shop.anew().start("a", "builders_of_tests:upper", request, 60).result(60)
    assert shop.note("a").read_text() == "xx"


def test_what_stops_a_build(shop: Workshop) -> None:
    """A crash, a result that is no bytes, and an illegal entry each raise an error that says so."""
    dies = shop.builds.start("dies", "builders_of_tests:dies", b"", 60)
    wrong = shop.builds.start("wrong", "builders_of_tests:wrong", b"", 60)
    with pytest.raises(CompilerCrashError, match=r"SIGSEGV(.|\n)*bad memory"):
        dies.result(60)
    with pytest.raises(CompilerCrashError):  # remembered as what it was
        shop.anew().start("dies", "builders_of_tests:dies", b"", 60).result(0)
    with pytest.raises(CompileError, match="type str; it must be bytes"):
        wrong.result(60)
    with pytest.raises(CompileError, match="No module named 'nowhere'"):
        shop.builds.start("nowhere", "nowhere:function", b"", 60).result(60)
    with pytest.raises(CompileError, match=r"must be package\.module:function"):
        shop.builds.start("key", "builders_of_tests", b"", 60)


def test_a_deadline(shop: Workshop) -> None:
    """At the deadline a builder is told to stop. A builder that does not stop is killed after the grace period. Neither failure is remembered:
    no processor worked, so other load may be the cause."""
    polite = shop.builds.start("polite", "builders_of_tests:until_told", str(shop.note("polite")).encode(), 1.0)
    rude = shop.anew(grace_s=0.05).start("rude", "builders_of_tests:deaf", str(shop.note("rude")).encode(), 1.0)
    with pytest.raises(TimeoutError):
        polite.result(0.01)
    with pytest.raises(DeadlineError, match=r"within 1 s; it stopped when it was told to"):
        polite.result(60)
    with pytest.raises(DeadlineError, match="and was killed"):
        rude.result(60)
    for name in ("polite", "rude"):
        if shop.note(name).exists():  # on a busy machine it may not have come so far
            assert not is_alive(int(shop.note(name).read_text()))
        request = str(shop.note(f"{name} again")).encode()
        assert shop.anew().start(name, "builders_of_tests:upper", request, 60).result(60) == request.upper()


def test_a_builder_that_is_too_slow(shop: Workshop) -> None:
    """The error has the processor time of a slow builder, which decides whether the failure is remembered."""
    with pytest.raises(DeadlineError) as late:
        shop.anew(grace_s=0.0).start("slow", "builders_of_tests:busy", b"", 6.0).result(60)
    assert late.value.had_s is not None
    assert 0.5 < late.value.had_s < 8.0


def test_what_is_not_remembered(shop: Workshop) -> None:
    """A full disk, and a builder that did not work, are no lasting failures: the build is repeated at once."""
    request = str(shop.note("ran")).encode()
    for _ in range(2):
        with pytest.raises(CompileError, match="No space left"):
            shop.builds.start("full", "builders_of_tests:starved", request, 60).result(60)
    assert shop.note("ran").read_text() == "xx"
    shop.note("ran.go").touch()
    with pytest.raises(DeadlineError):
        shop.anew(grace_s=0.0).start("late", "builders_of_tests:deaf", request, 0.01).result(60)
    assert shop.anew().start("late", "builders_of_tests:slow", request, 60).result(60) == request.upper()


_ASKER = """
import os, sys, time
sys.path.insert(0, {path!r})
from pathlib import Path
from torch_hybrid_backend.builds.builds import Builds
from torch_hybrid_backend.storage.store import Store
builds = Builds(Store(Path({store!r})), "engines")
print("ready", flush=True)
build = builds.start("key", "builders_of_tests:slow", {request!r}, {deadline_s})
try:
    print(build.result(60).decode())
except Exception as error:
    print(type(error).__name__, error)
"""


def asker(shop: Workshop, deadline_s: float = 60) -> subprocess.Popen[str]:
    """Another process that builds the key "key" by `slow`, and has started."""
    request = str(shop.note("ran")).encode()
    script = _ASKER.format(
        path=str(shop.folder / "path"), store=str(shop.store.root), request=request, deadline_s=deadline_s
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def told(process: subprocess.Popen[str]) -> str:
    """The rest of the process's output."""
    return process.communicate(timeout=60)[0].strip()


def test_two_processes_build_a_key_once(shop: Workshop) -> None:
    """A key is built by one process, and the other takes the result. Meanwhile this process builds other keys, reaches its deadline, which is
    not remembered, and may cancel."""
    first, second = asker(shop), asker(shop)
    eventually(lambda: shop.note("ran").exists())
    request = str(shop.note("ran")).encode()
    builds = shop.anew(at_once=1)
    late = builds.start("key", "builders_of_tests:slow", request, 0.3)
    other = builds.start("other", "builders_of_tests:upper", str(shop.note("other")).encode(), 60)
    with pytest.raises(DeadlineError, match="by another process, which is still at it"):
        late.result(60)
    assert other.result(60)
    unwanted = builds.start("key", "builders_of_tests:slow", request, 60)
    unwanted.cancel()
    with pytest.raises(BuildCancelledError):
        unwanted.result(60)
    waiting = builds.start("key", "builders_of_tests:slow", request, 60)
    time.sleep(0.3)
    assert not waiting.done
    shop.note("ran.go").touch()
    assert waiting.result(60) == request.upper()
    assert told(first) == told(second) == request.decode().upper()
    assert shop.note("ran").read_text() == "x"
    assert {usage.kind for usage in shop.store.usage()} == {"engines"}
    assert not list(shop.store.root.rglob(".lock"))


def test_a_builder_whose_process_dies_is_replaced(shop: Workshop) -> None:
    """A waiting process takes over if the building one is killed, with the rest of its deadline."""
    first = asker(shop)
    eventually(lambda: shop.note("ran").exists())
    request = str(shop.note("ran")).encode()
    waiting, another = (shop.anew().start("key", "builders_of_tests:slow", request, 60) for _ in range(2))
    first.kill()
    first.wait()
    eventually(lambda: shop.note("ran").read_text() == "xx")
    shop.note("ran.go").touch()
    assert waiting.result(60) == another.result(60) == request.upper()
    assert shop.note("ran").read_text() == "xx"


def test_cancellation(shop: Workshop) -> None:
    """A build is stopped when all its users have cancelled, and is no remembered failure. With one user left it goes on."""
    request = str(shop.note("process")).encode()
    builds = shop.anew(at_once=1)
    first = builds.start("key", "builders_of_tests:until_told", request, 600)
    second = builds.start("key", "builders_of_tests:until_told", request, 600)
    waiting = builds.start("waiting", "builders_of_tests:upper", request, 600)
    eventually(lambda: first.progress == 0.25)
    assert builds.process_ids() == [int(shop.note("process").read_text())]
    first.cancel()
    first.cancel()
    assert not second.done
    waiting.cancel()
    second.cancel()
    with pytest.raises(BuildCancelledError):
        second.result(60)
    with pytest.raises(BuildCancelledError):
        waiting.result(60)
    eventually(lambda: not builds.process_ids())
    assert shop.store.usage() == []
    # The key is free again.
    assert builds.start("key", "builders_of_tests:upper", request, 600).result(60) == request.upper()


def test_closing_kills(shop: Workshop) -> None:
    """`close` ends all builders at once, even hanging ones. Waiting users get an error."""
    request = str(shop.note("process")).encode()
    build = shop.builds.start("key", "builders_of_tests:deaf", request, 600)
    eventually(lambda: build.progress == 0.1 and shop.note("process").exists())
    process = int(shop.note("process").read_text())
    shop.builds.close()
    assert not is_alive(process)
    with pytest.raises(BuildCancelledError):
        build.result(0)


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_a_process_that_ends_meanwhile(shop: Workshop, end: str) -> None:
    """A builder ends when its parent exits or is killed. No failure is remembered."""
    script = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(shop.folder / "path")!r})
        from pathlib import Path
        from torch_hybrid_backend.builds.builds import Builds
        from torch_hybrid_backend.storage.store import Store
        builds = Builds(Store(Path({str(shop.store.root)!r})), "engines")
        build = builds.start("key", "builders_of_tests:deaf", {str(shop.note("process")).encode()!r}, 600)
        while not (build.progress == 0.1 and Path({str(shop.note("process"))!r}).exists()):
            time.sleep(0.005)
        if {end == "is killed"}:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode == (0 if end == "leaves" else -9)
    process = int(shop.note("process").read_text())
    eventually(lambda: not is_alive(process))
    assert shop.store.usage() == []


def test_after_a_fork(shop: Workshop) -> None:
    """A forked child has none of its parent's builds. Waiting for one raises an error, cancelling one has no effect, and the child starts its
    own."""
    request = str(shop.note("ran")).encode()
    script = f"""
        import os, sys
        sys.path.insert(0, {str(shop.folder / "path")!r})
        from pathlib import Path
        from torch_hybrid_backend.builds.builds import Builds
        from torch_hybrid_backend.errors import BuildCancelledError
        from torch_hybrid_backend.storage.store import Store
        import json
        builds = Builds(Store(Path({str(shop.store.root)!r})), "engines")
        theirs = builds.start("theirs", "builders_of_tests:until_told", {request!r}, 600)
        child = os.fork()
        if child == 0:
            try:
                theirs.result()
            except BuildCancelledError as error:
                theirs.cancel()
                own = builds.start("own", "builders_of_tests:upper", {request!r}, 600).result(60)
                print(json.dumps([str(error), own.decode()]), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not theirs.done
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    why, own = json.loads(done.stdout)
    assert "belongs to the process" in why
    assert own == request.upper().decode()
