"""Profiles as text."""

from __future__ import annotations

import dataclasses

from tests.conftest import Golden
from tests.report.plans_for_tests import PLAN
from torch_hybrid_backend.core.plan import Ceilings, KernelTime, Profile
from torch_hybrid_backend.report import Explanation, render_text
from torch_hybrid_backend.report.times import module_shares, profile_in_words

_LINE = "model.py:12 in forward: y = x @ w"


def _kernel(us: float, *modules: str, flops: int = 0, name: str = f"matmul_gelu_{1:016x}") -> KernelTime:
    return KernelTime("r0", name, ("mm", "relu"), modules, _LINE, us, flops, int(4_000 * us), "float32")


_ROWS = (
    _kernel(1500.0, "encoder.0.linear", "encoder.0.act", flops=300_000_000),
    _kernel(300.0, "encoder.1.linear", flops=3_000_000, name=f"pack_{1:016x} + matmul_{2:016x}"),
    KernelTime("r1", "eager", ("sort", "item", "sort_1"), (), "model.py:13 in forward", 100.0, 0, 800, "float32"),
    *(_kernel(1.0, f"encoder.{k}.norm", name=f"row_norm_{k:016x}") for k in range(9)),
)
PROFILE = Profile(2000.0, 48, _ROWS, 91.0, Ceilings(2, (("float32", 250.0),), 10.0))
PROFILED = dataclasses.replace(PLAN, profile=PROFILE)


def test_profile(golden: Golden) -> None:
    """The text has the slowest rows, the rest as one row, the time outside kernels, the total, rates beside the machine's, and modules."""
    golden.check("\n".join(profile_in_words(PROFILED)))


def test_a_profile_is_part_of_the_text() -> None:
    """The time of a call of the model comes first, with its part outside of graphs. A nested graph counts once."""
    inside = dataclasses.replace(PROFILED, profile=dataclasses.replace(PROFILE, is_nested=True, call_us=700.0))
    explanation = Explanation((PROFILED, inside), call_us=2500.0)
    first, _, *_ = str(explanation).splitlines()
    assert first.startswith("a call of the model takes 2.50 ms: 2.00 ms in 1 graph, 500.0 us outside")
    assert (
        "  time: 700.0 us a call (median of 48 calls), all of it inside a row of the graph that calls this one"
        in str(explanation)
    )
    assert all(f"  {line}" in str(explanation) for line in profile_in_words(PROFILED))
    assert '"call_us": 2500.0' in explanation.to_json()


def test_times_beside_other_load_are_marked() -> None:
    """Disturbed times have the same mark as everywhere in `explain`."""
    disturbed = dataclasses.replace(PLAN, profile=dataclasses.replace(PROFILE, is_disturbed=True))
    first, *_ = profile_in_words(disturbed)
    assert first == "time: 2.00 ms a call (median of 48 calls; measured beside other load, so it may be far off)"


def test_without_a_profile_nothing_is_told() -> None:
    """Plans without a profile have no lines about times."""
    assert list(profile_in_words(PLAN)) == []
    assert "time:" not in render_text([PLAN])


def test_kernels_of_disturbed_calls_are_marked() -> None:
    """A line says if the kernels take longer than a whole call."""
    slow = dataclasses.replace(PROFILE, call_us=1000.0, overhead_us=0.0)
    lines = list(profile_in_words(dataclasses.replace(PLAN, profile=slow)))
    (line,) = [line for line in lines if "more than a call" in line]
    assert line == (
        "  the kernels take 91% more than a call that is timed as a whole: other load, or the timing itself, made them longer"
    )


def test_a_module_with_all_the_time_is_shown_by_its_parts() -> None:
    """Modules are divided until several share the time. Kernels without a module are left out."""
    assert [path for path, _ in module_shares(PROFILE)][:2] == ["encoder.0", "encoder.1"]
    assert module_shares(PROFILE)[0][1] == (1500.0 + 1.0) / 2000.0
    even = dataclasses.replace(PROFILE, kernels=(_kernel(1.0, "a.x"), _kernel(1.0, "b.y")))
    assert [path for path, _ in module_shares(even)] == ["a", "b"]
    alone = dataclasses.replace(PROFILE, kernels=(_kernel(1.0, "a.x"),))
    assert [path for path, _ in module_shares(alone)] == ["a.x"]
