"""Region that an engine returns while a build makes its bytes."""

from __future__ import annotations

from collections.abc import Callable

from torch_hybrid_backend.builds.builds import Build
from torch_hybrid_backend.core.engine import CompiledRegion
from torch_hybrid_backend.core.plan import Attempt


class BuildingRegion:
    """A `PendingRegion` whose result is `load` of a build's bytes. An exception of `load` is the region's failure."""

    def __init__(
        self, build: Build, load: Callable[[bytes], CompiledRegion], attempts: tuple[Attempt, ...] = ()
    ) -> None:
        """`attempts`: see the protocol."""
        self.attempts = attempts
        self._build = build
        self._load = load
        self._loaded: CompiledRegion | None = None

    @property
    def done(self) -> bool:
        return self._build.done

    def when_done(self, call: Callable[[], None]) -> None:
        self._build.when_done(call)

    def result(self) -> CompiledRegion:
        """The built region, as the protocol says; loaded once."""
        if self._loaded is None:
            self._loaded = self._load(self._build.result(0))
        return self._loaded

    def cancel(self) -> None:
        self._build.cancel()
