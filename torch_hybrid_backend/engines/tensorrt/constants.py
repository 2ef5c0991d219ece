"""A region's second form: an engine with the weights as constants, beside the engine with the weights as inputs.

    refine      builds the engine with this call's weights as constants, times both forms, and keeps the constants if they are faster and fit
    pack        returns a mark of the weights; the runtime calls `pack` before a call whose weights were changed or replaced
    a call      runs the engine with constants if that holds the mark's values, otherwise the engine with inputs

A mark is a number that is never used again, so an engine of old values is never taken for one of new values. After `pack`, calls run the engine
with inputs. The build thread then compares the values. If the loaded engine holds them, calls use it again. Otherwise a new engine is
built, and replaces the loaded one by one assignment. An engine whose weights changed again meanwhile is not used.

Engines are built anew, not refitted: `docs/adr/0044-tensorrt-weights-as-constants.md` says why.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torch_hybrid_backend.builds.background import Job, as_here, build_thread
from torch_hybrid_backend.builds.builds import Build
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.engines.tensorrt.build import SerializedEngine
from torch_hybrid_backend.engines.tensorrt.runtime import EngineRunner
from torch_hybrid_backend.errors import BuildCancelledError, CompileError, failures, is_sticky

_log = logging.getLogger(__name__)

# The form with inputs is kept if it takes at most this many times as long: it holds weights once, and changes cost it nothing.
_AS_FAST = 1.02
# After more changes than this without a ready engine, the weights are expected to go on changing: no more engines are built.
MOST_CHANGES = 4
_MARKS = 16  # marks whose key is remembered: plans of several sizes have marks of the same values
_UNREAD = 4  # packed weights that wait for comparison; waiting keeps them alive

_marks = itertools.count(1)  # of the process, so that two forms never have the same mark


def are_worth_memory(as_inputs_us: float, as_constants_us: float) -> bool:
    """True if constants gain enough time to justify their memory."""
    return as_inputs_us > _AS_FAST * as_constants_us


def positions_of(region: Region) -> tuple[int, ...]:
    """Positions of the inputs that may be constants of the region's engine: parameters, buffers, and values folded from these. Empty in
    training graphs."""
    return tuple(
        i
        for i, each in enumerate(region.inputs)
        if each.is_constant and each.spec is not None and each.spec.is_static and 0 not in each.spec.shape
    )


class Maker(Protocol):
    """Builds and loads engines of a region with its weights as constants. All methods raise CompileError."""

    def key_and_request(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        """The key of the engine with these values, and the request to build it. `weights`: copies on the host."""
        ...

    def start(self, key: str, request: bytes) -> Build:
        """Start a build, or return the build that was started or kept before. Kept bytes that are no engine are built anew."""
        ...

    def load(self, key: str, built: bytes) -> tuple[EngineRunner, SerializedEngine]:
        """Load the built engine on its device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Packed weights. `ambient`: context in which the build thread reads them as the packing call would (`as_here`)."""

    mark: int
    weights: tuple[torch.Tensor, ...]
    ambient: Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    key: str
    runner: EngineRunner
    layers: tuple[str, ...]


class ConstantForm:
    """A region's engine with constants, and the marks of the values that it holds. Threads may use it at once.

    `size_bytes`: size of the constants. `capturing`: true if this thread captures a CUDA graph; packed weights are then not compared.
    """

    def __init__(self, name: str, size_bytes: int, maker: Maker, capturing: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.is_given_up = False
        self.why = ""  # reason for giving up
        self._maker = maker
        self._capturing = capturing
        self._newest = 0  # mark of the weights packed last
        # Guards `_unread`, `_has_reader` and `_keys`; held briefly, also by calls.
        self._lock = threading.Lock()
        self._unread: deque[_Values] = deque(maxlen=_UNREAD)
        self._has_reader = False  # true while a job of the build thread compares `_unread`
        self._keys: OrderedDict[int, str] = OrderedDict()  # mark -> key of the engine with its values
        # Mark -> engine that holds its values. Replaced as a whole, so that calls read it without a lock.
        self._serving: Mapping[int, EngineRunner] = {}
        # Held while weights are hashed and engines are loaded or closed; never by a call.
        self._working = threading.RLock()
        self._loaded: _Loaded | None = None
        self._building = _Building()
        self._changes = 0  # builds started since an engine held the newest values
        self._unused = 0  # marks in a row whose engine no call used
        self._is_used = False  # true if a call used the engine since the last mark
        self._begun: Build | None = None
        self._scratch_limit: int | None = None
        self._inline: int | None = None  # the thread whose packed weights are compared in `pack` itself
        # A build takes minutes: end it if nobody is left to use it.
        weakref.finalize(self, self._building.cancel).atexit = False

    # --- while engines are chosen -------------------------------------------------------------------------------------------------------

    def prepare(self, weights: Sequence[torch.Tensor]) -> EngineRunner | None:
        """The engine with these values as constants; None if it is not built. Starts its build (`begun`), unless the form was given up."""
        with self._working, self._failing():
            if self.is_given_up:
                return None
            key, request = self._key_and_request(weights)
            if self._loaded is None or self._loaded.key != key:
                build = self._building.of(key) or self._started(key, request)
                if not build.done:
                    self._begun = build
                    return None
                self._load(key, build)
            return self._loaded.runner if self._loaded is not None else None
        return None

    def begun(self) -> Build | None:
        """The build that `prepare` started or met, returned once for each `prepare`; None if there is none."""
        begun, self._begun = self._begun, None
        return begun

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Context in which `pack` of this thread compares the weights itself, and starts no build: a trial runs the loaded engine."""
        self._inline = threading.get_ident()
        try:
            yield
        finally:
            self._inline = None

    @property
    def serves(self) -> bool:
        """True if the loaded engine holds the values packed last."""
        return self._newest in self._serving

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of the loaded engine, as TensorRT fused them."""
        loaded = self._loaded
        return () if loaded is None else loaded.layers

    def limit_scratch(self, size_bytes: int) -> None:
        """Reject engines that need more than `size_bytes` of working memory from now on."""
        self._scratch_limit = size_bytes

    # --- calls --------------------------------------------------------------------------------------------------------------------------

    def pack(self, *weights: torch.Tensor) -> torch.Tensor:
        """The mark of these values: int64, one element, on the CPU. Outside of `trial`, neither waits nor reads the values."""
        mark = self._newest = next(_marks)
        if self._inline == threading.get_ident():
            self._compare(_Values(mark, weights, contextlib.nullcontext), may_build=False)
        elif not (self.is_given_up or self._capturing()):
            values = _Values(mark, weights, as_here(weights))
            with self._lock:
                self._unread.append(values)
                has_reader, self._has_reader = self._has_reader, True
            if not has_reader:
                build_thread().submit(Job(_reading(weakref.ref(self))))
        return torch.tensor([mark], device="cpu")  # whatever the user's default device is

    def engine_of(self, mark: int) -> EngineRunner | None:
        """The engine that holds the values of a mark; None if the engine with inputs must run."""
        engine = self._serving.get(mark)
        if engine is not None:
            self._is_used = True
        return engine

    # --- off the call -------------------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Compare all packed weights with those of the loaded engine, newest first. Equal weights use this engine; if the newest weights
        differ, another engine is built."""
        while True:
            with self._lock:
                if not self._unread:
                    self._has_reader = False
                    return
                values = self._unread.pop()
            self._compare(values, may_build=True)

    def _compare(self, values: _Values, *, may_build: bool) -> None:
        with self._working, self._failing():
            if self.is_given_up:
                return
            with values.ambient():
                key, request = self._key_and_request(values.weights)
            with self._lock:
                self._keys[values.mark] = key
                while len(self._keys) > _MARKS:
                    self._keys.popitem(last=False)
            if self._loaded is not None and self._loaded.key == key:
                if values.mark == self._newest:
                    self._building.cancel()  # a build for older values
                self._count_unused()
                self._serve()
            elif may_build and values.mark == self._newest and self._building.of(key) is None:
                build = self._started(key, request)
                _log.info("region %s: its weights changed; an engine with the new weights is built", self.name)
                _when_built(weakref.ref(self), key, build)

    def finish(self, key: str, build: Build) -> None:
        """Load the engine of a build that is done, unless the newest values are known to be others."""
        with self._working, self._failing():
            # A cancelled build may end after another build of the same key has started.
            if build is self._building.of(key) and not self.is_given_up and self._keys.get(self._newest, key) == key:
                self._load(key, build)

    def _key_and_request(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        # Copies: others may write to the weights meanwhile, and the values hashed must be those built.
        return self._maker.key_and_request([torch.empty_like(weight, device="cpu").copy_(weight) for weight in weights])

    def _started(self, key: str, request: bytes) -> Build:
        """Start the build of an engine with new values; it replaces the current build."""
        self._changes += 1
        if self._changes > MOST_CHANGES:
            raise CompileError(f"its weights changed {self._changes} times before an engine with them was ready")
        build = self._maker.start(key, request)
        self._building.put(key, build)
        return build

    def _count_unused(self) -> None:
        # Inference tensors on a device have no version counter, so every call packs them anew.
        self._unused = 0 if self._is_used else self._unused + 1
        self._is_used = False
        if self._unused > _MARKS:
            raise CompileError("its weights are packed anew in every call")

    def _load(self, key: str, build: Build) -> None:
        """Load a built engine and use it. The loaded engine is closed first, so that the device never holds two."""
        built = build.result(0)
        self._building.drop()
        self._unload()
        runner, engine = self._maker.load(key, built)
        if self._scratch_limit is not None and runner.scratch_bytes > self._scratch_limit:
            raise CompileError(
                f"with new weights its engine needs {runner.scratch_bytes} bytes of working memory; the plan has {self._scratch_limit}"
            )
        self._loaded = _Loaded(key, runner, engine.layers)
        self._serve()

    def _unload(self) -> None:
        loaded, self._loaded = self._loaded, None
        self._serving = {}
        if loaded is not None:
            loaded.runner.close()

    def _serve(self) -> None:
        assert self._loaded is not None
        loaded = self._loaded
        with self._lock:
            marks = [mark for mark, key in self._keys.items() if key == loaded.key]
        self._serving = dict.fromkeys(marks, loaded.runner)
        if self.serves:
            self._changes = 0

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BuildCancelledError:
            self._building.drop()  # cancelled as nobody needed it; a later request starts it again
        except failures(Exception) as error:  # a loader may fail in any way; the form with inputs still works
            if is_sticky(error):
                raise
            self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, why: str) -> None:
        """Take weights as inputs from the next call on, and release the engine with constants."""
        with self._lock:
            given_up, self.is_given_up = self.is_given_up, True
            self.why = self.why or why
            self._unread.clear()
        self._serving = {}
        if not given_up:
            _log.info("region %s takes its weights as inputs of its TensorRT engine: %s", self.name, why)
        with self._working:
            self._building.cancel()
            self._unload()


