"""Temporary folders: they go with their process, however it ends."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torch_hybrid_backend.storage import temporary_folder
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temporary_folder, "_tidied", set())
    return tmp_path


def age(path: Path) -> None:
    """Make it as old as what an earlier process has left."""
    os.utime(path, (0, 0))


def in_process(script: str, directory: Path) -> str:
    """The output of a process that imports TemporaryFolder and whose folders are made there."""
    code = f"import os, signal\nfrom torch_hybrid_backend.storage.temporary_folder import TemporaryFolder\n{script}"
    environment = {**os.environ, "TMPDIR": str(directory)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout.strip()


def test_a_folder_goes_with_its_block_and_with_its_object(directory: Path) -> None:
    """A folder is private; two are apart."""
    with TemporaryFolder() as path, TemporaryFolder() as other:
        assert path != other
        assert path.parent == directory
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "file").write_text("content")
    assert not list(directory.iterdir())
    folder = TemporaryFolder()
    assert folder.path.is_dir()
    del folder
    assert not list(directory.iterdir())


def test_a_folder_goes_at_the_end_of_the_process(directory: Path) -> None:
    """At the interpreter's end, without a collection."""
    path = in_process("kept = TemporaryFolder(); print(kept.path)", directory)
    assert path.startswith(str(directory))
    assert not list(directory.iterdir())


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGTERM)", "os._exit(0)"])
def test_what_a_process_has_left_goes_with_the_next(end: str, directory: Path) -> None:
    """However the first one ended."""
    left = Path(
        in_process(
            f"kept = TemporaryFolder(); (kept.path / 'file').touch(); print(kept.path, flush=True); {end}", directory
        )
    )
    assert left.is_dir()
    age(left)
    with TemporaryFolder() as path:
        assert list(directory.iterdir()) == [path]


def test_what_another_process_uses_stays(directory: Path) -> None:
    """A folder that another process uses stays as long as it lives, however old; so does what is about to be locked, and what has another
    name."""
    code = """
from torch_hybrid_backend.storage.temporary_folder import TemporaryFolder
kept = TemporaryFolder()
print(kept.path, flush=True)
input()
"""
    environment = {**os.environ, "TMPDIR": str(directory)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        used = Path(other.stdout.readline().strip())
        age(used)
        new = directory / "torch_hybrid_backend.tmp-new"
        cache = directory / f"torch_hybrid_backend-{os.getuid()}"
        for path in (new, cache):
            path.mkdir()
        age(cache)
        with TemporaryFolder() as path:
            assert set(directory.iterdir()) == {path, used, new, cache}
        other.kill()


def test_a_forked_child_leaves_its_parents_folders(directory: Path) -> None:
    """Whatever it lets go of."""
    folder = TemporaryFolder()
    child = os.fork()
    if not child:
        folder._remove()
        os._exit(0)
    os.waitpid(child, 0)
    age(folder.path)
    temporary_folder._remove_abandoned(directory)  # it is locked still
    assert folder.path.is_dir()
