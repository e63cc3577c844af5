"""Composition of a pool of several kinds and models, the way there, and the exhaustive oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.autoscaler.control.composition import CompositionPolicy, Offer, Terms, decide
from turboserve.autoscaler.control.transition import StepKind, Transition, plan, share_with_places
from turboserve.experiments.mixed.composing import drawn_case, oracle_cost
from turboserve.experiments.mixed.random_search import RandomSearch

A, B = SessionClass("a"), SessionClass("b")
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
def test_decisions_are_near_the_exhaustive_oracle(number: int) -> None:
    case = drawn_case(number, kinds=2, models=2, most=2)
    policy = CompositionPolicy()
    decision = decide(case.terms, case.offers, case.present, case.forecast, policy)
    best = oracle_cost(case, policy)
    assert best - 1e-6 <= decision.cost <= best * 1.05


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
    "number", [*range(5), *(pytest.param(number, marks=pytest.mark.soak) for number in range(5, 25))]
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