class _Building:
    """The current build, if any, and its key."""

    def __init__(self) -> None:
        self._held: tuple[str, Build] | None = None

    def of(self, key: str) -> Build | None:
        return self._held[1] if self._held is not None and self._held[0] == key else None

    def put(self, key: str, build: Build) -> None:
        """Replace the current build, and cancel it."""
        self.cancel()
        self._held = key, build

    def drop(self) -> None:
        self._held = None

    def cancel(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held[1].cancel()


def _reading(form: weakref.ref[ConstantForm]) -> Callable[[], None]:
    def work() -> None:
        if (alive := form()) is not None:
            alive.read()

    return work


def _when_built(form: weakref.ref[ConstantForm], key: str, build: Build) -> None:
    home = build_thread()
    home.expect()

    def work() -> None:
        if (alive := form()) is not None:
            alive.finish(key, build)

    def done() -> None:
        home.submit(Job(work))
        home.arrived()

    build.when_done(done)


class EitherRunner:
    """Runner that chooses between a region's two engines in each call. While a CUDA graph is captured, the engine with inputs runs: a replay
    must read the current weights.

    The tensors of a call are `reads` inputs, a mark, outputs, and working memory. `weights`: positions of the weights among the inputs."""

    native = None  # called from Python

    def __init__(
        self,
        inputs: EngineRunner,
        form: ConstantForm,
        reads: int,
        weights: Sequence[int],
        capturing: Callable[[], bool],
    ) -> None:
        self._inputs = inputs
        self._form = form
        self._reads = reads
        self._changing = tuple(i for i in range(reads) if i not in set(weights))
        self._capturing = capturing

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueue the work of one engine. Raises what that engine raises."""
        rest = tensors[self._reads + 1 :]
        engine = self._form.engine_of(int(tensors[self._reads]))
        if (
            engine is not None
            and not self._capturing()
            and engine.try_run([*(tensors[i] for i in self._changing), *rest])
        ):
            return
        self._inputs([*tensors[: self._reads], *rest])


class Budget:
    """Budget for the constants of a graph's engines: `limit_bytes`. Forms that gain most time per byte get it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # Form -> microseconds gained per call. A form that is garbage-collected takes nothing.
        self._gains: weakref.WeakKeyDictionary[ConstantForm, float] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(regions: Sequence[Region], percent: int) -> Budget:
        """The budget of a graph's regions: `percent` of the bytes of their weights. A weight that several regions read counts once."""
        sizes = {
            each.name: each.spec.size_bytes
            for region in regions
            for each in (region.inputs[i] for i in positions_of(region))
            if each.spec is not None
        }
        return Budget(sum(sizes.values()) * percent // 100)

    def grant(self, form: ConstantForm, gain_us: float) -> bool:
        """True if the form may keep its constants, given its gain per call. Other forms that gain less per byte may lose theirs."""
        with self._lock:
            self._gains[form] = gain_us
            ranked = sorted(self._gains, key=lambda each: -self._gains[each] / each.size_bytes)
            left, losing = self.limit_bytes, []
            for each in ranked:
                if each.size_bytes <= left and not each.is_given_up:
                    left -= each.size_bytes
                else:
                    losing.append(each)
                    del self._gains[each]
        for each in losing:
            each.give_up(
                "constants gain more in other regions, which take all that `tensorrt_constants_percent` allows"
            )
        return form not in losing
