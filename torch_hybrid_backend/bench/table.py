"""A record of `hybrid bench` as text, with aligned Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_hybrid_backend.bench.peers import title
from torch_hybrid_backend.bench.record import Group, Record, Result, milliseconds

HEADER = ("runtime", "median ms", "spread ms", "x eager", "first call s", "peak MiB", "error")


def text(record: Record) -> str:
    """The record as text: for each batch size and precision a table, the verdicts, the notes, and the reasons of runtimes without figures.
    Runtimes that are not installed are listed once, at the end."""
    return "\n".join(_lines(record))


def _lines(record: Record) -> Iterator[str]:
    yield f"{record.target}, {record.what}"
    yield record.setup
    for group in record.groups:
        yield f"\n{group.title}\n"
        if group.measured:
            yield markdown(HEADER, [cells(group, result) for result in group.measured], left=1)
            yield ""
        yield from group.verdicts
        yield from group.notes
        yield from (f"no result: {gap}" for gap in group.gaps)
    if record.absent:
        yield ""
        yield from (f"no result: {line}" for line in record.absent)


def cells(group: Group, result: Result) -> list[str]:
    """The cells of a runtime's row, in the order of `HEADER`."""
    speedup, error = group.speedup(result), result["rms_error"]
    return [
        title(result["peer"]),
        milliseconds(result["median_ms"]),
        milliseconds(result["spread_ms"]),
        "-" if speedup is None else f"{speedup:.2f}",
        f"{result['first_call_s']:.1f}",
        f"{max(result['preparing_mib'], result['running_mib']):.0f}",
        "-" if error is None else f"{error:.1e}",
    ]


def markdown(header: Sequence[str], body: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table with aligned columns: the first `left` columns to the left, the others to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *body, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, body)])
