"""Composition of a pool of several kinds and models, the way there, and the exhaustive oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.autoscaler.control import composition, composition_search
from turboserve.autoscaler.control.composition import HOUR_S, CompositionPolicy, Offer, Terms, decide
from turboserve.autoscaler.control.composition_numbers import Numbers
from turboserve.autoscaler.control.transition import StepKind, Transition, plan, share_with_places
from turboserve.experiments.mixed.composing import drawn_case, optimum_cost, oracle_cost
from turboserve.experiments.mixed.random_search import RandomSearch

A, B, C = SessionClass("a"), SessionClass("b"), SessionClass("c")
TERMS = {"k": Terms(price=2.0, most=6)}
ONLY_A = Offer("k", ("a",), Capability({A: 4}))
ONLY_B = Offer("k", ("b",), Capability({B: 2}))
BOTH = Offer("k", ("a", "b"), Capability({A: 3, B: 1}))
OFFERS = (ONLY_A, ONLY_B, BOTH)
FULL = CompositionPolicy(utilization=1.0)


def test_the_cheapest_workers_that_have_a_place_for_all_are_chosen() -> None:
    decision = decide(TERMS, OFFERS, {}, {A: 8, B: 4}, FULL)
    assert decision.composition == {ONLY_A.key: 2, ONLY_B.key: 2}
    assert sum(decision.shortage.values()) == pytest.approx(0.0)
    assert decision.changed


def test_a_switch_is_chosen_where_it_is_cheaper_than_a_hire() -> None:
    present = {ONLY_A.key: 4}
    decision = decide(TERMS, OFFERS, present, {A: 8, B: 4}, FULL)
    assert decision.composition == {ONLY_A.key: 2, ONLY_B.key: 2}
    steps = plan(TERMS, OFFERS, present, decision.composition, {A: 8}).steps
    assert [step.kind for step in steps] == [StepKind.SWITCH, StepKind.SWITCH]


def test_a_small_gain_changes_nothing_and_a_shortage_does() -> None:
    present = {ONLY_A.key: 2, ONLY_B.key: 2}
    kept = decide(TERMS, OFFERS, present, {A: 7, B: 4}, FULL)
    assert not kept.changed
    # One worker less saves a quarter of the cost.
    assert decide(TERMS, OFFERS, present, {A: 4, B: 4}, FULL).changed
    steady = CompositionPolicy(utilization=1.0, least_gain=0.5)
    assert not decide(TERMS, OFFERS, present, {A: 4, B: 4}, steady).changed
    assert decide(TERMS, OFFERS, present, {A: 9, B: 4}, steady).changed


def test_limits_name_the_field() -> None:
    with pytest.raises(ValueError, match="price: -1 is below 0"):
        Terms(price=-1, most=1)
    with pytest.raises(ValueError, match="utilization: 0 "):
        CompositionPolicy(utilization=0)


@pytest.mark.parametrize("number", range(8))
def test_decisions_are_those_of_the_exhaustive_oracle(number: int) -> None:
    case = drawn_case(number, kinds=2, models=2, most=2)
    policy = CompositionPolicy(least_gain=0.0)
    decision = decide(case.terms, case.offers, case.present, case.forecast, policy)
    assert decision.cost == pytest.approx(oracle_cost(case, policy), rel=1e-5)


@pytest.mark.parametrize("number", range(3))
def test_decisions_for_many_workers_are_near_the_optimum_and_stay(number: int) -> None:
    case = drawn_case(number, kinds=3, models=3, most=8)
    policy = CompositionPolicy(least_gain=1e-6)
    decision = decide(case.terms, case.offers, case.present, case.forecast, policy)
    least = optimum_cost(case, policy)
    assert least * 0.999 <= decision.cost <= least * 1.05
    # No two compositions alternate: each one costs less than the one before.
    present = decision.composition
    for _ in range(4):
        decision = decide(case.terms, case.offers, present, case.forecast, policy)
        if not decision.changed:
            break
        assert decision.cost < decision.present_cost
        present = decision.composition
    assert not decision.changed


@pytest.mark.parametrize("few", [0, 20_000], ids=["exchanges", "all"])
def test_an_ordered_number_of_workers_is_kept_within_all_limits(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition_search, "FEW", few)
    terms = {"k": Terms(2.0, most=4), "l": Terms(1.0, most=2, start_s=5.0, switch_s=20.0)}
    offers = [
        *(replace(offer, least=1 if offer is ONLY_B else 0) for offer in OFFERS),
        Offer("l", ("a",), Capability({A: 3}), most=1),
        Offer("l", ("b",), Capability({B: 1})),
    ]
    for total in range(1, 7):
        found = decide(terms, offers, {ONLY_A.key: 2}, {A: 9, B: 3}, FULL, total=total).composition
        assert sum(found.values()) == total
        assert found[ONLY_B.key] >= 1
        assert found.get(("l", ("a",)), 0) <= 1
        assert sum(n for key, n in found.items() if key[0] == "k") <= 4
        assert sum(n for key, n in found.items() if key[0] == "l") <= 2
    with pytest.raises(SolverError):
        decide(terms, offers, {}, {A: 9, B: 3}, FULL, total=7)


@pytest.mark.parametrize("few", [0, 20_000], ids=["exchanges", "all"])
def test_no_bound_exceeds_what_sessions_without_a_place_cost(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the search would rule out numbers of workers that are cheaper."""
    solved = list[Numbers]()
    noted = composition_search.CompositionSearch._note

    def note(search: composition_search.CompositionSearch, numbers: Numbers) -> None:
        solved.append(numbers)
        noted(search, numbers)

    monkeypatch.setattr(composition_search, "FEW", few)
    monkeypatch.setattr(composition_search.CompositionSearch, "_note", note)
    policy = CompositionPolicy()
    price = policy.shortage_price * policy.horizon_s / HOUR_S
    for number in range(4):
        case = drawn_case(number, kinds=2, models=2, most=2)
        sizes = {one: 1 + place % 3 for place, one in enumerate(case.forecast)}
        offers = [
            replace(offer, capability=replace(offer.capability, memory_bytes=12, state_bytes=sizes))
            for offer in case.offers
        ]
        solved.clear()
        decide(case.terms, offers, case.present, case.forecast, policy)
        bounds = [one for one in solved if one.at_zero]
        assert len(solved) > len(bounds) > 3
        for one in solved:
            costs = price * sum(one.missing)
            for bound in bounds:
                slopes = zip(bound.slopes, one.counts, strict=True)
                assert bound.at_zero + sum(slope * count for slope, count in slopes) <= costs + 1e-4


