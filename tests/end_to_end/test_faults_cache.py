"""Faults of the cache: full, read-only, damaged, shared, in odd places, not private. Each in a process of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import Nursery
from torch_hybrid_backend.storage.store import Store

fault = pytest.mark.fault


def entries(cache: Path, kind: str = "*") -> list[Path]:
    found = sorted(path for path in cache.glob(f"{kind}/*/*") if path.is_file())
    assert found
    return found


def exchange(paths: list[Path]) -> None:
    """Each entry, name and all, to the key of the next."""
    for path, next_path in zip(paths, [*paths[1:], paths[0]], strict=True):
        path.rename(next_path.parent / ("moved" + path.name))
    for path in paths:
        for moved in path.parent.glob("moved*"):
            moved.rename(moved.parent / moved.name.removeprefix("moved"))


def swap_contents(paths: list[Path]) -> None:
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def each(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def harm(cache: Path) -> None:
        for path in entries(cache):
            change(path)

    return harm


def of_each_kind(change: Callable[[list[Path]], None]) -> Callable[[Path], None]:
    def harm(cache: Path) -> None:
        for kind in ("kernels", "placements"):
            change(entries(cache, kind))

    return harm


def as_first_version(path: Path) -> None:
    """A cache whose entries are named as its first version named them."""
    path.rename(path.with_stem(hashlib.sha256(path.read_bytes()).hexdigest()))


def as_something_else(path: Path) -> None:
    """Whole, and no kernel library nor timings."""
    Store(path.parents[2]).put(path.parts[-3], path.parts[-2], b'{"version": 99}', path.suffix)
    path.unlink()


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARM: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (each(lambda path: os.truncate(path, path.stat().st_size // 2)), "corrupt"),
    "empty": (each(lambda path: os.truncate(path, 0)), "corrupt"),
    "garbage": (each(lambda path: path.write_bytes(os.urandom(path.stat().st_size))), "corrupt"),
    "swapped contents": (of_each_kind(swap_contents), "corrupt"),
    "exchanged": (of_each_kind(exchange), "corrupt"),
    "folders": (each(as_folder), "Is a directory"),
    "another version": (each(as_first_version), "corrupt"),
    "something else": (each(as_something_else), "runtime_error"),
}
FAST = {"truncated", "exchanged"}


@pytest.fixture
def cache(filled_cache: Path, tmp_path: Path) -> Path:
    """A cache that holds two graphs' kernels and timings, for the test to harm."""
    return shutil.copytree(filled_cache, tmp_path / "cache")


@fault("a cache that an earlier process filled", "nothing: no kernel is compiled, no region timed")
def test_filled_cache(nursery: Nursery, cache: Path, tmp_path: Path) -> None:
    """The cache that harmed ones are compared with: a second process finds everything, and needs no linker to do so."""
    done = nursery.run("check(6); say(len(workers()))", tmp_path, HYBRID_PLACEMENT="measure", PATH="")
    assert (done.answers[1:], done.warnings, done.status) == (["0"], [], 0), done


@fault(
    "cache entries truncated, emptied, overwritten with garbage, swapped with each other, moved to other keys, replaced by folders, "
    "or of another version (kernels and timings alike)",
    "one warning for each corrupt entry, which is rebuilt",
)
@pytest.mark.parametrize("harm", [pytest.param(h, marks=() if h in FAST else pytest.mark.full) for h in HARM])
def test_damaged_entries(harm: str, nursery: Nursery, cache: Path, tmp_path: Path) -> None:
    """The answer is right, nothing damaged is used, and the next process finds a healed cache."""
    act, word = HARM[harm]
    act(cache)
    done = nursery.run("check(6)", tmp_path, HYBRID_PLACEMENT="measure")
    assert (len(done.answers), done.status) == (1, 0), done
    assert any(word in warning for warning in done.warnings), done
    again = nursery.run("check(6); say(len(workers()))", tmp_path, HYBRID_PLACEMENT="measure")
    if harm not in ("folders", "something else"):  # what is in the place of an entry, and is none, stays
        assert (again.answers[1:], again.warnings) == (["0"], []), again
    assert again.status == 0


