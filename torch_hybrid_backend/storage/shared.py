"""Caches that several users or machines share: folders and URLs (fsspec), read where the local store has no entry.

    <location>/<kind>/<key>    magic, the length of a header (8 bytes, little-endian), the header in JSON, the content of the entry

The header has the suffix of the entry's file, the checksum of kind, key and content, and signatures: pairs of a public key and an Ed25519
signature of kind, key, suffix and content, in hexadecimal. An entry counts if a trusted key signed it, or if it lies in a folder that only this
user or root can write. All else is a miss, with a warning. Look-ups never write.

A look-up that takes more than two seconds is given up, and its location is not asked again by this process; `pull` waits. What has more than
4 GiB is no entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch_hybrid_backend.errors import CacheError, failures, ignored
from torch_hybrid_backend.signatures import is_signed, signature
from torch_hybrid_backend.storage.store import (
    Content,
    Store,
    check_privacy,
    checksum,
    is_name,
    is_private,
    is_suffix,
    open_entry,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAGIC = b"hybrid-entry-1\n"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 1 << 16
_MAX_BYTES = 1 << 32  # of an entry: engines of TensorRT hold weights
_TIMEOUT_S = 2.0
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

# Pairs of a public key and a signature.
Signatures = tuple[tuple[bytes, bytes], ...]


class SharedCaches:
    """Locations, asked in order. Thread-safe."""

    def __init__(self, locations: Iterable[str], keys: Sequence[bytes]) -> None:
        """`keys`: public keys whose entries count."""
        self._keys = frozenset(keys)
        self._locations = [_Asked(location_of(text)) for text in locations]
        self._missing: set[tuple[str, str]] = set()

    def get(self, kind: str, key: str) -> Content | None:
        """The entry in the first location that has one that counts, or None."""
        if (kind, key) in self._missing:
            return None
        for asked in self._locations:
            found = asked.get(kind, key, self._keys)
            if found is not None:
                return found
        self._missing.add((kind, key))
        return None

    def forget(self, kind: str, key: str) -> None:
        """Let the entry be a miss from now on: it is of no use."""
        self._missing.add((kind, key))


class Location(Protocol):
    """Place of packed entries, by the name `kind/key`. Methods raise OSError, and whatever a file system of fsspec raises."""

    text: str

    def prepare(self) -> None:
        """Import what the location needs; nothing waits for anybody here."""
        ...

    def read(self, name: str) -> tuple[bytes, bool] | None:
        """The bytes of a name, and True if only this user or root can have written them; None if there are none. Raises CacheError for what is
        no file, or too large."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write the bytes of a name in one step."""
        ...

    def create(self) -> None:
        """Make the place if it is absent."""
        ...

    def names(self) -> list[tuple[str, str]]:
        """Kinds and keys of its entries, in order."""
        ...


def location_of(text: str) -> Location:
    """The folder or the URL that a text names."""
    return _Remote(text) if _URL.match(text) else _Folder(Path(text).expanduser())


def push(store: Store, location: Location, key: Any = None) -> int:
    """Write all entries of a store to a location, signed with a private key unless that is None; return the number of those that are new there.
    Failures stay. Raises CacheError where the location cannot be written."""
    written = 0
    with _reached(location):
        location.create()
        for content in store.contents():
            name = f"{content.kind}/{content.key}"
            there: tuple[bytes, bool] | None = None
            signatures: Signatures = ()
            with contextlib.suppress(CacheError):  # a damaged one is replaced
                there = location.read(name)
                kept, found = unpack(there[0], content.kind, content.key) if there is not None else (None, ())
                signatures = found if kept == content else ()
                if kept == content and key is None:
                    continue
            data = pack(content, signatures, key)
            if there is None or data != there[0]:
                location.write(name, data)
                written += 1
    return written


def pull(store: Store, location: Location, keys: Sequence[bytes]) -> int:
    """Put the entries of a location that count into a store; return the number of those that it did not have. Raises CacheError where the
    location cannot be read."""
    with _reached(location):
        asked = _Asked(location)
        found = (asked.counted(kind, key, frozenset(keys)) for kind, key in location.names())
        return sum(store.add(content) for content in found if content is not None)


