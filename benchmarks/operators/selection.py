"""A selection of operators that stands for all: of each kind and batch size those with most of the models' work, from as many models as there
are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from benchmarks.operators.shapes import Case
from benchmarks.operators.work import work

# Floating-point operations that cost as much as moving a byte from memory: 500 GFLOP/s and 25 GB/s. Fixed, so that every machine
# measures the same operators.
_FLOPS_A_BYTE = 20.0


def representative(cases: Sequence[Case], each: int) -> list[Case]:
    """`each` operators of each kind and batch size: every model's heaviest before any model's second, those of the largest share first.

    An operator's share is that of its model's work, and it belongs to the model of which that is largest: large models do not crowd
    out small ones. The order of `cases` is kept.
    """
    costs = [max(flops, size_bytes * _FLOPS_A_BYTE) for flops, size_bytes in map(work, cases)]
    of_model: dict[tuple[str, int], float] = defaultdict(float)
    for case, cost in zip(cases, costs, strict=True):
        for model, count in case.counts:
            of_model[model, case.batch] += cost * count
    groups: dict[tuple[str, int], list[tuple[float, str, int]]] = defaultdict(list)
    for index, (case, cost) in enumerate(zip(cases, costs, strict=True)):
        share, model = max((cost * count / of_model[model, case.batch], model) for model, count in case.counts)
        groups[case.kind, case.batch].append((share, model, index))
    kept: set[int] = set()
    for group in groups.values():
        ranked, titles, of = [], set(), Counter[str]()
        for share, model, index in sorted(group, key=lambda entry: (-entry[0], entry[2])):
            if cases[index].title not in titles:  # others of the title differ in padding or bias
                titles.add(cases[index].title)
                ranked.append((of[model], -share, index))
                of[model] += 1
        kept |= {index for _, _, index in sorted(ranked)[:each]}
    return [case for index, case in enumerate(cases) if index in kept]
