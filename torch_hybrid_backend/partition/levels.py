"""Cuts of a graph into convex segments: a number, the level, for each operator.

Colours are engines (0, 1, ..., the last is eager). Level l belongs to colour (l - rotation) mod colours. Each
operator gets the smallest level of its colour that is not below its producers' levels:

    level(v) = min { l : colour(l) = colour(v), l >= level(u) for all u before v }

A segment is the set of operators of one level. Segments run in the order of their levels. This order respects every edge u -> v, since
level(u) <= level(v). Each segment is convex: for operators u, w of one segment and a path u -> v -> w, level(u) <= level(v) <= level(w) =
level(u), so v has the same level, and thus the same colour. One engine's segment may hold pieces that do not touch.

With two colours and a given first colour, no cut has fewer segments: operators that alternate along a path must be in different segments, and
the level counts just these alternations. `segments` tries all rotations, that is, all first colours. A graph of one colour is one segment. The
cost is linear in operators and edges, times the number of colours.
"""

from __future__ import annotations

from collections.abc import Sequence


def segments(colours: Sequence[int], before: Sequence[Sequence[int]], colour_count: int) -> list[int]:
    """The level of each operator, by the rotation that gives the fewest segments (the first of equals)."""
    cuts = [_levels(colours, before, colour_count, rotation) for rotation in range(colour_count)]
    return min(cuts, key=lambda levels: len(set(levels)))


def _levels(colours: Sequence[int], before: Sequence[Sequence[int]], colour_count: int, rotation: int) -> list[int]:
    levels: list[int] = []
    for colour, producers in zip(colours, before, strict=True):
        lowest = max((levels[u] for u in producers), default=0)
        levels.append(lowest + (colour + rotation - lowest) % colour_count)
    return levels


def sink(
    levels: Sequence[int], colours: Sequence[int], before: Sequence[Sequence[int]], sinkable: Sequence[bool]
) -> list[int]:
    """Move sinkable operators down to the segment of their first user, if that segment has their colour.

    `segments` places operators as early as possible. An operator that widens (an expand, a mask made of nothing) had better run
    where its result is used, so that the wide value need not cross segments. Levels only grow, never above a user's level, so every
    property of `segments` is kept.
    """
    first_use: list[int | None] = [None] * len(levels)
    colour_at: dict[int, int] = dict(zip(levels, colours, strict=True))
    sunk = list(levels)
    for i in reversed(range(len(levels))):
        target = first_use[i]
        if sinkable[i] and target is not None and colour_at[target] == colours[i]:
            sunk[i] = target
        for u in before[i]:
            known = first_use[u]
            first_use[u] = sunk[i] if known is None else min(known, sunk[i])
    return sunk
