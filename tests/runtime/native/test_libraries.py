"""Kernel libraries from the store: verified, then opened from memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from pathlib import Path

import pytest
import torch

from tests.runtime.plans import Draft
from torch_hybrid_backend.errors import CacheError, HybridError
from torch_hybrid_backend.runtime.native import libraries
from torch_hybrid_backend.runtime.native.description import ValueKind
from torch_hybrid_backend.runtime.native.ops import Binding, Guard, Plan
from torch_hybrid_backend.storage.store import Store

N = 4096  # as in conftest.py


@pytest.fixture
def entry(kernels: str, tmp_path: Path) -> Path:
    """The tests' kernels as an entry of a store of their own."""
    return Store(tmp_path / "cache").put("kernels", "key", Path(kernels).read_bytes(), ".so")


def doubling(library: Path) -> Plan:
    draft = Draft()
    x = draft.add_value(ValueKind.INPUT, 0, torch.float32, [N], [1])
    out = draft.add_value(ValueKind.FRESH, 0, torch.float32, [N], [1])
    draft.add_kernel(str(library), "double", [x, out])
    return draft.seal(1, 0, 0, [out])


def check(plan: Plan) -> None:
    x = torch.randn(N)
    outputs = plan.run(Binding(plan, Guard([]), {}, {}), [x])
    assert outputs is not None
    assert torch.equal(outputs[0], 2 * x)


def test_a_library_survives_what_happens_to_its_file(entry: Path) -> None:
    """Truncated, then deleted while its kernels are loaded: they run on, in old plans and in new ones."""
    plan = doubling(entry)
    check(plan)
    os.truncate(entry, 0)
    check(plan)
    entry.unlink()
    check(plan)
    check(doubling(entry))


class _Loaded(ctypes.Structure):
    """The beginning of dl_iterate_phdr's dl_phdr_info."""

    _fields_ = (("address", ctypes.c_size_t), ("name", ctypes.c_char_p))


def test_no_library_has_the_name_of_a_descriptor(entry: Path) -> None:
    """Backtraces, such as those of TVM's errors, read the files of all loaded libraries; a descriptor may be another file by then."""
    plan = doubling(entry)
    check(plan)
    names: list[bytes] = []
    visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(visit(lambda info, *_: names.append(info.contents.name) or 0), None)
    assert any(name.startswith(b"?proc/self/fd/") for name in names)
    assert not any(name.startswith(b"/proc/self/fd/") for name in names)


@pytest.mark.parametrize("harm", ["bit", "truncated", "other entry", "link", "writable for all", "pipe"])
def test_what_was_not_put_there_is_not_opened(harm: str, entry: Path, tmp_path: Path) -> None:
    """A changed, exchanged or foreign file is refused with its path, and nothing of it is loaded."""
    content = entry.read_bytes()
    if harm == "bit":
        entry.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "truncated":
        os.truncate(entry, len(content) // 2)
    elif harm == "other entry":  # whole, and named rightly, but for another key
        other = Store(tmp_path / "cache").put("kernels", "other", content, ".so")
        entry = other.replace(entry.parent / other.name)
    elif harm == "link":
        (tmp_path / "elsewhere.so").write_bytes(content)
        entry.unlink()
        entry.symlink_to(tmp_path / "elsewhere.so")
    elif harm == "writable for all":
        entry.chmod(0o666)
    else:
        entry.unlink()
        os.mkfifo(entry)
    with pytest.raises(CacheError, match=str(entry)):
        doubling(entry)
    assert str(entry) not in libraries._open


def test_many_libraries_are_told_apart(kernels: str, tmp_path: Path) -> None:
    """Descriptors are used again, and the loader knows libraries by name: each plan still gets its own library, and none stays open."""
    store = Store(tmp_path / "cache")
    before, plans, names = len(os.listdir("/proc/self/fd")), [], set()
    for number in range(8):
        padded = Path(kernels).read_bytes() + bytes([number])
        path = store.put("kernels", f"key{number}", padded, ".so")
        plans.append(doubling(path))
        check(plans[-1])
        names.add(libraries._open[str(path)].name)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(names) == 8


def _libraries_in_memory() -> int:
    """Lines of this process's memory map that are copies of kernel libraries (a name of hexadecimal digits)."""
    return len(re.findall(r"/memfd:[0-9a-f]+", Path("/proc/self/maps").read_text()))


def test_libraries_are_unloaded_with_their_last_plan(kernels: str, tmp_path: Path) -> None:
    """A library leaves the process with the last plan that runs its kernels, and comes back for a new one."""
    gc.collect()
    before = _libraries_in_memory()
    entry = Store(tmp_path / "cache").put("kernels", "key", Path(kernels).read_bytes(), ".so")
    first, second = doubling(entry), doubling(entry)
    loaded = _libraries_in_memory()
    assert loaded > before
    del first
    gc.collect()
    assert _libraries_in_memory() == loaded
    check(second)
    del second
    gc.collect()
    assert _libraries_in_memory() <= before  # others may have been unloaded meanwhile
    assert str(entry) not in libraries._open
    check(doubling(entry))


def test_without_memory_files(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified file itself is opened where memory cannot be opened as a library."""
    monkeypatch.setattr(libraries, "_unique", lambda descriptor: "/nonexistent/fd")
    check(doubling(entry))
    assert str(entry) not in libraries._open

    def forbidden(_: str) -> int:
        raise PermissionError("memfd_create")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    check(doubling(entry))


def test_errors_name_the_file(entry: Path) -> None:
    """An unknown kernel in a library opened from memory: the message has the library's path."""
    draft = Draft()
    x = draft.add_value(ValueKind.INPUT, 0, torch.float32, [N], [1])
    draft.add_kernel(str(entry), "halve", [x])
    for _ in range(2):
        with pytest.raises(HybridError, match=rf'{entry} has no kernel "halve"'):
            draft.seal(1, 0, 0, [])
