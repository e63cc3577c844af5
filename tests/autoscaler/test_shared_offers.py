"""A pool whose offers have several models: compositions, steps and what workers report, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.autoscaler.offer_fleet import OFFERS, POLICY, TERMS, Fleet, handle
from tests.autoscaler.test_composition_faults import MemberLoop
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import GoalProblem, answer_to
from turboserve.autoscaler.control.events import ControlTick, ScalingAction
from turboserve.autoscaler.control.learned_state import LearnedStateError
from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState, OfferWorkers, PoolOffer
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.contracts.pool import PoolMemberPhase
from turboserve.contracts.worker_offers import ServedClass

SHARED = PoolOffer("all", "big", {"large": 3, "light": 9})
SEVERAL = (*OFFERS, SHARED)


def test_one_worker_serves_both_models_where_that_is_cheapest() -> None:
    fleet = Fleet(offers=(*OFFERS[:1], OFFERS[2], SHARED))
    fleet.live["large"], fleet.live["light"] = 1, 2
    fleet.run(20)
    # Two dear workers without it. One session of the three and two of the nine leave room.
    assert fleet.sizes == {"all": 1}
    assert fleet.controller.decisions[-1].numbers["sessions_per_worker all light"] == 9
    fleet.live["light"] = 8
    fleet.run(20)
    assert fleet.controller.workers.short(fleet.ready(), fleet.live) == 0
    assert sum(fleet.sizes.values()) == 2
    fleet.live.clear()
    fleet.run(60)
    assert fleet.sizes == {}


def test_models_that_no_session_wants_change_no_decision() -> None:
    """With one model for each offer, all is decided by sums. With further ones, by whole sessions.

    Only the reason to wait may differ: a plan by sums may have a step that is not possible yet.
    """
    beside = tuple(replace(offer, sessions={**offer.sessions, "unwanted": 1}) for offer in OFFERS)
    said = []
    for offers in (OFFERS, beside):
        chance, fleet = Random(4), Fleet({"wide": 1}, offers=offers)
        for _ in range(40):
            model = chance.choice(["large", "light"])
            fleet.live[model] = max(fleet.live[model] + chance.choice((-4, -2, -1, 1, 2, 4)), 0)
            fleet.fails = {"tiny"} if chance.random() < 0.1 else set()
            fleet.run(chance.randrange(1, 8))
        taken = (one for one in fleet.controller.decisions if one.action is not ScalingAction.HOLD)
        said.append([(one.at, one.action, one.target, one.reason) for one in taken])
    assert said[0] == said[1]
    assert len(said[0]) > 10


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_random_demand_never_costs_a_session_its_place(seed: int) -> None:
    # `Fleet.decide` checks every step.
    chance, fleet = Random(seed), Fleet({"all": 1}, offers=SEVERAL)
    for _ in range(30):
        model = chance.choice(["large", "light"])
        fleet.live[model] = max(fleet.live[model] + chance.choice((-4, -2, -1, 1, 2, 4)), 0)
        fleet.fails = {chance.choice(SEVERAL).name} if chance.random() < 0.1 else set()
        fleet.run(chance.randrange(1, 8))
    assert fleet.reasons
    fleet.fails.clear()
    fleet.live = Counter(large=2, light=4)
    fleet.run(120)
    assert fleet.controller.workers.short(fleet.ready(), fleet.live) == 0
    fleet.live.clear()
    fleet.run(200)
    assert fleet.sizes == {}


def test_whole_sessions_have_a_place_where_parts_of_them_would_need_fewer_workers() -> None:
    offers = (PoolOffer("any", "big", {"a": 2, "b": 3, "c": 5}),)
    terms = {"big": replace(TERMS["big"], most=4)}
    controller = CompositionController(POLICY, default_table(), offers, terms, {})
    workers, sessions = controller.workers, {"a": 1, "b": 2, "c": 4}
    offer = {"any": workers.offer("any")}
    problem = GoalProblem({"any": 0}, sessions, sessions, offer, offer, terms, controller.goal._policy, None)
    found = answer_to(problem).found
    assert found is not None
    assert found.sizes == {"any": 3}
    assert found.complete
    assert not workers.short({"any": 3}, sessions)
    assert workers.short({"any": 2}, sessions) == 1


def test_a_shared_worker_is_given_up_only_if_the_others_have_a_place_for_its_sessions() -> None:
    workers = OfferWorkers(SEVERAL, TERMS)
    live = {"large": 2, "light": 3}
    assert workers.keeps_places({"wide": 1, "tiny": 1, "all": 1}, {"wide": 1, "tiny": 1, "all": 0}, live)
    assert not workers.keeps_places({"tiny": 1, "all": 1}, {"tiny": 1, "all": 0}, live)
    # A third of the worker for each large session, and a ninth for a small one.
    assert workers.short({"all": 1}, live) == 0
    assert workers.short({"all": 1}, {"large": 2, "light": 4}) == 1
    # Workers of the kind that serve other models and that their sessions need.
    assert workers.maximum("large", {"wide": 0, "tiny": 0, "both": 2, "all": 0}, {"light": 13}) == 0
    assert workers.maximum("light", {"wide": 0, "tiny": 0, "both": 0, "all": 2}, {"large": 6}) == 4


def test_what_workers_report_of_each_model_counts() -> None:
    workers = OfferWorkers(SEVERAL, TERMS)
    workers.observe({"all": OfferState(1, capacity={"large": 2, "light": 0, "other": 5})}, 0.0)
    assert workers.capacity["all"] == {"large": 2, "light": 9}
    busy = OfferState(1, sessions={"large": 1, "light": 4}, suspended=1)
    workers.observe({"all": busy, "tiny": OfferState(1, suspended=2)}, 1.0)
    assert workers.with_held({"large": 0, "light": 2}) == {"large": 1, "light": 4}
    workers.observe({"all": OfferState(1, suspended=1)}, 2.0)
    assert workers.with_held({"large": 0, "light": 0}) == {"large": 1, "light": 1}
    # An offer that fails is avoided only if others have all of its models.
    workers.observe({"all": OfferState(failing=True), "wide": OfferState(failing=True)}, 3.0)
    assert workers.most("all") == workers.most("wide") == 0
    fewer = OfferWorkers((OFFERS[0], SHARED), TERMS)
    fewer.observe({"all": OfferState(failing=True)}, 0.0)
    assert fewer.most("all") is None


def member(name: str, **sessions: int) -> PoolMember:
    classes = tuple(
        ServedClass(model=model, capacity=n, sessions=sessions.get(model, 0))
        for model, n in (("large", 2), ("light", 7))
    )
    found = PoolMember(f"p-{name}", 0, name.partition("-")[0], PoolMemberPhase.READY)
    found.classes, found.sessions = classes, sum(sessions.values())
    return found


def test_the_members_of_an_offer_say_how_many_sessions_of_each_model_they_have() -> None:
    class SharedLoop(MemberLoop):
        offers = SEVERAL

    pool = SharedLoop({"all": 1}, member("all-0", large=1, light=2))
    pool.run(3, large=0, light=0)
    assert pool.workers.capacity["all"] == {"large": 2, "light": 7}
    numbers = pool.loop.controller.numbers()
    assert (numbers["sessions large"], numbers["sessions light"]) == (1, 2)
    # Three big workers at most serve `large`: none is taken by others. The row counts the ready one itself.
    assert pool.loop.further_models["tiny"] == ("light", 3)
    assert pool.loop.maximum == 2


def test_k_of_each_model_is_remembered_and_what_an_earlier_version_kept_is_read() -> None:
    controller = CompositionController(POLICY, default_table(), SEVERAL, TERMS, {})
    controller.handle(OffersObserved({"all": OfferState(1, capacity={"large": 2, "light": 7})}), 0.0)
    handle(controller, ControlTick(), 0.0)
    again = CompositionController(POLICY, default_table(), SEVERAL, TERMS, {})
    again.recall(controller.remember(0.0) or "", 0.0)
    assert again.workers.capacity["all"] == {"large": 2, "light": 7}
    earlier = '{"kind":"small","model":"light","declared":3,"sessions":5}'
    again.recall(f'{{"version":2,"offers":{{"tiny":{earlier}}}}}', 0.0)
    assert again.workers.capacity["tiny"] == {"light": 5}
    with pytest.raises(LearnedStateError, match="no K by offer"):
        again.recall('{"version":4,"offers":{}}', 0.0)


def test_a_decision_has_no_more_numbers_than_its_record_takes() -> None:
    models = [f"m{n}" for n in range(16)]
    offers = [PoolOffer(f"o{n}", "big", dict.fromkeys(models[:n] or models[:1], 1)) for n in range(16)]
    controller = CompositionController(POLICY, default_table(), offers[1:], TERMS, {})
    assert len(controller.numbers()) == 64


def test_a_drain_may_wait_only_for_workers_of_all_models_whose_sessions_it_holds() -> None:
    """Otherwise two workers would run in one place, and the second one would not help the first to end."""

    class SharedLoop(MemberLoop):
        offers = SEVERAL

    def in_the_way(large: int, light: int, suspended: int = 0) -> list[int]:
        classes = tuple(
            ServedClass(model=model, capacity=9, sessions=count)
            for model, count in (("large", large), ("light", light))
        )
        drains = PoolMember(
            "p-all-0", 0, "all", PoolMemberPhase.DRAINING, wanted=False, since=-60.0, worker="wrk_0",
            sessions=large + light, suspended=suspended, classes=classes,
        )  # fmt: skip
        pool = SharedLoop({}, drains)
        pool.run(1)
        return [pool.workers.of_kind("big", pool.sizes, offer) for offer in ("wide", "both", "all")]

    assert in_the_way(large=1, light=0) == [0, 1, 0]
    assert in_the_way(large=0, light=1) == [1, 0, 0]
    assert in_the_way(large=1, light=1) == [1, 1, 0]
    assert in_the_way(large=0, light=0, suspended=1) == [1, 1, 0]


def test_a_new_minimum_is_reached_by_a_switch() -> None:
    class LeastLoop(MemberLoop):
        offers = OFFERS[0], OFFERS[1], replace(OFFERS[2], least=1)
        terms = TERMS | {"big": replace(TERMS["big"], most=1)}

    ready = PoolMember("p-wide-0", 0, "wide", PoolMemberPhase.READY, worker="wrk_0")
    pool = LeastLoop({"wide": 1}, ready)
    pool.run(5, large=0)
    assert pool.switches == []
    pool.run(10, large=0)
    assert pool.switches == [("wide", "both")]
