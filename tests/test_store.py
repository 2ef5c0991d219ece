"""The on-disk store: privacy, atomicity, checksums."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.store import Store


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
    """One flipped bit: the entry is not handed out, is gone afterwards, and can be put anew."""
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
    """What a killed writer leaves behind is a temporary file, which readers pass over."""
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
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
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
