"""A region's second form: its weights as constants of an engine, beside the form that takes them as inputs.

    refine      the engine with this call's weights as constants: built, timed against the other form, kept where it is faster and fits a budget
    pack        the runtime calls it whenever a weight is another or has changed, before the call that reads it: what it returns is a mark
    a call      reads the mark: the constants' engine runs where that was made of these very values, the other form everywhere else

A mark is a number that is never used again, so that an engine of old values cannot be taken for one of new ones: whoever packs gets the form
with inputs at once. Off the call the values are then looked at: where the engine at hand has them after all it serves again, else another one
is built, and takes over by one assignment. What has changed once more meanwhile is not put to work.

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

# The form with inputs stays where it takes at most so many times as long: it holds weights once, and a change of one costs it nothing.
_AS_FAST = 1.02
# Weights that have changed so often in a row before an engine with them was ready keep changing: no more engines are built for them.
MOST_CHANGES = 4
_MARKS = 16  # so many are known by the key of their values: plans of several sizes have one each of the same
_UNREAD = 4  # so many are waiting to be looked at; they keep weights alive that are used no more

_marks = itertools.count(1)  # of the process, so that no two forms can be mixed up


def worth(as_inputs_us: float, as_constants_us: float) -> bool:
    """True if constants are so much faster that they are worth their memory."""
    return as_inputs_us > _AS_FAST * as_constants_us


def positions_of(region: Region) -> tuple[int, ...]:
    """The region's inputs that may be constants of its engine: parameters, buffers and what is folded of them. None in training graphs."""
    return tuple(
        i
        for i, each in enumerate(region.inputs)
        if each.is_constant and each.spec is not None and each.spec.is_static and 0 not in each.spec.shape
    )


