"""Slots of a worker that serves several classes, and the same numbers with one class."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from turboserve.allocation.slots import SlotUnits, slots_used

NAMES = ("a", "b", "c")
SERVED = st.fixed_dictionaries({name: st.integers(1, 12) for name in NAMES})
COUNTS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 12))


@given(SERVED, COUNTS, st.sampled_from(NAMES))
def test_another_session_fits_exactly_while_the_sum_of_parts_is_at_most_one(
    served: dict[str, int], counts: dict[str, int], one: str
) -> None:
    with_one_more = {**counts, one: counts.get(one, 0) + 1}
    parts = sum(Fraction(count, served[name]) for name, count in with_one_more.items())
    assert (slots_used(served, one, counts) < served[one]) == (parts <= 1)


@given(st.integers(0, 12), st.integers(0, 30))
def test_with_one_class_slots_are_numbers_of_sessions(served: int, count: int) -> None:
    assert slots_used({"a": served}, "a", {"a": count}) == count
    # Sessions of a class that the worker does not serve count as they always have.
    assert slots_used({"a": served}, "a", {"a": count, "b": 2}) == count + 2


@given(SERVED, st.lists(st.sampled_from(NAMES), max_size=40))
def test_sessions_taken_while_they_fit_never_exceed_the_worker(
    served: dict[str, int], wanted: list[str]
) -> None:
    counts = dict.fromkeys(NAMES, 0)
    for name in wanted:
        if slots_used(served, name, counts) < served[name]:
            counts[name] += 1
    assert sum(Fraction(count, served[name]) for name, count in counts.items()) <= 1
    assert all(counts[name] <= served[name] for name in NAMES)


def test_a_session_of_a_class_without_slots_takes_the_whole_worker() -> None:
    """The only small session was paused in its slab, which the worker has reported, and is resumed."""
    assert slots_used({"large": 2, "small": 0}, "large", {"small": 1}) == 2
    assert slots_used({"large": 2, "small": 0}, "large", {}) == 0


@given(
    st.fixed_dictionaries({name: st.integers(0, 12) for name in NAMES}),
    st.dictionaries(st.sampled_from((*NAMES, "other")), st.integers(0, 12)),
    st.sampled_from(NAMES),
)
def test_integer_units_count_the_same_slots(served: dict[str, int], counts: dict[str, int], one: str) -> None:
    units = SlotUnits(served)
    assert units.taken(one, counts) + counts.get(one, 0) == slots_used(served, one, counts)
    costs = {name: Fraction(served[one], served[name] or 1) for name in NAMES if name != one}
    exact = sum((count * costs.get(name, Fraction(1)) for name, count in counts.items()), Fraction())
    assert Fraction(units.of(one, counts), units.whole) == exact
    assert slots_used(served, one, counts) == ceil(exact)