@fault("the disk is full (a cache directory of 16 KiB)", "one warning; kernels are cached for this process only")
def test_disk_full(nursery: Nursery, tmp_path: Path) -> None:
    """The kernels run all the same, from a temporary directory; nothing half-written is left in the cache."""
    script = """
namespace(os.getuid())
os.mkdir("small", 0o700)
mount("small", "size=16k,mode=700")
os.environ["HYBRID_CACHE_DIR"] = os.path.abspath("small")
check(6)
check(7)
print("left", [name for _, _, names in os.walk("small") for name in names if not name.endswith((".json", ".so"))])
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["tvm", "tvm"], 0), done
    (warning,) = done.warnings
    assert "No space left on device" in warning
    assert "left []" in done.out


@pytest.mark.full
@fault("the disk is full (cache and temporary directory)", "one warning for each region, which falls back to eager")
def test_disks_full(nursery: Nursery, tmp_path: Path) -> None:
    """Without any place for kernels eager runs the region."""
    script = """
namespace(os.getuid())
os.mkdir("small", 0o700)
mount("small", "size=8k,mode=700")
os.environ["HYBRID_CACHE_DIR"] = os.path.abspath("small/cache")
os.environ["TMPDIR"] = os.path.abspath("small")
import tempfile
tempfile.tempdir = None
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["eager"], 0), done
    assert any("compile" in warning for warning in done.warnings), done  # compile_failed or compiler_crashed


@pytest.mark.full
@fault(
    "files are not allowed to grow (RLIMIT_FSIZE of 4 KiB)", "one warning; what cannot be compiled falls back to eager"
)
def test_file_size_limit(nursery: Nursery, tmp_path: Path) -> None:
    """Neither object files nor libraries can be written, by whoever tries: a right answer."""
    script = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["eager"], 0), done
    assert done.warnings


@fault("a read-only cache directory that lacks a kernel", "one warning; what it lacks is cached for this process only")
def test_read_only(nursery: Nursery, cache: Path, tmp_path: Path) -> None:
    """The process works with a temporary directory."""
    script = """
namespace(os.getuid())
mount(os.environ["HYBRID_CACHE_DIR"], "mode=700", 1)  # MS_RDONLY
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["tvm"], 0), done
    (warning,) = done.warnings
    assert "cannot be made or written" in warning
    assert "HYBRID_CACHE_DIR" in warning


@pytest.mark.full
@fault("the cache directory is a file", "one warning; kernels are cached for this process only")
def test_a_file(nursery: Nursery, tmp_path: Path) -> None:
    """The process works with a temporary directory."""
    (tmp_path / "file").write_text("")
    done = nursery.run("check(6)", tmp_path, HYBRID_CACHE_DIR=str(tmp_path / "file"))
    assert (done.answers, done.status) == (["tvm"], 0), done
    (warning,) = done.warnings
    assert "not a directory" in warning.lower()


@pytest.mark.full
@fault(
    "a cache directory that others may write, own or replace",
    "one warning that says how to fix it; the cache is not used",
)
@pytest.mark.parametrize("how", ["writable", pytest.param("replaceable", marks=pytest.mark.full)])
def test_not_private(how: str, nursery: Nursery, cache: Path, tmp_path: Path) -> None:
    """Nothing of it is loaded, nothing written to it."""
    (cache if how == "writable" else tmp_path).chmod(0o777)
    before = sorted(cache.rglob("*"))
    done = nursery.run("check(6)", tmp_path)
    assert (done.answers, done.status) == (["tvm"], 0), done
    (warning,) = done.warnings
    assert "chmod" in warning
    assert sorted(cache.rglob("*")) == before


@pytest.mark.full
@fault("a cache directory of another user", "one warning; the cache is not used")
def test_of_another_user(nursery: Nursery, cache: Path, tmp_path: Path) -> None:
    """A mount that belongs to nobody we know is not trusted."""
    script = """
namespace(12345)
mount(os.environ["HYBRID_CACHE_DIR"], "mode=755,uid=12345")
os.chmod(os.environ["HYBRID_CACHE_DIR"], 0o777)
check(6)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.status) == (["tvm"], 0), done
    assert len(done.warnings) == 1


