"""Least-loaded placement: the interface that every algorithm keeps."""

from __future__ import annotations

from turboserve.baselines.least_loaded import LeastLoaded
from turboserve.scheduler.placement import Candidate, Demand


def worker(name: str, load: int, capacity: int = 4, model: str = "toy", suspect: bool = False) -> Candidate:
    return Candidate(name, model, capacity, load, suspect)


def demand(name: str, **more: object) -> Demand:
    return Demand(name, "toy", "place", **more)  # type: ignore[arg-type]


def chosen(candidates: list[Candidate], *demands: Demand) -> list[str | None]:
    return [choice.worker for choice in LeastLoaded().place(candidates, demands)]


def test_goes_to_the_less_loaded() -> None:
    assert chosen([worker("a", 2), worker("b", 1)], demand("s")) == ["b"]


def test_equal_load_goes_by_id() -> None:
    assert chosen([worker("a", 1), worker("b", 1)], demand("s")) == ["a"]


def test_unequal_workers_are_filled_in_proportion() -> None:
    # 3 of 8 is a smaller load than 1 of 2, although it is more sessions.
    assert chosen([worker("a", 0, capacity=2), worker("b", 2, capacity=8)], demand("s")) == ["b"]


def test_choices_before_count() -> None:
    free = [worker("a", 0, capacity=1), worker("b", 0, capacity=2)]
    assert chosen(free, *(demand(f"s{n}") for n in range(4))) == ["b", "a", "b", None]


def test_other_models_do_not_matter() -> None:
    assert chosen([worker("a", 0, model="big")], demand("s")) == [None]


def test_resumes_where_its_state_is() -> None:
    assert chosen([worker("a", 0), worker("b", 3)], demand("s", holder="b")) == ["b"]
    assert chosen([worker("a", 0), worker("b", 4)], demand("s", holder="b")) == ["a"]
    assert chosen([worker("a", 0), worker("b", 0, suspect=True)], demand("s", holder="b")) == ["a"]


def test_a_suspect_worker_is_the_last_resort() -> None:
    assert chosen([worker("a", 0, suspect=True), worker("b", 3)], demand("s")) == ["b"]
    assert chosen([worker("a", 0, suspect=True), worker("b", 4)], demand("s")) == ["a"]


def test_a_worker_that_refused_is_left_out() -> None:
    assert chosen([worker("a", 0), worker("b", 3)], demand("s", excluded=frozenset({"a"}))) == ["b"]
    [choice] = LeastLoaded().place([worker("a", 0)], [demand("s", excluded=frozenset({"a"}))])
    assert choice.worker is None
    assert "refused" in choice.reason


def test_its_own_slot_is_not_counted_against_it() -> None:
    assert chosen([worker("a", 4)], demand("s", counted_on="a")) == ["a"]


def test_no_capacity_is_no_division() -> None:
    assert chosen([worker("a", 0, capacity=0)], demand("s")) == [None]


def test_numbers_explain_the_choice() -> None:
    [choice] = LeastLoaded().place([worker("a", 1), worker("b", 3)], [demand("s")])
    assert choice.numbers == {
        "load": 0.5,
        "bottleneck_before": 0.75,
        "bottleneck_after": 0.75,
        "sessions": 2,
        "capacity": 4,
        "candidates": 2,
    }
