"""A file that one user exported runs for another one, who can write nowhere and has neither TVM nor a compiler nor a linker."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_EXPORTER, _USER = 1234, 65534
_TOOLS = ("cc", "gcc", "g++", "clang", "ld", "ld.lld", "as", "nvcc")
# What the interpreter reads. Both users see it, although it may lie in root's home.
_NEEDED = tuple(
    dict.fromkeys(Path(path).resolve() for path in (sys.base_prefix, sys.prefix, sysconfig.get_path("platlib"), ROOT))
)
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"),
        reason="needs root, unshare and setpriv",
    ),
]

_MODEL = """
import hashlib, os, sys, torch, torch_hybrid_backend
torch.manual_seed(0)
x = torch.randn(2, 3, 8, 8)
def told(y):
    print(os.getuid(), hashlib.sha256(y.detach().numpy().tobytes()).hexdigest())
"""
_EXPORT = (
    _MODEL
    + """
layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
torch_hybrid_backend.export(torch.nn.Sequential(*layers).eval(), (x,), sys.argv[1], options={"placement": "estimate", "strict": True})
told(torch_hybrid_backend.load(sys.argv[1])(x))
"""
)
_LOAD = (
    _MODEL
    + f"""
import importlib.util, shutil, tempfile
from pathlib import Path
assert not any(map(shutil.which, {_TOOLS})), "there is a compiler or a linker"
for folder in (Path.cwd(), Path.home(), Path(sys.argv[1]).parent, Path("/tmp"), Path("/var/tmp")):
    try:
        (folder / "written").touch()
    except OSError:
        continue
    raise AssertionError(f"{{folder}} can be written to")
told(torch_hybrid_backend.load(sys.argv[1])(x))
spec = importlib.util.find_spec("tvm")
assert spec is None or spec.origin is None, "TVM is there"
assert not [name for name in sys.modules if name.partition(".")[0] in ("tvm", "torch._dynamo")]
"""
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user reads; those of pytest are its own user's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="hybrid-users-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def _run_as(
    user: int, folder: Path, command: Sequence[object], variables: Mapping[str, str], *, is_bare: bool = False
) -> str:
    """Output of a command, run by a user in mounts of its own, in which root's home holds no more than the interpreter.

    is_bare: nothing can be written, and TVM's folders are empty.
    """
    steps = ["set -e", "mount --make-rprivate /"]
    closed = list(dict.fromkeys(top for each in _NEEDED if (top := _closed(each)) is not None))
    hidden = [each for each in _NEEDED if _closed(each) is not None]
    for number, each in enumerate(hidden):
        (folder / f"aside{number}").mkdir(exist_ok=True)
        steps.append(f"mount --rbind {each} {folder}/aside{number}")
    steps += [f"mount -t tmpfs -o mode=755 none {top}" for top in closed]
    for number, each in enumerate(hidden):
        steps.append(f"mkdir -p {each} && mount --rbind {folder}/aside{number} {each}")
    if is_bare:
        empty = folder / "empty"
        empty.mkdir(exist_ok=True)
        found = (importlib.util.find_spec(name) for name in ("tvm", "tvm_ffi"))
        places = [place for spec in found if spec is not None for place in spec.submodule_search_locations or ()]
        assert places
        steps += [f"mount --bind {empty} {place}" for place in places]
        steps += ["mount -o remount,bind,ro /", "mount -t tmpfs -o ro none /dev/shm"]
    drop = f"setpriv --reuid={user} --regid={user} --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
    given = [f"{name}={value}" for name, value in variables.items()]
    steps.append(f"cd {folder} && exec {drop} {shlex.join(['env', '-i', *given, *map(str, command)])}")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(steps)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _closed(path: Path) -> Path | None:
    """The first folder on the way to a path that other users cannot enter."""
    return next((each for each in [*reversed(path.parents), path] if not each.stat().st_mode & 0o001), None)


def test_another_user_without_tools(folder: Path) -> None:
    """Exported by one user with a HOME and a cache, installed by root, loaded by another one: in Python, and by hybrid-run without it."""
    home = folder / "home"
    home.mkdir()
    os.chown(home, _EXPORTER, _EXPORTER)
    file = home / "model.hybrid"
    variables = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "2"}
    tools = {"PATH": os.environ["PATH"], "HOME": str(home), "HYBRID_CACHE_DIR": str(home / "cache")}
    exported = _run_as(_EXPORTER, folder, [sys.executable, "-c", _EXPORT, file], variables | tools)
    assert exported.startswith(f"{_EXPORTER} ")
    installed = folder / "model.hybrid"
    shutil.copyfile(file, installed)
    installed.chmod(0o644)
    shutil.rmtree(home)
    bare = variables | {"PATH": str(folder), "HOME": "/nonexistent"}
    loaded = _run_as(_USER, folder, [sys.executable, "-c", _LOAD, installed], bare, is_bare=True)
    assert loaded == exported.replace(str(_EXPORTER), str(_USER), 1)
    runner = ROOT / "torch_hybrid_backend" / "runner" / "hybrid-run"
    assert "output0" in _run_as(_USER, folder, [runner, installed], bare, is_bare=True)
