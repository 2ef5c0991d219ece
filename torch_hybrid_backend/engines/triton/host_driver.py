"""A driver for the CPU: the functions of NVIDIA's that csrc/torch/cuda_driver.cc asks for, behind which Triton's interpreter runs the kernels.

A module's image is an artifact without machine code; a launch on the host's memory has ended when it returns. So the very steps that launch
kernels on a GPU, with their addresses, numbers and grids, are run without one.

    HostLaunch      the step: it tells C++ where the driver's functions are found by name
    DRIVER          what they ask; a DriverError becomes the status that the function returns
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from torch_hybrid_backend.core.program import DeviceLaunch
from torch_hybrid_backend.engines.triton.artifact import Header, header_at
from torch_hybrid_backend.engines.triton.interpreted import interpretable, parameter
from torch_hybrid_backend.errors import CacheError, HybridError, failures

_log = logging.getLogger(__name__)


class Status(IntEnum):
    """Status that a driver's functions return: CUresult, as cuda.h numbers it."""

    SUCCESS = 0
    OUT_OF_MEMORY = 2
    INVALID_IMAGE = 200
    NOT_FOUND = 500
    ILLEGAL_ADDRESS = 700
    NOT_SUPPORTED = 801
    UNKNOWN = 999


class DriverError(HybridError):
    """A function of the driver fails with `status`."""

    def __init__(self, status: Status, why: str = "") -> None:
        super().__init__(why or status.name)
        self.status = status


@dataclass(frozen=True, slots=True)
class Node:
    """A launch of a graph. `given`: its parameters, copied when it was made. `after`: the nodes that it waits for."""

    kernel: int
    grid: tuple[int, int, int]
    given: list[Any]
    after: tuple[int, ...]


class HostDriver:
    """Modules by number, as a driver's callers know them; a module's only kernel has its number. Graphs and their nodes have numbers too.
    Threads may use it at once.

    Modules stay loaded: nothing asks a driver to let go of them (csrc/torch/cuda_driver.h).
    """

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._headers: dict[int, Header] = {}
        self._functions: dict[int, Any] = {}
        self._graphs: dict[int, dict[int, Node]] = {}  # executable ones too
        # The interpreter replaces functions of triton.language while it runs a kernel.
        self._interpreting = threading.Lock()

    def load(self, image: bytes) -> int:
        """A module's number. Raises DriverError for what is no image."""
        try:
            header = header_at(image)
        except CacheError as error:
            raise DriverError(Status.INVALID_IMAGE, str(error)) from error
        number = next(self._count)
        self._headers[number] = header
        return number

    def kernel(self, module: int, symbol: str) -> int:
        """The number of a module's kernel. Raises DriverError where there is none of that name."""
        header = self._headers[module]
        if header.symbol != symbol:
            raise DriverError(Status.NOT_FOUND, f"the module has the kernel {header.symbol}, not {symbol}")
        if module not in self._functions:
            self._functions[module] = interpretable(header.text, symbol)
        return module

    def launch(self, number: int, grid: tuple[int, int, int], parameters: Callable[[int], int]) -> None:
        """Run a kernel. `parameters`: the address of each. Raises DriverError, with the program in the log, for one that cannot be run."""
        self.run(number, grid, self.given(number, parameters))

    def given(self, number: int, parameters: Callable[[int], int]) -> list[Any]:
        """A kernel's parameters as they are now, for `run`. `parameters`: the address of each."""
        return [parameter(type_, parameters(i)) for i, type_ in enumerate(self._headers[number].signature.values())]

    def run(self, number: int, grid: tuple[int, int, int], given: list[Any]) -> None:
        """Run a kernel on what `given` gave. Raises as `launch` does."""
        header = self._headers[number]
        try:
            with self._interpreting, np.errstate(all="ignore"):
                self._functions[number][grid](*given, **header.constants)
        except failures(Exception) as error:  # whatever the interpreter and NumPy raise
            _log.exception("the kernel %s cannot be interpreted:\n%s", header.symbol, header.text)
            raise DriverError(Status.NOT_SUPPORTED, str(error)) from error

    @property
    def graphs(self) -> int:
        """The number of graphs; an executable one counts beside the one that it was made of."""
        return len(self._graphs)

    def graph(self, of: int | None = None) -> int:
        """The number of a new graph: an empty one, or an executable one of another."""
        number = next(self._count)
        self._graphs[number] = {} if of is None else dict(self._graphs[of])
        return number

    def add(self, graph: int, node: Node) -> int:
        """A new node's number."""
        number = next(self._count)
        self._graphs[graph][number] = node
        return number

    def change(self, executable: int, number: int, node: Node) -> None:
        """Another launch in place of a node, which waits for what that waited for."""
        nodes = self._graphs[executable]
        nodes[number] = replace(node, after=nodes[number].after)

    def launch_graph(self, executable: int) -> None:
        """Run a graph's kernels: of those that may run the last one first, so that one which does not wait for what it must shows.

        Raises as `launch` does.
        """
        left = dict(self._graphs[executable])
        while left:
            number = next(number for number in reversed(left) if not left.keys() & set(left[number].after))
            node = left.pop(number)
            self.run(node.kernel, node.grid, node.given)

    def destroy(self, graph: int) -> None:
        """Let go of a graph."""
        del self._graphs[graph]


DRIVER = HostDriver()


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_: ClassVar[list[Any]] = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class _NodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_: ClassVar[list[Any]] = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


# By the names and with the parameters that cuda.h has: each takes pointers, numbers and texts, and raises what it returns as a status.
_pointers = ctypes.POINTER(ctypes.c_void_p)
_THE_CONTEXT = 1  # every thread's


