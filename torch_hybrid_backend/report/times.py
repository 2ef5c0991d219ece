"""Profiles as text: the slowest kernels, and the modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.plan import Ceilings, KernelTime, Plan, Profile
from torch_hybrid_backend.core.units import time_in_words
from torch_hybrid_backend.report.share import DISTURBED, counted, without_digits

_MOST_ROWS = 10
_NAMED = 3  # operators named of a segment in eager
_MOST_MODULES = 12
_WHOLE_SHARE = 0.9  # a module with a larger share of the time is replaced by its parts
_SLACK = 0.05  # kernels may add up to this much more than a call: noise

_Cells = tuple[str, str, str, str, str]


def profile_in_words(plan: Plan) -> Iterable[str]:
    """Lines about the plan's profile: the slowest kernels with their rates, the machine's ceilings, and the modules."""
    profile = plan.profile
    if profile is None:
        return
    where = ", all of it inside a row of the graph that calls this one" if profile.is_nested else ""
    load = f"; {DISTURBED}" if profile.is_disturbed else ""
    yield f"time: {time_in_words(profile.call_us)} a call (median of {counted(profile.calls, 'call')}{load}){where}"
    yield from _table([("time", "share", "GFLOP/s", "GB/s", "kernel"), *_rows(plan, profile)])
    spent = sum(kernel.microseconds for kernel in profile.kernels)
    if spent > (1 + _SLACK) * profile.call_us:
        more = f"{spent / profile.call_us - 1:.0%}"
        yield f"  the kernels take {more} more than a call that is timed as a whole: other load, or the timing itself, made them longer"
    if profile.ceilings is not None:
        yield f"  % of what {ceilings_in_words(profile.ceilings)}"
    shares = module_shares(profile)
    if shares:
        shown = ", ".join(f"{path} {share:.1%}" for path, share in shares[:_MOST_MODULES])
        more = f" and {counted(len(shares) - _MOST_MODULES, 'other module')}" if len(shares) > _MOST_MODULES else ""
        yield f"  by module: {shown}{more}"


def module_shares(profile: Profile) -> list[tuple[str, float]]:
    """Modules with their share of the call, the largest first. A kernel of several modules counts for the first. A module with nearly all of
    the time is replaced by its parts."""
    times: Counter[str] = Counter()
    for kernel in profile.kernels:
        times[kernel.modules[0] if kernel.modules else ""] += kernel.microseconds  # type: ignore[assignment]
    depth = 1
    while True:
        us_by_module: Counter[str] = Counter()
        for path, us in times.items():
            us_by_module[".".join(path.split(".")[:depth])] += us
        named = [
            (path, us / profile.call_us if profile.call_us else 0.0) for path, us in us_by_module.most_common() if path
        ]
        (largest, share), *_ = named or [("", 0.0)]
        if share < _WHOLE_SHARE * sum(each for _, each in named) or not any(
            path.startswith(f"{largest}.") for path in times
        ):
            return named
        depth += 1


def _rows(plan: Plan, profile: Profile) -> Iterable[_Cells]:
    operators = {node.name: node.operator for node in plan.nodes}
    ordered = sorted(profile.kernels, key=lambda kernel: -kernel.microseconds)
    for kernel in ordered[:_MOST_ROWS]:
        yield _row(kernel, profile, operators)
    if rest := ordered[_MOST_ROWS:]:
        spent = sum(kernel.microseconds for kernel in rest)
        yield (*_spent(spent, profile), "", "", f"{counted(len(rest), 'other kernel')}")
    yield (*_spent(profile.overhead_us, profile), "", "", "outside kernels: inputs, outputs, start of threads")
    yield (*_spent(sum(k.microseconds for k in ordered) + profile.overhead_us, profile), "", "", "total")


def _spent(us: float, profile: Profile) -> tuple[str, str]:
    return time_in_words(us), f"{us / profile.call_us:.1%}" if profile.call_us else ""


def _row(kernel: KernelTime, profile: Profile, operators: Mapping[str, str]) -> _Cells:
    ceilings = profile.ceilings
    most = dict(ceilings.gflops).get(kernel.precision) if ceilings is not None else None
    name = " + ".join(without_digits(part) for part in kernel.kernel.split(" + "))
    if kernel.kernel == EAGER:
        name = f"eager: {_listed(list(dict.fromkeys(operators.get(node, node) for node in kernel.nodes)))}"
    elif not kernel.region:
        name = f"eager: {name}"
    where = kernel.source.partition(" in ")[0]
    first, *others = kernel.modules or ("",)
    module = f" of {first}{f' and {len(others)} more' if others else ''}" if first else ""
    return (
        *_spent(kernel.microseconds, profile),
        _of(kernel.gflops, most),
        _of(kernel.gbytes, ceilings.gbytes if ceilings is not None else None),
        f"{name}{module}{f' [{where}]' if where else ''}",
    )


def _of(rate: float, most: float | None) -> str:
    """For example "41.5 (31%)"; "" if the rate is 0."""
    if not rate:
        return ""
    return f"{rate:.1f} ({rate / most:.0%})" if most else f"{rate:.1f}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _table(rows: Sequence[_Cells]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        yield f"  {'  '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))}  {row[4]}"


def ceilings_in_words(ceilings: Ceilings) -> str:
    """For example "this machine can do with 2 threads: 150 GFLOP/s in float32, 20 GB/s from memory (from caches more)"."""
    rates = [f"{rate:.0f} GFLOP/s in {precision}" for precision, rate in ceilings.gflops]
    shown = ", ".join([*rates, f"{ceilings.gbytes:.0f} GB/s from memory (from caches more)"])
    return f"this machine can do with {counted(ceilings.threads, 'thread')}: {shown}"
