"""Numbers with units, for people."""

from __future__ import annotations


def time_in_words(microseconds: float) -> str:
    """For example "31.5 us", "8.40 ms", "1.25 s"."""
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    value, unit = (microseconds / 1e3, "ms") if microseconds < 1e6 else (microseconds / 1e6, "s")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def flops_in_words(flops: int) -> str:
    """For example "8.20 GFLOP"."""
    for size, unit in ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"), (10**3, "kFLOP")):
        if flops >= size:
            return f"{flops / size:.2f} {unit}"
    return f"{flops} FLOP"
