"""The on-disk store: privacy, atomicity, checksums."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage.store import Store, Usage


def test_what_was_put_is_found_by_another_store(tmp_path: Path) -> None:
    """Bytes survive the process that wrote them; absent entries are None."""
    Store(tmp_path / "cache").put("kind", "key", b"\x00data")
    again = Store(tmp_path / "cache")
    assert again.get("kind", "key") == b"\x00data"
    assert again.get("kind", "other") is None
    assert again.path_of("other", "key") is None


def test_everything_made_is_private(tmp_path: Path) -> None:
    """Directories have mode 0700 whatever the umask, files are the user's alone."""
    before = os.umask(0)
    try:
        path = Store(tmp_path / "a" / "cache").put("kind", "key", b"data", ".so")
    finally:
        os.umask(before)
    assert path.suffix == ".so"
    for folder in (path.parent, path.parent.parent, tmp_path / "a" / "cache"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_corrupt_entry_is_a_miss_and_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit makes a miss: the entry is not handed out, is gone afterwards, and can be put anew."""
    store = Store(tmp_path)
    path = store.put("kind", "key", b"data")
    path.write_bytes(b"dbta")
    with caplog.at_level(logging.WARNING):
        assert store.path_of("kind", "key") is None
    assert "corrupt" in caplog.text
    assert not path.exists()
    assert store.path_of("kind", "key") is None
    store.put("kind", "key", b"data")
    assert store.get("kind", "key") == b"data"


def test_a_write_that_was_cut_short_is_not_seen(tmp_path: Path) -> None:
    """A killed writer leaves a temporary file, which readers pass over."""
    store = Store(tmp_path)
    path = store.put("kind", "key", b"data")
    (path.parent / ".abc.part").write_bytes(b"da")
    path.unlink()
    assert store.get("kind", "key") is None


def test_writers_of_different_bytes_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Sixteen threads write other bytes under one key: a reader always finds one of them whole."""
    store = Store(tmp_path)
    written = [bytes([i]) * 5000 for i in range(16)]
    threads = [threading.Thread(target=store.put, args=("kind", "key", data)) for data in written]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("kind", "key") in written


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_writable_for_others_is_refused(tmp_path: Path, mode: int) -> None:
    """Somebody else could place a kernel library there."""
    tmp_path.chmod(mode)
    with pytest.raises(CacheError, match=r"chmod 700.*HYBRID_CACHE_DIR"):
        Store(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could change what is in it."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(CacheError, match="belongs to user"):
        Store(tmp_path)


def test_a_directory_that_cannot_be_made_gives_one_warning_and_a_temporary_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process goes on with a private temporary directory; under strict it is an error."""
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        store = Store.open(tmp_path / "file" / "cache")
    assert len(caplog.records) == 1
    assert "HYBRID_CACHE_DIR" in caplog.text
    store.put("kind", "key", b"data")
    assert store.get("kind", "key") == b"data"
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    with pytest.raises(CacheError):
        Store.open(tmp_path / "file" / "cache", strict=True)


def test_a_store_that_is_off_leaves_nothing(tmp_path: Path) -> None:
    """HYBRID_CACHE=0: the wanted directory is not touched, and the temporary one goes with the store."""
    store = Store.open(tmp_path / "cache", enabled=False)
    root = store.root
    store.put("kind", "key", b"data")
    del store
    assert not (tmp_path / "cache").exists()
    assert not root.exists()


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a/b", "x" * 201])
def test_names_that_leave_the_store_are_refused(tmp_path: Path, name: str) -> None:
    """Kinds and keys become file names."""
    with pytest.raises(CacheError, match="cannot name"):
        Store(tmp_path).put("kind", name, b"data")


def test_remove(tmp_path: Path) -> None:
    """A removed entry is absent; removing an absent one is no error."""
    store = Store(tmp_path)
    store.put("kind", "key", b"data")
    store.remove("kind", "key")
    store.remove("kind", "key")
    assert store.get("kind", "key") is None


def test_an_entry_of_another_key_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two entries exchanged, whole and with their names: neither is handed out under the other's key."""
    store = Store(tmp_path)
    one, two = store.put("kind", "one", b"1"), store.put("kind", "two", b"2")
    one.rename(two.parent / one.name)
    two.rename(one.parent / two.name)
    with caplog.at_level(logging.WARNING):
        assert (store.get("kind", "one"), store.get("kind", "two")) == (None, None)
    assert len(caplog.records) == 2


def test_an_entry_of_another_kind_is_a_miss(tmp_path: Path) -> None:
    """The same of kinds."""
    store = Store(tmp_path)
    path = store.put("kind", "key", b"1")
    (tmp_path / "other" / "key").mkdir(parents=True)
    path.rename(tmp_path / "other" / "key" / path.name)
    assert store.get("other", "key") is None


@pytest.mark.parametrize("mode", [0o606, 0o660])
def test_an_entry_that_others_may_write_is_a_miss(tmp_path: Path, mode: int) -> None:
    """An entry that others may write may change once it was checked, so it is a miss."""
    store = Store(tmp_path)
    store.put("kind", "key", b"data").chmod(mode)
    assert store.get("kind", "key") is None


def test_an_entry_that_is_a_link_is_a_miss(tmp_path: Path) -> None:
    """However right the content it leads to; a link to nowhere is one too, and both are removed."""
    store = Store(tmp_path / "cache")
    path = store.put("kind", "key", b"data")
    elsewhere = path.rename(tmp_path / path.name)
    for target in (elsewhere, tmp_path / "nowhere"):
        path.symlink_to(target)
        assert store.get("kind", "key") is None
        assert not path.is_symlink()
    assert elsewhere.read_bytes() == b"data"


def test_a_link_is_followed_once(tmp_path: Path) -> None:
    """A cache directory that is a link is the directory it led to when it was opened, checked as such."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "other").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    store = Store(link)
    assert store.root == (tmp_path / "real").resolve()
    link.unlink()
    link.symlink_to(tmp_path / "other")
    assert store.put("kind", "key", b"data").is_relative_to((tmp_path / "real").resolve())
    (tmp_path / "other").chmod(0o777)
    with pytest.raises(CacheError, match="writable for others"):
        Store(link)


def test_a_link_to_nowhere_and_a_loop_are_refused(tmp_path: Path) -> None:
    """Nothing is made through them."""
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent" / "cache")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("nowhere", "loop"):
        with pytest.raises(CacheError, match="HYBRID_CACHE_DIR"):
            Store(tmp_path / name)
    assert not (tmp_path / "absent").exists()


def test_a_directory_that_anybody_may_replace_is_refused(tmp_path: Path) -> None:
    """A directory above that is writable for all; where that is sticky, as /tmp is, only its owner could."""
    above = tmp_path / "above"
    above.mkdir()
    for mode in (0o777, 0o1777):
        above.chmod(mode)
        if mode == 0o777:
            with pytest.raises(CacheError, match=r"may replace it.*chmod o-w"):
                Store(above / "a" / "cache")
        else:
            Store(above / "a" / "cache").put("kind", "key", b"data")


def _age(path: Path, hours: float) -> None:
    long_ago = time.time() - hours * 3600
    os.utime(path, (long_ago, long_ago))


def test_the_limit_removes_what_was_used_least_recently(tmp_path: Path) -> None:
    """Over the limit, the oldest entries go with their folders and unfinished files; what was read or written just now stays."""
    limit = 1 << 20
    store = Store(tmp_path, limit)
    paths = [store.put("kind", f"key{i}", bytes(200_000)) for i in range(5)]
    (paths[4].parent / ".hybrid-abandoned.part").write_bytes(bytes(100))
    for i, path in enumerate([*paths, paths[4].parent / ".hybrid-abandoned.part"]):
        _age(path, 20 - i)
    assert store.get("kind", "key0") is not None  # used now
    paths.append(Store(tmp_path, limit).put("kind", "key5", bytes(200_000)))
    assert [path.exists() for path in paths] == [True] * 6  # was just within the limit
    Store(tmp_path, limit).put("kind", "key6", bytes(200_000))
    assert [path.exists() for path in paths] == [True, False, False, True, True, True]
    assert not paths[1].parent.exists()
    assert [path.name for path in paths[4].parent.iterdir()] == [paths[4].name]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    """A limit smaller than what is needed now removes nothing under a running process."""
    store = Store(tmp_path, 1000)
    paths = [store.put("kind", f"key{i}", bytes(5000)) for i in range(5)]
    assert all(path.exists() for path in paths)


def test_a_writer_looks_again(tmp_path: Path) -> None:
    """A writer that writes long enough keeps the limit too."""
    limit = 1 << 20
    store = Store(tmp_path, limit)
    for i in range(200):
        _age(store.put("kind", f"key{i}", bytes(20_000)), 1)
    assert sum(kind.size_bytes for kind in store.usage()) <= limit * 1.2


def test_usage_and_clear(tmp_path: Path) -> None:
    """Entries and bytes by kind; clearing leaves the directory and what others put there, and the store can be used on."""
    store = Store(tmp_path)
    assert store.usage() == []
    for key, kind in (("a", "kernels"), ("b", "kernels"), ("a", "placements")):
        store.put(kind, key, bytes(9000))
    kernels, verdicts = store.usage()
    assert (kernels.kind, kernels.entries) == ("kernels", 2)
    assert kernels.size_bytes == 2 * verdicts.size_bytes >= 18000
    assert isinstance(verdicts, Usage)
    foreign = [tmp_path / "models" / "some" / name for name in ("a" * 64, "weights.bin", ".hidden")]
    foreign[0].parent.mkdir(parents=True)
    for path in foreign:
        path.write_text("not the store's")
    store.clear()
    assert store.usage() == []
    assert all(path.exists() for path in foreign)
    store.put("kernels", "a", b"data")
    assert store.get("kernels", "a") == b"data"


def test_a_forked_child_leaves_the_temporary_directory() -> None:
    """The temporary directory is the parent's, whose kernels lie there; it goes when the parent ends."""
    code = """
import os, sys
from pathlib import Path
from torch_hybrid_backend.storage.store import Store
store = Store.open(Path("unused"), enabled=False)
store.put("kind", "key", b"data")
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
assert store.get("kind", "key") == b"data"
print(store.root)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert not Path(done.stdout.strip()).exists()


def test_a_folder_that_is_cleared_while_an_entry_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is written all the same."""
    store, original, cleared = Store(tmp_path), tempfile.mkstemp, []

    def clearing(dir: Path, **names: str) -> tuple[int, str]:
        if not cleared:
            cleared.append(dir)
            dir.rmdir()
        return original(dir=dir, **names)

    monkeypatch.setattr(tempfile, "mkstemp", clearing)
    store.put("kind", "key", b"data")
    assert store.get("kind", "key") == b"data"
    assert cleared


_AS_ANOTHER = """
import os, sys
from pathlib import Path
from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage.store import Store
os.setgid(12345)
os.setuid(12345)
"""


def _as_another_user(script: str) -> str:
    """The output of a script that runs as a user who owns nothing here; it finds `root` in `sys.argv[1]`."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    command = [sys.executable, "-c", _AS_ANOTHER + script]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach, with a store in it that this user has filled."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        root = Path(folder) / "cache"
        Store(root).put("kind", "key", b"data")
        yield root


def test_what_root_has_filled_is_read_by_others(shared: Path) -> None:
    """Entries that root has filled are found by others, as of a container's image: nothing can be put, and what is removed is so for this
    process alone."""
    subprocess.run(["chmod", "-R", "a+rX", str(shared)], check=True)
    script = f"""
store = Store(Path({str(shared)!r}))
print(store.get("kind", "key"), store.path_of("kind", "key").is_file())
try:
    store.put("kind", "other", b"more")
except CacheError as error:
    print("HYBRID_CACHE_DIR" in str(error), "Permission denied" in str(error))
store.remove("kind", "key")
print(store.get("kind", "key"))
try:
    store.clear()
except CacheError as error:
    print("cannot remove" in str(error))
"""
    assert _as_another_user(script).splitlines() == ["b'data' True", "True True", "None", "True"]
    assert Store(shared).get("kind", "key") == b"data"


def test_what_root_keeps_to_itself_is_refused(shared: Path) -> None:
    """A message says how others can be let read."""
    shared.chmod(0o755)  # but for the folders in it
    script = f"""
try:
    Store(Path({str(shared)!r}))
except CacheError as error:
    print(error)
"""
    assert f"chmod -R a+rX {shared}" in _as_another_user(script)


@pytest.mark.parametrize("writable", ["root", "entry"])
def test_what_root_has_filled_and_others_may_write_is_not_trusted(shared: Path, writable: str) -> None:
    """Neither the directory nor an entry."""
    subprocess.run(["chmod", "-R", "a+rX", str(shared)], check=True)
    (entry,) = shared.rglob("*.bin")
    (shared if writable == "root" else entry).chmod(0o777)
    script = f"""
try:
    print(Store(Path({str(shared)!r})).get("kind", "key"))
except CacheError as error:
    print("chmod 700" in str(error))
"""
    assert _as_another_user(script).split() == (["True"] if writable == "root" else ["None"])
