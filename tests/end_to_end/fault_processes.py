"""Real processes to break things in, without waiting for `import torch` each time.

A nursery process imports everything once and forks: each child is a process of its own, with its own environment, limits and end, that has
compiled nothing yet. Its script finds `check`, `model` and `namespace` (see `_PRELUDE`).

    done = nursery.run("check(6)", tmp_path)
    assert done.answers == ["tvm"] and not done.warnings
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 150  # a child that is not done by then hangs: on an idle machine each takes a few seconds

_NURSERY = """
import json, os, signal, sys, tempfile, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with it ignored
import torch, torch._dynamo
import torch_hybrid_backend.backend
from tests.end_to_end import models
os.environ.clear()  # each child gets its own

def ended(child, seconds):
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hangs"
        time.sleep(0.01)

def answer(value):
    answers.write(json.dumps(value) + "\\n")
    answers.flush()

orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
script = None
for line in orders:
    order = json.loads(line)
    if "wait" in order:
        answer(ended(order["wait"], order["seconds"]))
        continue
    child = os.fork()
    if child:
        answer(child)
        continue
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # as TMPDIR says now
    for descriptor, path in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    orders.close()
    answers.close()
    os.chdir(order["folder"])
    script = order["script"]
    break
if script is not None:
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
"""

_PRELUDE = '''
import ctypes, functools, logging, os, signal, sys, threading, time
import torch
from torch import nn
from torch_hybrid_backend.backend import compile_graph
from torch_hybrid_backend.config import Config

logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 16), nn.GELU()).eval()

def say(*words):
    print("answer", *words, flush=True)

def compiled(function, **options):
    """The function compiled by the backend, and the list that its plans go to."""
    plans = []
    config = Config.from_env(os.environ)
    return torch.compile(function, backend=functools.partial(compile_graph, config=config, on_plan=plans.append), **options), plans

def check(rows=6, function=model, inputs=None):
    """Compile for so many rows, call twice, compare with eager; says which engines did it."""
    inputs = (torch.randn(rows, 24),) if inputs is None else inputs
    fast, plans = compiled(function, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)
    say(*sorted({region.engine for plan in plans for region in plan.regions}))

def workers():
    """The kernel compiler processes of this process."""
    return [int(child) for child in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()]

libc = ctypes.CDLL(None, use_errno=True)

def system(name, *arguments):
    if getattr(libc, name)(*arguments) != 0:
        print("skip", f"{name} is not allowed here: {os.strerror(ctypes.get_errno())}", flush=True)
        sys.exit()

def namespace(user):
    """Be user number `user`, who is in no list of users, with mounts of one's own."""
    outside, group = os.getuid(), os.getgid()
    system("unshare", 0x10000000 | 0x00020000)  # CLONE_NEWUSER | CLONE_NEWNS
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {outside} 1"), ("gid_map", f"{user} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    system("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE

def mount(folder, options, flags=0):
    """A small file system in memory, gone with this process."""
    system("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode())
'''


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of a child: `status` is negative for a signal, or "hangs"; `answers` are the lines it said."""

    status: int | str
    out: str
    err: str

    @property
    def answers(self) -> list[str]:
        return [line.removeprefix("answer").strip() for line in self.out.splitlines() if line.startswith("answer")]

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("WARNING")]


class Child:
    """A child at work. Owns nothing: the nursery reaps it."""

    def __init__(self, nursery: Nursery, process: int, mark: str, folder: Path) -> None:
        self._nursery, self._mark, self._folder = nursery, mark, folder
        self.process = process

    def until(self, text: str) -> None:
        """Wait until the child has said it."""
        said = self._folder / "out"
        _patiently(lambda: said.exists() and text in said.read_text(), f"the child never said {text!r}")

    def family(self) -> list[int]:
        """Processes that the child started, directly or not, by process id."""
        return _marked(self._mark)

    def done(self) -> Done:
        """Wait for the child's end; fails where it hangs or leaves a process behind, skips where it asks to."""
        status = self._nursery.ask({"wait": self.process, "seconds": HANG_S})
        out, err = ((self._folder / name).read_text(errors="replace") for name in ("out", "err"))
        _patiently(lambda: not _marked(self._mark), f"processes are left behind: {_marked(self._mark)}\n{err}")
        if out.startswith("skip"):
            pytest.skip(out.splitlines()[0].removeprefix("skip "))
        assert status != "hangs", f"it hangs:\n{out}\n{err}"
        assert isinstance(status, int)
        return Done(status, out, err)


class Nursery:
    """The process that forks. Owns it; `close` ends it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, order: dict[str, object]) -> object:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, script: str, folder: Path, **environment: str | None) -> Child:
        """A child that runs the script in an empty folder made in `folder`, which its cache is in too; None unsets a variable."""
        mark = uuid.uuid4().hex
        own = folder / f"child-{mark[:8]}"
        own.mkdir()
        settings: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HYBRID_")},
            "HYBRID_CACHE_DIR": str(folder / "cache"),
            "HYBRID_PLACEMENT": "estimate",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "2",
            "MARK": mark,
            **environment,
        }
        order = {
            "environment": {name: value for name, value in settings.items() if value is not None},
            "out": str(own / "out"),
            "err": str(own / "err"),
            "folder": str(own),
            "script": _PRELUDE + script,
        }
        process = self.ask(order)
        assert isinstance(process, int)
        return Child(self, process, mark, own)

    def run(self, script: str, folder: Path, **environment: str | None) -> Done:
        return self.start(script, folder, **environment).done()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _marked(mark: str) -> list[int]:
    """Processes that the child with this mark started, directly or not; the child itself was forked, and does not show it."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"MARK={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # gone meanwhile, or another user's
                continue
    return found


def _patiently(true: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + 30
    while not true():
        if time.monotonic() > until:
            pytest.fail(otherwise)
        time.sleep(0.02)
