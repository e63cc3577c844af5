"""Whole sessions on workers that serve one class each, or several."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

import pytest

from turboserve.autoscaler.control.session_places import keeps_places, with_place, without_place

Kind = tuple[dict[str, int], int]


def may_have_place(workers: Sequence[Kind], sessions: dict[str, int]) -> bool:
    """Whether the sessions fit, by trying every way to place them one after the other."""
    bins = [served for served, count in workers for _ in range(count)]
    states = {tuple(Fraction(0) for _ in bins)}
    for one, count in sessions.items():
        for _ in range(count):
            states = {
                (*used[:index], used[index] + Fraction(1, served[one]), *used[index + 1 :])
                for used in states
                for index, served in enumerate(bins)
                if served.get(one) and used[index] + Fraction(1, served[one]) <= 1
            }
    return bool(states)


def drawn(chance: Random) -> tuple[list[Kind], dict[str, int]]:
    models = "abc"
    workers = []
    for _ in range(chance.randint(1, 3)):
        served = chance.sample(models, chance.randint(1, 3))
        workers.append(({one: chance.randint(1, 4) for one in served}, chance.randint(0, 2)))
    return workers, {one: chance.randint(0, 3) for one in models}


@pytest.mark.parametrize("seed", range(60))
def test_the_sessions_that_have_a_place_fit_on_the_workers(seed: int) -> None:
    workers, sessions = drawn(Random(seed))
    found = with_place(workers, sessions)
    assert may_have_place(workers, found)
    assert all(0 <= found[one] <= count for one, count in sessions.items())
    if not may_have_place(workers, sessions):
        assert without_place(workers, sessions)


def test_nearly_all_sessions_that_fit_have_a_place() -> None:
    fit = lacking = 0
    for seed in range(60, 160):
        workers, sessions = drawn(Random(seed))
        if may_have_place(workers, sessions):
            fit += 1
            lacking += bool(without_place(workers, sessions))
    assert fit > 30
    assert lacking <= fit // 20


def test_with_one_class_each_places_are_sums() -> None:
    for seed in range(40):
        chance = Random(seed)
        workers = [({chance.choice("ab"): chance.randint(0, 5)}, chance.randint(0, 4)) for _ in range(4)]
        sessions = {one: chance.randint(0, 12) for one in "ab"}
        places = {one: sum(n * served.get(one, 0) for served, n in workers) for one in "ab"}
        found = with_place(workers, sessions)
        assert found == {one: min(count, places[one]) for one, count in sessions.items()}


def test_a_shared_worker_keeps_the_place_of_one_class_at_the_cost_of_the_other() -> None:
    both = {"a": 2, "b": 4}
    assert with_place([(both, 1)], {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert without_place([(both, 1)], {"a": 1, "b": 3}) == {"b": 1}
    # Without the worker that serves one class alone, its session goes to the shared one.
    now, after = [(both, 1), ({"a": 1}, 1)], [(both, 1)]
    assert keeps_places(now, after, {"a": 1, "b": 2})
    assert not keeps_places(now, after, {"a": 2, "b": 2})
    # The larger session comes first, so no worker is left with too little for it.
    assert without_place([({"a": 2, "b": 3}, 2)], {"b": 3, "a": 2}) == {}


def test_parts_of_sessions_do_not_count() -> None:
    # 1 / 2 + 2 / 3 + 4 / 5 is less than two workers. No two workers take these sessions whole.
    workers: list[Kind] = [({"a": 2, "b": 3, "c": 5}, 2)]
    sessions = {"a": 1, "b": 2, "c": 4}
    assert not may_have_place(workers, sessions)
    assert sum(without_place(workers, sessions).values()) == 1
