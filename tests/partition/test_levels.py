"""Cutting coloured graphs into convex segments: properties on random graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torch_hybrid_backend.partition.levels import segments, sink

Graph = tuple[int, list[int], list[list[int]]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """(number of colours, colour of each node, producers of each node), nodes in topological order."""
    colour_count = draw(st.integers(1, 4))
    size = draw(st.integers(0, 40))
    colours = draw(st.lists(st.integers(0, colour_count - 1), min_size=size, max_size=size))
    before = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(size)]
    return colour_count, colours, before


def _check(levels: list[int], colours: list[int], before: list[list[int]]) -> None:
    colour_of: dict[int, int] = {}
    for i, level in enumerate(levels):
        assert colour_of.setdefault(level, colours[i]) == colours[i]
        assert all(levels[u] <= level for u in before[i])


@given(graphs())
def test_segments_have_one_colour_and_respect_every_edge(graph: Graph) -> None:
    """Run in the order of their levels, segments find all they read; hence they are convex."""
    colour_count, colours, before = graph
    levels = segments(colours, before, colour_count)
    assert len(levels) == len(colours)
    _check(levels, colours, before)


@given(graphs(), st.data())
def test_sinking_keeps_the_properties_and_adds_no_segment(graph: Graph, data: st.DataObject) -> None:
    """Operators move to existing segments of their colour only, and never past a user."""
    colour_count, colours, before = graph
    levels = segments(colours, before, colour_count)
    sinkable = data.draw(st.lists(st.booleans(), min_size=len(levels), max_size=len(levels)))
    sunk = sink(levels, colours, before, sinkable)
    _check(sunk, colours, before)
    assert set(sunk) <= set(levels)
    assert all(new == old or sinkable[i] for i, (new, old) in enumerate(zip(sunk, levels, strict=True)))


@given(graphs())
def test_one_colour_is_one_segment(graph: Graph) -> None:
    """A graph that one engine takes whole is one region."""
    _, colours, before = graph
    levels = segments([0] * len(colours), before, 2)
    assert len(set(levels)) <= 1


@given(graphs())
def test_two_colours_need_as_many_segments_as_a_path_alternates(graph: Graph) -> None:
    """At most one segment more than the longest alternation along a path, which is the least possible."""
    _, colours, before = graph
    two = [colour % 2 for colour in colours]
    alternations: list[int] = []
    for i, producers in enumerate(before):
        alternations.append(max((alternations[u] + (two[u] != two[i]) for u in producers), default=1))
    longest = max(alternations, default=0)
    assert longest <= len(set(segments(two, before, 2))) <= longest + 1


def test_an_operator_that_reads_nothing_sinks_to_its_user() -> None:
    """A mask (0) that only the last operator (3) of its engine reads is made there."""
    colours, before = [0, 0, 1, 0], [[], [], [1], [0, 2]]
    levels = segments(colours, before, 2)
    assert levels == [0, 0, 1, 2]
    assert sink(levels, colours, before, [True, False, False, False]) == [2, 0, 1, 2]
