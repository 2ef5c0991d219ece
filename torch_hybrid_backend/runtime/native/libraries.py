"""Kernel libraries on their way from the cache into the process: what is opened is what was verified.

Enters: the path of a kernel library. Leaves: the name under which the C++ side opens it. A file of the store is read once, its checksum
verified, and a copy in memory opened: nobody can change it in between, and a file that is truncated later, while its kernels run, would
end the process with SIGBUS.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from torch_hybrid_backend.errors import HybridError, failures
from torch_hybrid_backend.storage.store import is_entry, read_entry


class OpenLibrary:
    """A library in memory, by the name that the C++ side knows it by. It is closed when the last plan that holds this object is gone."""

    def __init__(self, name: str, close: Callable[[str], object]) -> None:
        self.name = name
        weakref.finalize(self, close, name).atexit = False


# By path. Writes of single items are atomic; two threads that open one library at once open it twice, to no harm.
_open: weakref.WeakValueDictionary[str, OpenLibrary] = weakref.WeakValueDictionary()
_count = itertools.count(1)


def use_library(
    library: str, use: Callable[[str], object], close: Callable[[str], object]
) -> tuple[str, OpenLibrary | None]:
    """Call `use` with a name that the C++ side can open `library` under; raises what `use` does, the library's path in the message.

    Returns the name, and what to hold for as long as the library is used, after which `close` is called with the name; None for one that
    stays open.

    A file that is no entry of a store (an engine's own) is opened as it is. Raises CacheError where an entry is gone, corrupt or not
    private to this user.
    """
    path = Path(library)
    known = _open.get(library)
    if known is not None or not is_entry(path):
        name = known.name if known is not None else library
        _use(name, library, use)
        return name, known
    content = read_entry(path)
    try:
        descriptor = os.memfd_create(path.name[:16])
    except failures(AttributeError, OSError):  # not Linux, or forbidden
        use(library)
        return library, None
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        opened = OpenLibrary(_unique(descriptor), close)
        try:
            _use(opened.name, library, use)
        except HybridError as error:
            if "cannot open" not in str(error):
                raise
            use(library)  # a system that does not let memory be opened as a library
            return library, None
        _open[library] = opened
        return opened.name, opened
    finally:
        os.close(descriptor)  # the mapped library lives on


def _use(name: str, library: str, use: Callable[[str], object]) -> None:
    try:
        use(name)
    except HybridError as error:
        raise type(error)(str(error).replace(name, library)) from error


def _unique(descriptor: int) -> str:
    """A path of the open file that no library was ever opened under: the loader takes one of equal name for the same library.

    Descriptors are used again, so a count is written into the path, its bits as "/." and "/".
    """
    bits = "".join("/." if bit == "1" else "/" for bit in f"{next(_count):b}")
    return f"/proc/self/fd{bits}/{descriptor}"
