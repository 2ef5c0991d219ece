"""Variants shared out among processes, and what becomes of times and of claims."""

from __future__ import annotations

import math

import pytest

from torch_hybrid_backend.tuning.claims import Claims, Interval, Wanted


def _wanted(key: str = "k", times: dict[str, float] | None = None, untried: str = "abc", chosen: str = "") -> Wanted:
    return Wanted(key, chosen, {"": 10.0} if times is None else times, tuple(untried))


def test_no_variant_is_tried_twice() -> None:
    """Two processes claim different variants of each kernel, until none is left."""
    claims = Claims({})
    assert claims.claim("one", [_wanted("k"), _wanted("l", untried="a")]) == {"k": "a", "l": "a"}
    assert claims.claim("two", [_wanted("k"), _wanted("l", untried="a")]) == {"k": "b"}
    assert claims.claim("one", [_wanted("k"), _wanted("l", untried="a")]) == {"k": "c"}
    assert claims.claim("two", [_wanted("k")]) == {}
    assert claims.state().left == 4  # until they are reported


def test_claims_of_a_process_that_ended_are_free() -> None:
    """Reported times stay."""
    claims = Claims({})
    claims.claim("one", [_wanted()])
    claims.report("one", [_wanted(times={"": 10.0, "a": 5.0}, untried="bc")], is_disturbed=False)
    claims.claim("one", [_wanted(untried="bc")])
    claims.drop("one")
    assert claims.claim("two", [_wanted()]) == {"k": "b"}
    assert claims.entries()["k"].times == {"": 10.0, "a": 5.0}


def test_times_of_two_machines_are_compared_through_a_variant_that_both_timed() -> None:
    """A machine that is half as fast at the moment finds b no slower than it is."""
    claims = Claims({})
    claims.claim("one", [_wanted()])
    claims.claim("two", [_wanted(times={"": 20.0})])
    claims.report("one", [_wanted(times={"": 10.0, "a": 8.0}, untried="bc", chosen="a")], is_disturbed=False)
    claims.report("two", [_wanted(times={"": 20.0, "b": 6.0}, untried="ac", chosen="b")], is_disturbed=True)
    assert claims.entries()["k"].times == {"": 10.0, "a": 8.0, "b": 3.0}
    assert claims.entries()["k"].is_disturbed
    state = claims.state()
    assert (state.faster, state.tried, state.left) == (1, 2, 1)
    assert (state.before_us, state.now_us) == (10.0, 3.0)
    assert state.is_disturbed


def test_times_of_operators_alone_are_no_gain() -> None:
    """Operators alone convert nothing; their times are kept with the others."""
    claims = Claims({})
    claims.claim("one", [_wanted(times={"": 10.0, "onednn alone": 3.0})])
    state = claims.state()
    assert (state.faster, state.now_us) == (0, 10.0)


def test_a_kernel_is_faster_where_another_variant_is_chosen() -> None:
    """A shorter time of a variant that nobody has chosen is no gain."""
    claims = Claims({})
    claims.claim("one", [_wanted()])
    claims.report("one", [_wanted(times={"": 10.0, "a": 9.99}, untried="bc")], is_disturbed=False)
    state = claims.state()
    assert (state.faster, state.before_us, state.now_us) == (0, 10.0, 10.0)


def test_infinite_times_are_kept_as_they_are() -> None:
    """Infinite times say that a variant cannot run, and compare nothing."""
    claims = Claims({})
    claims.claim("one", [_wanted()])
    claims.report("one", [_wanted(times={"a": math.inf, "": 20.0}, untried="bc")], is_disturbed=False)
    assert claims.entries()["k"].times == {"": 10.0, "a": math.inf}


def test_a_variant_about_which_nothing_was_found_out_is_left_to_a_later_run() -> None:
    claims = Claims({})
    assert claims.claim("one", [_wanted(untried="a")]) == {"k": "a"}
    claims.report("one", [_wanted(untried="")], is_disturbed=False)
    assert claims.claim("two", [_wanted(untried="a")]) == {}
    assert claims.state().left == 0
    assert Claims({}).claim("one", [_wanted(untried="a")]) == {"k": "a"}


def test_times_of_earlier_runs_are_not_taken_again() -> None:
    """Wherever they were taken: a process may know nothing of them."""
    claims = Claims({"k": {"": 9.0, "a": 5.0}})
    assert claims.claim("one", [_wanted()]) == {"k": "b"}


def test_state_has_entries_once() -> None:
    """The driver writes those that changed."""
    claims = Claims({})
    claims.claim("one", [_wanted()])
    assert claims.state().entries.keys() == {"k"}
    assert not claims.state().entries
    claims.report("one", [_wanted(times={"": 10.0, "a": 5.0})], is_disturbed=False)
    assert claims.state().entries["k"].times == {"": 10.0, "a": 5.0}
    interval = Interval("host", "one", 1.0, 2.0)
    claims.used(interval)
    assert claims.state().intervals == (interval,)


@pytest.mark.parametrize("how", ["budget", "stop"])
def test_nothing_is_claimed_once_the_time_is_over(how: str) -> None:
    """Reports of rounds that are under way still count."""
    now = 0.0
    claims = Claims({}, budget_s=10.0, clock=lambda: now)
    assert claims.claim("one", [_wanted()]) == {"k": "a"}
    if how == "stop":
        claims.stop()
    else:
        now = 10.0
    assert claims.claim("two", [_wanted()]) == {}
    assert claims.state().is_over
    claims.report("one", [_wanted(times={"": 10.0, "a": 5.0})], is_disturbed=False)
    assert claims.state().tried == 1