def _init(_flags: int) -> None:
    pass


def _device_get(device: Any, ordinal: int) -> None:
    device[0] = ordinal


def _context_retain(context: Any, _device: int) -> None:
    context[0] = _THE_CONTEXT


def _context_current(context: Any) -> None:
    context[0] = _THE_CONTEXT


def _module_load(module: Any, image: int) -> None:
    module[0] = DRIVER.load(ctypes.string_at(image))


def _module_function(function: Any, module: int, symbol: bytes) -> None:
    function[0] = DRIVER.kernel(module, symbol.decode())


def _function_attribute(_function: int, _attribute: int, _value: int) -> None:
    pass


def _launch(config: Any, function: int, parameters: Any, _extra: int | None) -> None:
    told = config.contents
    DRIVER.launch(function, (told.x, told.y, told.z), parameters.__getitem__)


def _node(told: Any, after: tuple[int, ...] = ()) -> Node:
    node = told.contents
    given = DRIVER.given(node.function, node.parameters.__getitem__)
    return Node(node.function, (node.x, node.y, node.z), given, after)


def _graph_create(graph: Any, _flags: int) -> None:
    graph[0] = DRIVER.graph()


def _graph_add(node: Any, graph: int, after: Any, count: int, told: Any) -> None:
    node[0] = DRIVER.add(graph, _node(told, tuple(after[i] for i in range(count))))


def _graph_instantiate(executable: Any, graph: int, _flags: int) -> None:
    executable[0] = DRIVER.graph(graph)


def _graph_change(executable: int, node: int, told: Any) -> None:
    DRIVER.change(executable, node, _node(told))


def _graph_launch(executable: int, _stream: int | None) -> None:
    DRIVER.launch_graph(executable)


def _graph_destroy(graph: int) -> None:
    DRIVER.destroy(graph)


def _capture_mode(_mode: Any) -> None:
    pass


_NAMES: Mapping[int, Any] = {s: ctypes.create_string_buffer(f"CUDA_ERROR_{s.name}".encode()) for s in Status}


def _error_name(status: int, name: Any) -> None:
    name[0] = ctypes.addressof(_NAMES.get(status, _NAMES[Status.UNKNOWN]))


_FUNCTIONS: Mapping[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "cuInit": (_init, (ctypes.c_uint,)),
    "cuDeviceGet": (_device_get, (ctypes.POINTER(ctypes.c_int), ctypes.c_int)),
    "cuDevicePrimaryCtxRetain": (_context_retain, (_pointers, ctypes.c_int)),
    "cuCtxGetCurrent": (_context_current, (_pointers,)),
    "cuModuleLoadData": (_module_load, (_pointers, ctypes.c_void_p)),
    "cuModuleGetFunction": (_module_function, (_pointers, ctypes.c_void_p, ctypes.c_char_p)),
    "cuFuncSetAttribute": (_function_attribute, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)),
    "cuLaunchKernelEx": (
        _launch,
        (ctypes.POINTER(_LaunchConfig), ctypes.c_void_p, _pointers, ctypes.c_void_p),
    ),
    "cuGetErrorName": (_error_name, (ctypes.c_int, _pointers)),
    "cuGraphCreate": (_graph_create, (_pointers, ctypes.c_uint)),
    "cuGraphAddKernelNode_v2": (
        _graph_add,
        (_pointers, ctypes.c_void_p, _pointers, ctypes.c_size_t, ctypes.POINTER(_NodeParameters)),
    ),
    "cuGraphInstantiateWithFlags": (_graph_instantiate, (_pointers, ctypes.c_void_p, ctypes.c_ulonglong)),
    "cuGraphExecKernelNodeSetParams_v2": (
        _graph_change,
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_NodeParameters)),
    ),
    "cuGraphLaunch": (_graph_launch, (ctypes.c_void_p, ctypes.c_void_p)),
    "cuGraphDestroy": (_graph_destroy, (ctypes.c_void_p,)),
    "cuGraphExecDestroy": (_graph_destroy, (ctypes.c_void_p,)),
    "cuThreadExchangeStreamCaptureMode": (_capture_mode, (ctypes.POINTER(ctypes.c_int),)),
}


@functools.cache
def _c_function(name: str) -> Any:
    """The driver's function of that name, for C; one that is not served says so when it is called."""
    function, parameters = _FUNCTIONS.get(name, (_not_served, ()))

    def answer(*arguments: Any) -> int:
        try:
            function(*arguments)
        except DriverError as error:
            _log.info("%s: %s", name, error)
            return error.status
        except BaseException:  # it must not go through C++
            _log.exception("%s failed", name)
            return Status.UNKNOWN
        return Status.SUCCESS

    return ctypes.CFUNCTYPE(ctypes.c_int, *parameters)(answer)


def _not_served() -> None:
    raise DriverError(Status.NOT_SUPPORTED)


def _address_of(name: bytes) -> int | None:
    return ctypes.cast(_c_function(name.decode()), ctypes.c_void_p).value


_FIND = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_address_of)


def find_address() -> int:
    """The address of the function that gives C++ the address of each of the driver's."""
    address = ctypes.cast(_FIND, ctypes.c_void_p).value
    assert address is not None
    return address


@dataclass(frozen=True, slots=True)
class HostLaunch(DeviceLaunch):
    """A launch on the CPU's memory by this driver; what the plan does is as for one on a GPU."""

    def describe(self) -> dict[str, Any]:
        return {**DeviceLaunch.describe(self), "driver": find_address()}
