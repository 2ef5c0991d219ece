"""Weights that plans hold in packed form, moved from memory to a file.

    parameter, 98 MiB in memory  ->  write the file, map it at the same addresses, page it out  ->  0 MiB in memory

Nothing of a parameter changes but where its bytes lie: not its address, its contents, or that writes to it are noticed. Whoever reads one gets
its pages from the file, and whoever writes to one gets a copy of that page in memory (a private mapping). So a further graph, another size,
`state_dict()` and an optimizer's step work as before. The file has no name: it goes with the last mapping of it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_hybrid_backend.errors import failures

_log = logging.getLogger(__name__)

_MIB = 1 << 20
# Each mapping is one more area in the kernel's tables, of which a process has 65,530.
_LEAST_BYTES = 64 << 10
_MADV_PAGEOUT = 21  # Linux 5.4
_MAP_PRIVATE, _MAP_FIXED = 0x02, 0x10
# What lies in files, by address.
_moved: dict[int, Pages] = {}
_FAILED = ctypes.c_void_p(-1).value

# The C library's, which the interpreter has loaded: no library is opened here. Python's `mmap` chooses its addresses itself.
_mmap = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)(
    ("mmap", ctypes.pythonapi)
)
_madvise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(("madvise", ctypes.pythonapi))


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole pages of a storage: addresses from `begin` up to, not including, `end`."""

    begin: int
    end: int
    storage: weakref.ref[torch.UntypedStorage]  # equal to another reference only if both live

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class OffloadedWeights:
    """Weights that lie in a file. `is_new`: some were mapped anew for it; others lay there already, for another graph."""

    pages: tuple[Pages, ...]
    is_new: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(pages.size_bytes for pages in self.pages)

    def page_out(self) -> None:
        """Free the memory of pages that were read since. Pages that were written to stay: their contents are in no file."""
        for pages in self.pages:
            if pages.storage() is not None:
                _madvise(pages.begin, pages.size_bytes, _MADV_PAGEOUT)


def offload(
    tensors: Sequence[torch.Tensor], folder: Path, is_unchanged: Callable[[], bool] = lambda: True
) -> OffloadedWeights:
    """Move the memory of tensors to a file in `folder`; return what was moved.

    Left in memory: tensors on other devices, memory that is pinned or mapped to be shared, with another process or a file, and less than 64
    KiB. `is_unchanged`: asked when the file is written; False if somebody has written to the tensors meanwhile, and nothing is moved then.
    One WARNING if the file cannot be written; nothing is moved then. What watches the tensors' memory for writes has to watch it anew.
    """
    found = pages_of(tensors)
    for begin in [begin for begin, each in list(_moved.items()) if each.storage() is None]:
        _moved.pop(begin, None)
    there = [each for each in found if _moved.get(each.begin) == each]
    pages = [each for each in found if each not in there]
    if not pages:
        return OffloadedWeights(tuple(there))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for each in pages:
                _write(file.fileno(), each)
            os.fdatasync(file.fileno())  # pages that are not on the disk yet cannot leave memory
            if not is_unchanged():
                return OffloadedWeights(())
            offset = 0
            for each in pages:
                if _mapped(file.fileno(), each, offset):
                    _moved[each.begin] = each
                    there.append(each)
                offset += each.size_bytes
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except failures(OSError) as error:
        _log.warning("weights stay in memory, as no file can be written in %s (cache_dir): %s", folder, error)
        return OffloadedWeights(())
    return OffloadedWeights(tuple(there), is_new=True)


def pages_of(tensors: Sequence[torch.Tensor]) -> list[Pages]:
    """The pages that lie wholly in the storages of tensors, each storage once, without what `offload` leaves in memory."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_shared() or tensor.is_pinned())  # type: ignore[no-untyped-call]
    }
    shared = _shared_areas()
    found = []
    for storage in storages.values():
        address = storage.data_ptr()
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        is_shared = any(first < end and begin < last for first, last in shared)
        if end - begin >= _LEAST_BYTES and not is_shared:
            found.append(Pages(begin, end, weakref.ref(storage)))
    return found


def _shared_areas() -> list[tuple[int, int]]:
    """First and last address of what this process has mapped to be shared (proc_pid_maps(5))."""
    areas = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, *_ = line.split()
            if permissions.endswith("s"):
                first, last = addresses.split("-")
                areas.append((int(first, 16), int(last, 16)))
    return areas


def _write(descriptor: int, pages: Pages) -> None:
    data = memoryview((ctypes.c_char * pages.size_bytes).from_address(pages.begin))
    while data:
        data = data[os.write(descriptor, data) :]


def _mapped(descriptor: int, pages: Pages, offset: int) -> bool:
    """Map a part of the file in place of pages, in one step for all threads; False if the kernel refuses, and nothing has changed."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    made = _mmap(pages.begin, pages.size_bytes, protection, _MAP_PRIVATE | _MAP_FIXED, descriptor, offset)
    return bool(made != _FAILED)
