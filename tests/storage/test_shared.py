"""Shared caches: which entries count, and what places that are forged, damaged or gone cost."""

from __future__ import annotations

import functools
import http.server
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from torch_hybrid_backend.errors import CacheError
from torch_hybrid_backend.storage import shared
from torch_hybrid_backend.storage.shared import SharedCaches, location_of, pack, pull, push, sign, unpack
from torch_hybrid_backend.storage.store import FAILURES, Content, Store

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()
ENTRY = Content("kernels", "a" * 64, ".so", b"code")


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    store = Store(tmp_path / "filled")
    store.put(ENTRY.kind, ENTRY.key, ENTRY.data, ENTRY.suffix)
    store.put("times", "b", b"{}", ".json")
    store.put(FAILURES, "c", b"{}", ".json")
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


def _behind(tmp_path: Path, *locations: object, keys: tuple[bytes, ...] = ()) -> Store:
    """An empty store with shared caches behind it."""
    return Store(tmp_path / "local", behind=SharedCaches(map(str, locations), keys))


def _open_to_others(folder: Path) -> None:
    folder.chmod(0o777)


def test_entries_of_a_private_folder_count(filled: Store, folder: Path, tmp_path: Path) -> None:
    """Entries that are found are kept in the local store. Failures are not shared."""
    assert push(filled, location_of(str(folder))) == 2
    store = _behind(tmp_path, folder)
    assert store.get("times", "b") == b"{}"
    path = store.path_of(ENTRY.kind, ENTRY.key)
    assert path is not None
    assert path.is_relative_to(store.root)
    assert path.name.endswith(".so")
    assert store.get(FAILURES, "c") is None
    assert Store(store.root).get(ENTRY.kind, ENTRY.key) == ENTRY.data
    assert push(filled, location_of(str(folder))) == 0


