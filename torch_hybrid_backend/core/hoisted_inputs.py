"""HoistedInputs: where the inputs of a main graph come from, after the part that only parameters reach was split off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallInput:
    """The input at `position` of the un-hoisted graph, as the caller passes it."""

    position: int


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """Output `index` of the fold function."""

    index: int


@dataclass(frozen=True, slots=True)
class HoistedInputs:
    """`main[k]` is the source of the main graph's k-th placeholder; `fold[j]` is the position, among the inputs of the
    un-hoisted graph, of the fold function's j-th argument (a parameter or buffer).

    Example: with call inputs (x, weight), `HoistedInputs((CallInput(0), FoldedValue(0)), (1,))` runs the main graph
    on x and on the only output of fold(weight).
    """

    main: tuple[CallInput | FoldedValue, ...]
    fold: tuple[int, ...]

    @staticmethod
    def identity(inputs: int) -> HoistedInputs:
        """Nothing was split off: the main graph is the whole graph, of that many inputs."""
        return HoistedInputs(tuple(CallInput(position) for position in range(inputs)), ())