def sign(location: Location, key: Any) -> int:
    """Sign all entries of a location with a private key; return their number. A damaged entry gives a WARNING, and is not signed. Raises
    CacheError where the location cannot be written."""
    signed = 0
    with _reached(location):
        for kind, name in location.names():
            try:
                found = location.read(f"{kind}/{name}")
                if found is None:  # removed meanwhile
                    continue
                content, signatures = unpack(found[0], kind, name)
            except CacheError as error:
                text = "an entry of the shared cache is not signed, %s/%s/%s: %s; `hybrid cache push` from a cache that has it replaces it"
                _log.warning(text, location.text, kind, name, error)
                continue
            location.write(f"{kind}/{name}", pack(content, signatures, key))
            signed += 1
    return signed


def pack(content: Content, signatures: Signatures = (), key: Any = None) -> bytes:
    """The bytes of an entry, with signatures, and that of a private key unless it is None."""
    pairs = dict(signatures)
    if key is not None:
        public, signed = signature(key, _message(content))
        pairs[public] = signed
    header = json.dumps(
        {
            "suffix": content.suffix,
            "checksum": checksum(content.kind, content.key, content.data),
            "signatures": [[public.hex(), signed.hex()] for public, signed in pairs.items()],
        }
    ).encode()
    return b"".join([_MAGIC, _LENGTH.pack(len(header)), header, content.data])


