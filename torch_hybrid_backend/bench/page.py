"""A record of `hybrid bench` as one self-contained HTML page: a bar chart and a table for each batch size and precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from torch_hybrid_backend.bench.peers import OURS, title
from torch_hybrid_backend.bench.record import Group, Record, milliseconds
from torch_hybrid_backend.bench.table import HEADER, cells

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222; background: #fff; }
h2 { margin-top: 2em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.setup, .note { color: #666; }
svg { width: 100%; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: #222; }
"""
# Distinct for colour-blind readers (Okabe and Ito).
_COLOURS = {True: "#0072b2", False: "#b0b0b0"}
_WIDTH, _NAMES, _VALUES, _ROW, _BAR = 720, 150, 160, 28, 18  # in pixels: the chart, its columns, a row and its bar


def html(record: Record) -> str:
    """The record as an HTML page."""
    sections = "\n".join([*("\n".join(_section(group)) for group in record.groups), *_gaps(record.absent)])
    heading = escape(f"{record.target}: {record.what}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title><style>{_STYLE}</style></head>\n'
        f'<body><h1>{heading}</h1>\n<p class="setup">{escape(record.setup)}</p>\n{sections}\n'
        '<p class="note">Median time of a call; shorter is better. The line on a bar is the spread between rounds. Error: root mean square of'
        " the difference from eager as written, divided by that of eager's results.</p>\n</body></html>\n"
    )


def _section(group: Group) -> Iterator[str]:
    yield f"<section><h2>{escape(group.title)}</h2>"
    if group.measured:
        yield _chart(group)
    yield from (f"<p><b>{escape(verdict)}</b></p>" for verdict in group.verdicts)
    yield from (f"<p>{escape(note)}</p>" for note in group.notes)
    if group.measured:
        head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in cells(group, result)) for result in group.measured)
        yield f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    yield from _gaps(group.gaps)
    yield "</section>"


def _gaps(gaps: Sequence[str]) -> Iterator[str]:
    if gaps:
        yield f"<p>No result:</p><ul>{''.join(f'<li>{escape(gap)}</li>' for gap in gaps)}</ul>"


def _chart(group: Group) -> str:
    """A bar chart in SVG: each runtime's median, with the spread at the end of the bar."""
    longest = max(result["median_ms"] + result["spread_ms"] / 2 for result in group.measured)
    scale = (_WIDTH - _NAMES - _VALUES) / longest
    parts = []
    for place, result in enumerate(group.measured):
        top, name = place * _ROW + (_ROW - _BAR) / 2, title(result["peer"])
        width, half = result["median_ms"] * scale, result["spread_ms"] / 2 * scale
        middle, end, speedup = top + _BAR / 2, _NAMES + width, group.speedup(result)
        label = f"{milliseconds(result['median_ms'])} ms" + ("" if speedup is None else f", {speedup:.2f}x eager")
        parts.append(
            f'<text x="{_NAMES - 8}" y="{middle + 5:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_NAMES}" y="{top:.1f}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[result["peer"] == OURS]}"/>'
            f'<line x1="{end - half:.1f}" x2="{end + half:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#222"/>'
            f'<text x="{end + half + 8:.1f}" y="{middle + 5:.1f}">{escape(label)}</text>'
        )
    height = len(group.measured) * _ROW
    label = escape(f"Median time of a call, {group.title}")
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