def several(*capabilities: Mapping[SessionClass, int]) -> list[Offer]:
    """Return offers of one kind, by what they serve."""
    return [Offer("k", tuple(one.model for one in each), Capability(each)) for each in capabilities]


HUGE = 10**9


@pytest.mark.parametrize(
    ("price", "most", "offers", "present", "forecast"),
    [
        # A value exceeds its limit by more than the solver's tolerance: the rounding did not end.
        (
            1.0,
            9,
            several({A: 10**6}, {B: 1}, {C: 10**6}, {A: 3, B: 100}, {A: 1, C: 100}),
            (2, 2, 1, 2, 2),
            {A: HUGE, B: 10**6, C: HUGE},
        ),
        # Simplex without presolve ends with no result.
        (
            1e-4,
            6,
            several({A: 100}, {B: 1}, {C: 100}, {A: 3, B: 3}, {B: 100, C: 10**6}),
            (1, 2, 1, 2, 0),
            {A: 10**6, B: HUGE, C: HUGE},
        ),
    ],
    ids=["limit", "presolve"],
)
def test_numbers_of_very_unlike_size_have_a_decision(
    price: float,
    most: int,
    offers: list[Offer],
    present: tuple[int, ...],
    forecast: Mapping[SessionClass, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = composition_search.CompositionSearch._tried

    def limited(
        search: composition_search.CompositionSearch, lower: Sequence[float], upper: Sequence[float]
    ) -> Numbers:
        assert search.programs < 1_000, "the search does not end"
        return tried(search, lower, upper)

    monkeypatch.setattr(composition_search.CompositionSearch, "_tried", limited)
    offers[-1] = replace(offers[-1], least=1)
    offers[1], offers[3] = replace(offers[1], most=1), replace(offers[3], least=1, most=0)
    terms = {"k": Terms(price, 0, 60.0, 0.0)}
    now = dict(zip((offer.key for offer in offers), present, strict=True))
    decision = decide(terms, offers, now, forecast, CompositionPolicy(1800.0, 1.0, least_gain=1e-6))
    assert sum(decision.composition.values()) == most


@pytest.mark.parametrize("few", [0, 20_000], ids=["exchanges", "all"])
def test_a_session_that_needs_a_millionth_of_a_worker_has_one(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition_search, "FEW", few)
    decision = decide(TERMS, several({A: 2 * 10**6}, {B: 2}), {}, {A: 1, B: 1}, FULL)
    assert decision.composition == {ONLY_A.key: 1, ONLY_B.key: 1}
    assert sum(decision.shortage.values()) == pytest.approx(0.0)


def test_numbers_of_workers_that_the_solver_fails_on_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one of many would leave the pool without a decision."""
    case = drawn_case(3, kinds=2, models=2, most=2)
    solve, fixed = composition._Program.solve, list[Sequence[float]]()

    def fails(program: composition._Program, lower: Sequence[float], upper: Sequence[float]) -> Numbers:
        if lower == upper and lower != program.costs.present:
            fixed.append(lower)
            if len(fixed) > 1:
                raise SolverError("no optimum: Unknown")
        return solve(program, lower, upper)

    monkeypatch.setattr(composition._Program, "solve", fails)
    decision = decide(case.terms, case.offers, case.present, case.forecast)
    assert decision.composition
    assert 3 < len(fixed) < composition_search.PROGRAMS


# The way there


def check_every_step(
    transition: Transition,
    offers: Mapping[tuple[str, tuple[str, ...]], Offer],
    present: Mapping[tuple[str, tuple[str, ...]], int],
    sessions: Mapping[SessionClass, int],
    terms: Mapping[str, Terms],
) -> Counter[tuple[str, tuple[str, ...]]]:
    now = Counter(present)
    least = min(1.0, share_with_places(offers, now, sessions))
    for step in transition.steps:
        if step.before is not None:
            now[step.before] -= 1
            assert now[step.before] >= 0
        # A hired or switched worker serves only at the end of its step.
        assert share_with_places(offers, now, sessions) >= least - 1e-5
        if step.after is not None:
            now[step.after] += 1
            had = sum(n for key, n in present.items() if key[0] == step.after[0])
            of_kind = sum(n for key, n in now.items() if key[0] == step.after[0])
            assert of_kind <= max(terms[step.after[0]].most, had)
    return +now


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(number, marks=pytest.mark.soak) for number in range(3, 25))]
)
def test_every_session_has_a_place_at_every_step(number: int) -> None:
    case = drawn_case(number, kinds=3, models=3, most=6)
    offers = {offer.key: offer for offer in case.offers}
    chance = Random(number)
    first = decide(case.terms, case.offers, {}, case.forecast).composition
    sessions = {one: int(count * chance.uniform(0.5, 1.0)) for one, count in case.forecast.items()}
    later = {one: count * chance.uniform(0.3, 1.7) for one, count in case.forecast.items()}
    wanted = decide(case.terms, case.offers, first, later).composition
    transition = plan(case.terms, case.offers, first, wanted, sessions)
    end = check_every_step(transition, offers, first, sessions, case.terms)
    if transition.complete:
        assert end == Counter(wanted)


def test_a_swap_of_two_full_workers_needs_one_worker_more() -> None:
    """Both workers are full, so neither can drain before another one serves."""
    present, wanted = {ONLY_A.key: 1, BOTH.key: 1}, {ONLY_B.key: 1, ONLY_A.key: 1}
    sessions = {A: 4, B: 1}
    offers = {offer.key: offer for offer in OFFERS}
    transition = plan(TERMS, OFFERS, present, wanted, sessions)
    assert transition.complete
    assert check_every_step(transition, offers, present, sessions, TERMS) == Counter(wanted)
    assert [step.kind for step in transition.steps if step.extra] == [StepKind.HIRE, StepKind.RELEASE]
    no_room = {"k": Terms(price=2.0, most=2)}
    assert plan(no_room, OFFERS, present, wanted, sessions) == Transition((), False)


def test_a_composition_with_too_few_places_is_not_reached() -> None:
    transition = plan(TERMS, OFFERS, {ONLY_A.key: 3}, {ONLY_A.key: 1}, {A: 8})
    assert [step.kind for step in transition.steps] == [StepKind.RELEASE]
    assert not transition.complete


def test_oserves_search_keeps_the_number_of_workers_and_never_lowers_the_flow() -> None:
    case = drawn_case(3, kinds=3, models=3, most=6)
    found = RandomSearch(seed=1)(case.offers, {"k0": 4, "k1": 5}, case.forecast)
    assert Counter(key[0] for key, n in found.items() for _ in range(n)) == {"k0": 4, "k1": 5}
    again = RandomSearch(seed=1)(case.offers, {"k0": 4, "k1": 5}, case.forecast)
    assert found == again