def test_look_ups_never_write(filled: Store, folder: Path, tmp_path: Path) -> None:
    """Neither do misses, removals and new entries of the local store."""
    push(filled, location_of(str(folder)))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    store = _behind(tmp_path, folder)
    store.get(ENTRY.kind, ENTRY.key)
    store.get(ENTRY.kind, "d")
    store.put(ENTRY.kind, "d", b"mine", ".so")
    store.remove(ENTRY.kind, ENTRY.key)
    assert store.get(ENTRY.kind, ENTRY.key) is None
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_others_can_write_the_folder(
    filled: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then entries count that a trusted key signed. Of those that it did not there is one warning."""
    push(filled, location_of(str(folder)), OTHER)
    _open_to_others(folder)
    with caplog.at_level(logging.WARNING):
        store = _behind(tmp_path, folder, keys=(PUBLIC,))
        assert store.get(ENTRY.kind, ENTRY.key) is None
        assert store.get("times", "b") is None
    (record,) = caplog.records
    assert "no key of HYBRID_CACHE_KEYS signed it" in record.getMessage()
    assert sign(location_of(str(folder)), KEY) == 2
    assert _behind(tmp_path, folder, keys=(PUBLIC,)).get(ENTRY.kind, ENTRY.key) == ENTRY.data
    assert [path for path in folder.rglob("*") if path.name.startswith(".")] == []


@pytest.mark.parametrize("where", ["kind", "file"])
def test_a_part_of_the_folder_that_others_can_write(where: str, filled: Store, folder: Path, tmp_path: Path) -> None:
    """Entries below it do not count without a signature."""
    push(filled, location_of(str(folder)))
    (folder / ENTRY.kind / (ENTRY.key if where == "file" else "")).chmod(0o666 if where == "file" else 0o777)
    store = _behind(tmp_path, folder)
    assert store.get(ENTRY.kind, ENTRY.key) is None
    assert store.get("times", "b") == b"{}"


def test_a_link_is_not_followed(filled: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An entry that is a link to another file is a miss with a warning."""
    push(filled, location_of(str(folder)))
    path = folder / ENTRY.kind / ENTRY.key
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        assert _behind(tmp_path, folder).get(ENTRY.kind, ENTRY.key) is None
    assert len(caplog.records) == 1


def _resigned(content: Content) -> bytes:
    """An entry with the signature of another content."""
    _, signatures = unpack(pack(ENTRY, key=KEY), ENTRY.kind, ENTRY.key)
    return pack(content, signatures)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "no header": lambda data: data[:20],
    "endless header": lambda data: data[:15] + b"\xff" * 8 + data[23:],
    "flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "swapped": lambda data: pack(Content(ENTRY.kind, "other", ENTRY.suffix, ENTRY.data), key=KEY),
    "of another kind": lambda data: pack(Content("times", ENTRY.key, ENTRY.suffix, ENTRY.data), key=KEY),
    "forged": lambda data: _resigned(Content(ENTRY.kind, ENTRY.key, ENTRY.suffix, b"evil")),
    "another suffix": lambda data: _resigned(Content(ENTRY.kind, ENTRY.key, ".json", ENTRY.data)),
    "a path as suffix": lambda data: data.replace(b'".so"', b'"/../../x"'),
    "signatures of no form": lambda data: data.replace(PUBLIC.hex().encode(), b"zz" * 32),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.fault(
    "an entry of a shared cache is forged, truncated or another's", "one warning; the kernel is compiled"
)
def test_damaged_and_forged_entries_are_misses(
    damage: str, filled: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of the user's own is no excuse for a wrong signature. Nothing is written outside of the store, and other entries count."""
    push(filled, location_of(str(folder)), KEY)
    path = folder / ENTRY.kind / ENTRY.key
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    store = _behind(tmp_path, folder, keys=(PUBLIC,))
    with caplog.at_level(logging.WARNING):
        assert store.get(ENTRY.kind, ENTRY.key) is None
        assert store.path_of(ENTRY.kind, ENTRY.key) is None
    assert len(caplog.records) == 1
    assert store.get("times", "b") == b"{}"
    assert pull(Store(tmp_path / "pulled"), location_of(str(folder)), [PUBLIC]) == 1
    push(filled, location_of(str(folder)), KEY)
    assert _behind(tmp_path, folder, keys=(PUBLIC,)).get(ENTRY.kind, ENTRY.key) == ENTRY.data


@pytest.mark.parametrize("damage", ["empty", "flipped", "swapped", "pipe"])
def test_signing_passes_over_damaged_entries(
    damage: str, filled: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each gives a warning, stays as it is, and the others are signed."""
    push(filled, location_of(str(folder)))
    path = folder / ENTRY.kind / ENTRY.key
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    before = None if damage == "pipe" else path.read_bytes()
    with caplog.at_level(logging.WARNING):
        assert sign(location_of(str(folder)), KEY) == 1
    (record,) = caplog.records
    assert f"is not signed, {folder}/{ENTRY.kind}/{ENTRY.key}: it is" in record.getMessage()
    assert before is None or path.read_bytes() == before
    _open_to_others(folder)
    assert _behind(tmp_path, folder, keys=(PUBLIC,)).get("times", "b") == b"{}"


@pytest.mark.parametrize("key", ["../../etc/passwd", "a/b", "", ".hidden", "\0"])
def test_keys_never_become_paths_unchecked(key: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot name a cache entry"):
        _behind(tmp_path, folder).get("kernels", key)


def test_names_that_no_entry_has_are_passed_over(filled: Store, folder: Path, tmp_path: Path) -> None:
    """Other files in a folder are neither pulled nor signed."""
    push(filled, location_of(str(folder)))
    for name in (".hybrid-part", "with space"):
        (folder / ENTRY.kind / name).write_bytes(b"other")
    assert sign(location_of(str(folder)), KEY) == 2
    assert pull(Store(tmp_path / "pulled"), location_of(str(folder)), []) == 2


def test_pulling_is_not_cut_short(filled: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pulls waits for large entries. A place that fails amid them is told, not taken for one without entries."""
    push(filled, location_of(str(folder)))
    monkeypatch.setattr(shared, "_TIMEOUT_S", 0.0)
    assert pull(Store(tmp_path / "pulled"), location_of(str(folder)), []) == 2
    failing = location_of(str(folder))
    reads = iter([failing.read])

    def read(name: str) -> tuple[bytes, bool] | None:
        for found in reads:
            return found(name)
        raise ConnectionError("it went away")

    monkeypatch.setattr(failing, "read", read)
    with pytest.raises(CacheError, match="cannot be used: it went away"):
        pull(Store(tmp_path / "broken"), failing, [])


def test_failures_of_others_are_not_pulled(folder: Path, tmp_path: Path) -> None:
    """Also where a folder has them in spite of `push`."""
    folder.mkdir()
    location_of(str(folder)).write(f"{FAILURES}/c", pack(Content(FAILURES, "c", ".json", b"{}")))
    assert pull(Store(tmp_path / "pulled"), location_of(str(folder)), []) == 0


@pytest.mark.parametrize("url", [None, "memory://hybrid-large-entries"])
def test_an_entry_that_is_too_large_is_not_read(
    url: str | None,
    filled: Store,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither is what is no file. Others count, and `push` replaces both."""
    location = location_of(url or str(folder))
    push(filled, location, KEY)
    location.write(f"{ENTRY.kind}/{ENTRY.key}", b"0" * 10_000)
    monkeypatch.setattr(shared, "_MAX_BYTES", 9_999)
    store = _behind(tmp_path, location.text, keys=(PUBLIC,))
    with caplog.at_level(logging.WARNING):
        assert store.get(ENTRY.kind, ENTRY.key) is None
    assert "more than 9999 bytes" in caplog.text
    assert store.get("times", "b") == b"{}"
    assert push(filled, location, KEY) == 1
    if url is None:
        (folder / ENTRY.kind / ENTRY.key).unlink()
        os.mkfifo(folder / ENTRY.kind / ENTRY.key)
        assert _behind(tmp_path, folder).get(ENTRY.kind, ENTRY.key) is None
        assert push(filled, location, KEY) == 1


def test_a_link_to_the_folder_is_followed_once(filled: Store, folder: Path, tmp_path: Path) -> None:
    """Whoever owns the link cannot lead it elsewhere after the folder was found to be private."""
    push(filled, location_of(str(folder)))
    link = tmp_path / "link"
    link.symlink_to(folder)
    store = _behind(tmp_path, link)
    assert store.get("times", "b") == b"{}"
    link.unlink()
    link.symlink_to(tmp_path)
    assert store.get(ENTRY.kind, ENTRY.key) == ENTRY.data


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The URL of a server of the folder's files."""
    folder.mkdir()
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_entries_of_a_url_count_if_they_are_signed(
    server: str, filled: Store, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Absent entries are misses without a warning."""
    push(filled, location_of(str(folder)))
    assert _behind(tmp_path, server, keys=(PUBLIC,)).get(ENTRY.kind, ENTRY.key) is None
    sign(location_of(str(folder)), KEY)
    caplog.clear()
    store = _behind(tmp_path, server, keys=(PUBLIC,))
    with caplog.at_level(logging.WARNING):
        assert store.get(ENTRY.kind, "absent") is None
        assert store.get(ENTRY.kind, ENTRY.key) == ENTRY.data
    assert not caplog.records


def test_a_url_that_can_be_written(filled: Store, tmp_path: Path) -> None:
    """Push, sign and pull work with any file system of fsspec."""
    location = location_of("memory://hybrid-tests")
    assert push(filled, location) == 2
    assert pull(Store(tmp_path / "unsigned"), location, [PUBLIC]) == 0
    assert sign(location, KEY) == 2
    assert pull(Store(tmp_path / "signed"), location, [PUBLIC]) == 2
    assert Store(tmp_path / "signed").get(ENTRY.kind, ENTRY.key) == ENTRY.data


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.fault(
    "a shared cache that cannot be reached, or does not answer", "one warning within two seconds; it is not asked again"
)
@pytest.mark.parametrize("kind", ["silent", "refuses", "no folder", "no such protocol"])
def test_a_place_that_does_not_answer_costs_one_warning(
    kind: str,
    silent: str,
    filled: Store,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next location is asked, and the first one never again."""
    monkeypatch.setattr(shared, "_TIMEOUT_S", 0.2)
    push(filled, location_of(str(folder)))
    lost = {
        "silent": silent,
        "refuses": "http://127.0.0.1:9",
        "no folder": str(tmp_path / "nowhere"),
        "no such protocol": "nothing://here",
    }[kind]
    store = _behind(tmp_path, lost, folder, keys=(PUBLIC,))
    with caplog.at_level(logging.WARNING):
        assert store.get(ENTRY.kind, ENTRY.key) == ENTRY.data
        asked: list[float] = []
        within = shared._within
        monkeypatch.setattr(shared, "_within", lambda limit, work: (asked.append(limit), within(limit, work))[1])
        assert store.get(ENTRY.kind, "absent") is None
        assert len(asked) == 1  # the folder
    (record,) = caplog.records
    assert f"the shared cache {lost} is not used" in record.getMessage()


def test_commands_tell_that_a_place_cannot_be_reached(filled: Store, tmp_path: Path) -> None:
    for use in (
        lambda location: pull(filled, location, []),
        lambda location: sign(location, KEY),
    ):
        with pytest.raises(CacheError, match="cannot be used: there is no such folder"):
            use(location_of(str(tmp_path / "nowhere")))
        with pytest.raises(CacheError, match="cannot be used: there is no such folder"):
            use(location_of("memory://hybrid-nowhere"))
        with pytest.raises(CacheError, match=r"http://127.0.0.1:9 cannot be used: Cannot connect"):
            use(location_of("http://127.0.0.1:9"))
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot be used"):
        push(filled, location_of(str(tmp_path / "file")))


def test_a_local_store_that_cannot_be_written(
    filled: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are given all the same, and no path."""
    push(filled, location_of(str(folder)))
    store = _behind(tmp_path, folder)
    monkeypatch.setattr(store, "_only_read", "it is only read")
    assert store.get(ENTRY.kind, ENTRY.key) == ENTRY.data
    assert store.path_of(ENTRY.kind, ENTRY.key) is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_entries_of_another_user_do_not_count(filled: Store, folder: Path, tmp_path: Path) -> None:
    """A signature makes them count."""
    push(filled, location_of(str(folder)), KEY)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 12345, 12345)
    assert _behind(tmp_path, folder).get(ENTRY.kind, ENTRY.key) is None
    assert _behind(tmp_path, folder, keys=(PUBLIC,)).get(ENTRY.kind, ENTRY.key) == ENTRY.data


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes another user")
def test_a_cache_of_roots_serves_other_users(filled: Store) -> None:
    """Another user trusts what root alone can write, and keeps what is found in a store of its own."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        push(filled, location_of(f"{base}/shared"))
        (base / "home").mkdir()
        os.chown(base / "home", 12345, 12345)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(12345)
                os.setuid(12345)
                store = Store(base / "home" / "cache", behind=SharedCaches([f"{base}/shared"], ()))
                path = store.path_of(ENTRY.kind, ENTRY.key)
                status = 0 if path is not None and path.stat().st_uid == 12345 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