class Maker(Protocol):
    """A maker of engines of a region with its weights as constants. All raise CompileError."""

    def wanted(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        """The key of the engine with these values, and the request for it. The tensors are on the host, and nobody else's."""
        ...

    def start(self, key: str, request: bytes) -> Build:
        """Start its build, or take up what is known of it; what is kept and is no engine is built anew."""
        ...

    def load(self, key: str, built: bytes) -> tuple[EngineRunner, SerializedEngine]:
        """Load the built engine on its device."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Weights that were marked, and what is needed to read them as in the call that packed them."""

    mark: int
    weights: tuple[torch.Tensor, ...]
    ambient: Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    key: str
    runner: EngineRunner
    layers: tuple[str, ...]


class ConstantForm:
    """A region's engine with constants, and the values that it holds. Threads may use it at once.

    `size_bytes`: what its constants take. `capturing`: whether calls of this thread are captured into a CUDA graph; then nothing is begun.
    """

    def __init__(self, name: str, size_bytes: int, maker: Maker, capturing: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.is_given_up = False
        self.why = ""  # it is given up
        self._maker = maker
        self._capturing = capturing
        self._newest = 0  # mark
        # Of `_unread`, `_is_read` and `_keys`; held for a moment, by calls too.
        self._lock = threading.Lock()
        self._unread: deque[_Values] = deque(maxlen=_UNREAD)
        self._is_read = False  # whether something reads them
        self._keys: OrderedDict[int, str] = OrderedDict()  # by mark, of the engine with those values
        # By mark, the engine that holds those values. Replaced as a whole: calls read it without a lock.
        self._serving: Mapping[int, EngineRunner] = {}
        # Held for as long as something is hashed, loaded or closed; by no call.
        self._working = threading.RLock()
        self._loaded: _Loaded | None = None
        self._building = _Building()
        self._changes = 0  # since an engine served
        self._unused = 0  # marks in a row for which it served, and no call came
        self._is_used = False  # by a call, since the last mark
        self._begun: Build | None = None
        self._scratch_limit: int | None = None
        self._inline: int | None = None  # the thread in which what is packed is looked at at once
        # A build goes on for minutes: not when nobody is left to use it.
        weakref.finalize(self, self._building.cancel).atexit = False

    # --- while engines are chosen -------------------------------------------------------------------------------------------------------

    def prepare(self, weights: Sequence[torch.Tensor]) -> EngineRunner | None:
        """The engine with these values as constants, where it is there; else its build is begun (`begun`), or will never be."""
        with self._working, self._failing():
            if self.is_given_up:
                return None
            key, request = self._wanted(weights)
            if self._loaded is None or self._loaded.key != key:
                build = self._building.of(key) or self._started(key, request)
                if not build.done:
                    self._begun = build
                    return None
                self._load(key, build)
            return self._loaded.runner if self._loaded is not None else None
        return None

    def begun(self) -> Build | None:
        """The builds that `prepare` began; each is returned once."""
        begun, self._begun = self._begun, None
        return begun

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, what this thread packs is looked at at once, and nothing is begun: a trial is one of the engine at hand."""
        self._inline = threading.get_ident()
        try:
            yield
        finally:
            self._inline = None

    @property
    def serves(self) -> bool:
        """True if the engine holds the values that were packed last."""
        return self._newest in self._serving

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of the loaded engine, as TensorRT fused them."""
        loaded = self._loaded
        return () if loaded is None else loaded.layers

    def limit_scratch(self, size_bytes: int) -> None:
        """From here on there is working memory of this size: an engine that needs more is not put to work."""
        self._scratch_limit = size_bytes

    # --- calls --------------------------------------------------------------------------------------------------------------------------

    def pack(self, *weights: torch.Tensor) -> torch.Tensor:
        """The mark of these values: int64, one element, on the CPU. Does not wait, and reads none of them."""
        mark = self._newest = next(_marks)
        if self._inline == threading.get_ident():
            self._follow(_Values(mark, weights, contextlib.nullcontext), begins=False)
        elif not (self.is_given_up or self._capturing()):
            values = _Values(mark, weights, as_here(weights))
            with self._lock:
                self._unread.append(values)
                is_read, self._is_read = self._is_read, True
            if not is_read:
                build_thread().submit(Job(_reading(weakref.ref(self))))
        return torch.tensor([mark], device="cpu")  # whatever the user's default device is

    def engine_of(self, mark: int) -> EngineRunner | None:
        """The engine that holds the values of a mark; None: there is none, and the form with inputs is to run."""
        engine = self._serving.get(mark)
        if engine is not None:
            self._is_used = True
        return engine

    # --- off the call -------------------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Look at all that was packed, the newest first: for each the engine at hand serves, if it has those values; for the newest another one
        is built, if it has not."""
        while True:
            with self._lock:
                if not self._unread:
                    self._is_read = False
                    return
                values = self._unread.pop()
            self._follow(values, begins=True)

    def _follow(self, values: _Values, *, begins: bool) -> None:
        with self._working, self._failing():
            if self.is_given_up:
                return
            with values.ambient():
                key, request = self._wanted(values.weights)
            with self._lock:
                self._keys[values.mark] = key
                while len(self._keys) > _MARKS:
                    self._keys.popitem(last=False)
            if self._loaded is not None and self._loaded.key == key:
                if values.mark == self._newest:
                    self._building.cancel()  # of values that were there before
                self._count_unused()
                self._serve()
            elif begins and values.mark == self._newest and self._building.of(key) is None:
                build = self._started(key, request)
                _log.info("region %s: its weights changed; an engine with the new ones is made", self.name)
                _when_built(weakref.ref(self), key, build)

    def arrived(self, key: str, build: Build) -> None:
        """A build that `_follow` began is done: it serves unless it is known that the newest values are others."""
        with self._working, self._failing():
            # One that was cancelled may end after another of its key has begun.
            if build is self._building.of(key) and not self.is_given_up and self._keys.get(self._newest, key) == key:
                self._load(key, build)

    def _wanted(self, weights: Sequence[torch.Tensor]) -> tuple[str, bytes]:
        # Of a copy: what is hashed must be what is built, whoever writes to the weights meanwhile.
        return self._maker.wanted([torch.empty_like(weight, device="cpu").copy_(weight) for weight in weights])

    def _started(self, key: str, request: bytes) -> Build:
        """The build of an engine with new values, in place of the one that is under way."""
        self._changes += 1
        if self._changes > MOST_CHANGES:
            raise CompileError(f"they changed {self._changes} times before an engine with them was ready")
        build = self._maker.start(key, request)
        self._building.put(key, build)
        return build

    def _count_unused(self) -> None:
        # Some tensors of a device tell nobody whether they have changed (inference tensors): what is made of them is made anew in each call.
        self._unused = 0 if self._is_used else self._unused + 1
        self._is_used = False
        if self._unused > _MARKS:
            raise CompileError("they are packed anew in every call")

    def _load(self, key: str, build: Build) -> None:
        """Put to work what was built, in place of the engine that is there: never two at once."""
        built = build.result(0)
        self._building.drop()
        self._unload()
        runner, engine = self._maker.load(key, built)
        if self._scratch_limit is not None and runner.scratch_bytes > self._scratch_limit:
            raise CompileError(
                f"with other weights it needs {runner.scratch_bytes} bytes of working memory, and the plan has {self._scratch_limit}"
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
            self._building.drop()  # nobody wanted it any more; who wants it again begins again
        except failures(Exception) as error:  # a loader may fail in any way; the form with inputs is there for it
            if is_sticky(error):
                raise
            self.give_up(f"{type(error).__name__}: {error}")

    def give_up(self, why: str) -> None:
        """Its weights are inputs from here on, in the next call already; its engine is let go."""
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
    """The build that is under way, if one is, and its key."""

    def __init__(self) -> None:
        self._held: tuple[str, Build] | None = None

    def of(self, key: str) -> Build | None:
        return self._held[1] if self._held is not None and self._held[0] == key else None

    def put(self, key: str, build: Build) -> None:
        """In place of the one that is there, which nobody wants then."""
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
            alive.arrived(key, build)

    def done() -> None:
        home.submit(Job(work))
        home.arrived()

    build.when_done(done)


class EitherRunner:
    """A region's two engines as one runner. The tensors of a call: `reads` inputs, weights among them at the positions `weights`; a mark;
    outputs; working memory. Captured into a CUDA graph it is the form with inputs: a replay reads the weights of its own time."""

    native = None  # it is called from Python

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
        """Enqueue the work of one of them; raises as they do."""
        rest = tensors[self._reads + 1 :]
        engine = self._form.engine_of(int(tensors[self._reads]))
        if engine is not None and not self._capturing() and engine.ran([*(tensors[i] for i in self._changing), *rest]):
            return
        self._inputs([*tensors[: self._reads], *rest])


class Budget:
    """The bytes that constants of one graph's engines may take: `limit_bytes`. Those that gain most per byte have it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        # By form, the microseconds that it gains in a call. One that is dropped takes nothing any more.
        self._gains: weakref.WeakKeyDictionary[ConstantForm, float] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(regions: Sequence[Region], percent: int) -> Budget:
        """The budget of a graph that is cut into these regions, in percent of their weights: each once, whatever regions read it."""
        sizes = {
            each.name: each.spec.size_bytes
            for region in regions
            for each in (region.inputs[i] for i in positions_of(region))
            if each.spec is not None
        }
        return Budget(sum(sizes.values()) * percent // 100)

    def grant(self, form: ConstantForm, gain_us: float) -> bool:
        """True if the form keeps its constants, now that it gains so much in a call. Others may lose theirs to it."""
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
                "other regions gain more by constants, and `tensorrt_constants_percent` allows no more of them"
            )
        return form not in losing