def unpack(data: bytes, kind: str, key: str) -> tuple[Content, Signatures]:
    """The entry that bytes hold, and its signatures, which are not checked. Raises CacheError for bytes that are not the whole entry of that
    kind and key."""
    try:
        if not data.startswith(_MAGIC):
            raise ValueError("it is none")
        begin = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
        if length > min(_MAX_HEADER_BYTES, len(data) - begin):
            raise ValueError("it is truncated")
        header = json.loads(data[begin : begin + length])
        content = Content(kind, key, header["suffix"], data[begin + length :])
        if not isinstance(content.suffix, str) or not is_suffix(content.suffix):
            raise ValueError(f"its suffix is {content.suffix!r}")
        if header["checksum"] != checksum(kind, key, content.data):
            raise ValueError("its checksum differs")
        pairs = tuple((bytes.fromhex(public), bytes.fromhex(signed)) for public, signed in header["signatures"])
    except failures(ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CacheError(f"it is not the whole entry {kind}/{key}: {error}") from error
    return content, pairs


def _message(content: Content) -> bytes:
    names = "\0".join((content.kind, content.key, content.suffix))
    return _MAGIC + names.encode() + b"\0" + hashlib.sha256(content.data).digest()


class _UnsignedError(CacheError):
    """No trusted key signed an entry of a place that others can write."""


def _counted(location: Location, kind: str, key: str, keys: frozenset[bytes]) -> Content | None:
    """The entry of a location; None if there is none. Raises CacheError for one that does not count."""
    found = location.read(f"{kind}/{key}")
    if found is None:
        return None
    data, is_ours = found
    content, signatures = unpack(data, kind, key)
    by_trusted = [(public, signed) for public, signed in signatures if public in keys]
    if not all(is_signed(public, signed, _message(content)) for public, signed in by_trusted):
        raise CacheError("its signature is wrong")
    if not by_trusted and not is_ours:
        raise _UnsignedError(
            "no key of HYBRID_CACHE_KEYS signed it, and others than this user and root can write it: name the key of those who fill "
            "the cache (`hybrid cache sign` signs entries)"
        )
    return content


class _Asked:
    """A location and what was told of it. `get` asks it until it fails: then there is one WARNING, and nobody waits for it again."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._is_lost = False
        self._is_told = False  # that entries are unsigned, as all of them may be

    def get(self, kind: str, key: str, keys: frozenset[bytes]) -> Content | None:
        """The entry if there is one that counts, and the location answers in time."""
        if self._is_lost:
            return None
        try:
            self._location.prepare()
            return _within(_TIMEOUT_S, lambda: self.counted(kind, key, keys))
        except failures(Exception) as error:  # whatever a file system of fsspec raises
            if not self._is_lost:
                self._is_lost = True
                _log.warning("the shared cache %s is not used: %s", self._location.text, _reason(error))
            return None

    def counted(self, kind: str, key: str, keys: frozenset[bytes]) -> Content | None:
        """The entry if there is one that counts. One that does not gives a WARNING, of several that nobody signed the first. Raises what the
        location raises."""
        try:
            return _counted(self._location, kind, key, keys)
        except CacheError as error:
            is_told = isinstance(error, _UnsignedError) and self._is_told
            self._is_told |= isinstance(error, _UnsignedError)
            text = "an entry of the shared cache is not used, %s/%s/%s: %s"
            _log.log(logging.INFO if is_told else logging.WARNING, text, self._location.text, kind, key, error)
            return None


def _within(seconds: float, work: Callable[[], _T]) -> _T:
    """The result of work that another thread does. Raises TimeoutError if that takes longer; the thread then ends on its own."""
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except failures(Exception) as error:  # any: it is raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="hybrid-shared-cache", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it did not answer within {seconds:g} s")
    return results[0]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


@contextlib.contextmanager
def _reached(location: Location) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except failures(Exception) as error:  # whatever a file system of fsspec raises
        raise CacheError(f"the shared cache {location.text} cannot be used: {_reason(error)}") from error


class _Folder:
    def __init__(self, root: Path) -> None:
        self.text = str(root)
        self._root = root.resolve()  # links are followed once: one that is changed later leads nobody elsewhere
        self._is_private: bool | None = None

    def prepare(self) -> None:
        pass

    def read(self, name: str) -> tuple[bytes, bool] | None:
        if not self._root.is_dir():
            raise FileNotFoundError("there is no such folder")
        path = self._root / name
        try:
            file = open_entry(path)
        except FileNotFoundError:
            return None
        with file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
                raise CacheError(f"it is no file, or has more than {_MAX_BYTES} bytes")
            is_ours = self._is_ours() and is_private(status) and is_private(path.parent.stat())
            return file.read(status.st_size), is_ours

    def _is_ours(self) -> bool:
        if self._is_private is None:
            try:
                check_privacy(self._root)
                self._is_private = True
            except CacheError as error:
                self._is_private = False
                _log.info("entries of the shared cache %s count if they are signed: %s", self.text, error)
        return self._is_private

    def write(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(mode=0o755, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".hybrid-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o644)  # others read it
            Path(temporary).replace(path)
        except BaseException:
            with ignored(OSError):
                Path(temporary).unlink(missing_ok=True)
            raise

    def create(self) -> None:
        self._root.mkdir(mode=0o755, parents=True, exist_ok=True)

    def names(self) -> list[tuple[str, str]]:
        if not self._root.is_dir():
            raise FileNotFoundError("there is no such folder")
        return _legal(f"{path.parent.name}/{path.name}" for path in self._root.glob("*/*"))


class _Remote:
    def __init__(self, url: str) -> None:
        self.text = url
        self._url = url
        self._system: tuple[int, Any, str] | None = None

    def prepare(self) -> None:
        self._opened()

    def read(self, name: str) -> tuple[bytes, bool] | None:
        system, root = self._opened()
        try:
            data = system.cat_file(f"{root}/{name}", 0, _MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > _MAX_BYTES:
            raise CacheError(f"it has more than {_MAX_BYTES} bytes")
        return data, False

    def write(self, name: str, data: bytes) -> None:
        system, root = self._opened()
        path = f"{root}/{name}"
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.pipe_file(path, data)

    def create(self) -> None:
        system, root = self._opened()
        system.makedirs(root, exist_ok=True)

    def names(self) -> list[tuple[str, str]]:
        system, root = self._opened()
        try:
            system.ls(root, detail=False)  # `find` takes a place that cannot be reached for an empty one
        except FileNotFoundError as error:
            raise FileNotFoundError("there is no such folder") from error
        return _legal(str(path).removeprefix(root).strip("/") for path in system.find(root))

    def _opened(self) -> tuple[Any, str]:
        """The file system, which a forked child opens anew, and the path in it."""
        if self._system is None or self._system[0] != os.getpid():
            import fsspec

            system, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True)
            self._system = os.getpid(), system, str(root).rstrip("/")
        return self._system[1:]


def _legal(names: Iterable[str]) -> list[tuple[str, str]]:
    """Kinds and keys of the names that entries can have."""
    pairs = ((kind, key) for kind, _, key in (name.partition("/") for name in names))
    return sorted((kind, key) for kind, key in pairs if is_name(kind) and is_name(key))