@pytest.mark.full
@fault("eight processes fill one empty cache at once", "nothing: each kernel is compiled once")
def test_shared(nursery: Nursery, tmp_path: Path) -> None:
    """All answer right, nobody warns, and the cache is whole: a ninth process compiles nothing."""
    script = """
from torch_hybrid_backend.codegen.workers.pool import KernelCompiler
compile = KernelCompiler.compile
KernelCompiler.compile = lambda self, jobs, *rest: (say(*[job.key for job in jobs]), compile(self, jobs, *rest))[1]
check(6)
"""
    children = [nursery.start(script, tmp_path, HYBRID_PLACEMENT="measure") for _ in range(8)]
    compiled: list[str] = []
    for child in children:
        done = child.done()
        assert (done.warnings, done.status) == ([], 0), done
        compiled += [key for answer in done.answers[:-1] for key in answer.split()]
    assert len(set(compiled)) == len(compiled) > 0
    done = nursery.run("check(6); say(len(workers()))", tmp_path, HYBRID_PLACEMENT="measure")
    assert (done.answers[1:], done.warnings) == (["0"], []), done


@fault("the cache is removed while a process uses it", "nothing: what is needed again is compiled again")
def test_removed_meanwhile(nursery: Nursery, tmp_path: Path) -> None:
    """A running process goes on; what is compiled next goes to a new directory, private as the first was."""
    script = """
import shutil
x = torch.randn(6, 24)
fast, _ = compiled(model)
with torch.no_grad():
    fast(x)
    shutil.rmtree(os.environ["HYBRID_CACHE_DIR"])
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
check(6)
check(7)
say(oct(os.stat(os.environ["HYBRID_CACHE_DIR"]).st_mode))
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.warnings, done.status) == (["tvm", "tvm", "0o40700"], [], 0), done


@fault("kernel libraries are truncated while a process runs them", "nothing")
def test_truncated_meanwhile(nursery: Nursery, tmp_path: Path) -> None:
    """No SIGBUS: what runs is a copy in memory."""
    script = """
import pathlib
x = torch.randn(6, 24)
fast, plans = compiled(model)
with torch.no_grad():
    fast(x)
    for library in pathlib.Path(os.environ["HYBRID_CACHE_DIR"]).rglob("*.so"):
        os.truncate(library, 0)
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
say(plans[0].regions[0].engine)
"""
    done = nursery.run(script, tmp_path)
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done


@pytest.mark.full
@fault("a cache directory whose path has spaces, quotes and letters beyond ASCII", "nothing")
@pytest.mark.parametrize("name", ["a b'c\"d", pytest.param("löß-缓存", marks=pytest.mark.full)])
def test_odd_path(name: str, nursery: Nursery, tmp_path: Path) -> None:
    """An odd path is a path like any other."""
    cache = tmp_path / name
    done = nursery.run("check(6)", tmp_path, HYBRID_CACHE_DIR=str(cache), TMPDIR=str(tmp_path))
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done
    assert entries(cache, "kernels")


@fault(
    "no HOME, and a user without an entry in the user database", "nothing: the cache goes to the temporary directory"
)
def test_no_home(nursery: Nursery, tmp_path: Path) -> None:
    """A process without a home works, as in a container that runs under an arbitrary user number."""
    script = "namespace(12345)\ncheck(6)\n"
    settings = {"HYBRID_CACHE_DIR": None, "HOME": None, "XDG_CACHE_HOME": None, "TMPDIR": str(tmp_path)}
    done = nursery.run(script, tmp_path, **settings)
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done
    assert entries(tmp_path / "torch_hybrid_backend-12345", "kernels")


@pytest.mark.full
@fault("a HOME that does not exist and cannot be created", "one warning; kernels are cached for this process only")
def test_home_unwritable(nursery: Nursery, tmp_path: Path) -> None:
    """A process whose home is not writable works, as that of a system user."""
    done = nursery.run("check(6)", tmp_path, HYBRID_CACHE_DIR=None, XDG_CACHE_HOME=None, HOME="/proc/nonexistent")
    assert (done.answers, done.status) == (["tvm"], 0), done
    (warning,) = done.warnings
    assert "HYBRID_CACHE_DIR" in warning


@pytest.mark.full
@fault("a TMPDIR that does not exist", "nothing: another temporary directory is found")
def test_no_tmpdir(nursery: Nursery, tmp_path: Path) -> None:
    """Python looks at the usual places."""
    done = nursery.run("check(6)", tmp_path, TMPDIR=str(tmp_path / "nonexistent"))
    assert (done.answers, done.warnings, done.status) == (["tvm"], [], 0), done
