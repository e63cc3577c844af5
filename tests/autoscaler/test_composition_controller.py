"""A pool with several offers: demand by class, the composition, and the steps to it, in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.autoscaler.offer_fleet import OFFERS, POLICY, TERMS, Fleet, handle
from turboserve.autoscaler.control.class_demand import ClassDemand
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.events import (
    DryRunSet,
    FeedbackReceived,
    ScalingAction,
    SizeOverridden,
)
from turboserve.autoscaler.control.learned_state import LearnedStateError
from turboserve.autoscaler.control.policy import ControlPolicy, default_table
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState
from turboserve.contracts.pool import LoadFeedback


def test_a_session_of_a_second_class_gets_a_worker_which_is_released_afterwards() -> None:
    fleet = Fleet({"wide": 1})
    fleet.live["large"] = 2
    fleet.run(15)
    assert fleet.sizes == {"wide": 1}
    fleet.live["light"] = 1
    fleet.run(2)
    # The cheapest worker that serves the class.
    assert fleet.sizes == {"wide": 1, "tiny": 1}
    hired = fleet.controller.decisions[-1]
    assert (hired.action, hired.previous, hired.target) == (ScalingAction.OUT, 1, 2)
    assert hired.reason == "hire tiny: large: 2 sessions, 2 expected; light: 1 session, 2 expected"
    assert hired.numbers["sessions light"] == 1
    assert hired.numbers["workers tiny"] == 1
    assert hired.numbers["cost"] < hired.numbers["present_cost"]
    fleet.run(20)
    fleet.live["light"] = 0
    fleet.run(8)
    assert fleet.sizes == {"wide": 1, "tiny": 1}, "the peak's window is not over"
    fleet.run(25)
    assert fleet.sizes == {"wide": 1}
    assert fleet.controller.decisions[-1].reason.startswith("release tiny: large: 2 sessions")


def test_a_cheaper_worker_of_the_class_is_ready_before_the_dear_one_is_released() -> None:
    fleet = Fleet({"both": 1})
    fleet.live["light"] = 2
    fleet.run(40)
    assert fleet.sizes == {"tiny": 1}
    assert [reason.partition(":")[0] for reason in fleet.reasons] == ["release both"]


def test_a_full_kind_switches_a_worker_that_no_session_needs() -> None:
    fleet = Fleet({"wide": 2})
    fleet.live["light"] = 9
    fleet.run(60)
    # One big worker has a place for all of them. Two small ones do not.
    assert fleet.sizes == {"both": 1}
    assert fleet.reasons[0].startswith("switch wide to both: ")
    first = next(one for one in fleet.controller.decisions if one.action is ScalingAction.SWITCH)
    assert first.target == first.previous


def test_a_peak_that_is_over_yields_to_a_session_that_waits() -> None:
    policy = replace(POLICY, peak_window_s=600.0)
    fleet = Fleet({"wide": 2, "tiny": 2}, policy)
    fleet.live["large"], fleet.live["light"] = 8, 6
    fleet.run(10)
    fleet.live["large"], fleet.live["light"] = 0, 8
    fleet.run(30)
    assert fleet.places()["light"] >= 8
    assert fleet.sizes["both"] == 1
    # What the other class had stays for its peak, as far as there is room.
    assert fleet.sizes["wide"] == 1


def test_live_sessions_keep_their_worker_from_a_switch() -> None:
    fleet = Fleet({"wide": 2, "tiny": 2})
    fleet.live["large"], fleet.live["light"] = 8, 6
    fleet.run(20)
    fleet.live["light"] = 8
    fleet.run(60)
    assert fleet.sizes == {"wide": 2, "tiny": 2}
    assert fleet.controller.maxima() == {"large": 2, "light": 2}
    fleet.live["large"] = 4
    fleet.run(60)
    assert fleet.sizes["wide"] == fleet.sizes["both"] == 1


def test_an_offer_that_fails_is_replaced_by_another_one() -> None:
    fleet = Fleet()
    fleet.fails.add("tiny")
    fleet.live["light"] = 1
    fleet.run(30)
    assert fleet.sizes == {"both": 1}
    assert fleet.places()["light"] == 12


def test_a_suspended_session_keeps_one_worker_of_its_class() -> None:
    fleet = Fleet({"tiny": 2, "wide": 1})
    fleet.suspended["tiny"] = 2
    fleet.run(60)
    assert fleet.sizes == {"tiny": 1}
    fleet.suspended.clear()
    fleet.run(30)
    assert fleet.sizes == {}


def test_lost_reports_about_one_class_take_no_place_from_its_sessions() -> None:
    fleet = Fleet({"wide": 1, "tiny": 2})
    fleet.live["large"], fleet.held["tiny"] = 2, 4
    fleet.run(60)
    assert fleet.sizes == {"wide": 1, "tiny": 2}
    assert fleet.controller.numbers()["sessions light"] == 4
    fleet.held.clear()
    fleet.run(60)
    assert fleet.sizes == {"wide": 1}


def test_silence_changes_nothing_and_a_new_process_does_not_shrink_at_once() -> None:
    fleet = Fleet({"wide": 2, "tiny": 1})
    fleet.live["large"] = 1
    fleet.run(4)
    fleet.silent = True
    fleet.run(60)
    assert fleet.sizes == {"wide": 2, "tiny": 1}
    assert [(one.action, one.reason) for one in fleet.controller.decisions][-1] == (
        ScalingAction.HOLD,
        "no load report for 5 s; the pool stays",
    )
    fleet.silent = False
    fleet.run(10)
    assert fleet.sizes == {"wide": 2, "tiny": 1}, "reports do not cover the window yet"
    fleet.run(30)
    assert fleet.sizes == {"wide": 1}


def test_an_override_and_a_dry_run() -> None:
    fleet = Fleet({"wide": 1})
    fleet.live["large"] = 2
    fleet.run(2)
    handle(fleet.controller, SizeOverridden(3, "an operator"), 2.0)
    fleet.run(10)
    assert sum(fleet.sizes.values()) == 3
    handle(fleet.controller, SizeOverridden(None, "an operator"), 12.0)
    handle(fleet.controller, DryRunSet(True), 12.0)
    fleet.run(30)
    assert sum(fleet.sizes.values()) == 3
    assert (fleet.controller.advice, fleet.controller.maxima()["large"]) == (1, fleet.sizes["wide"])
    assert "dry run; otherwise" in fleet.controller.decisions[-1].reason
    handle(fleet.controller, DryRunSet(False), 42.0)
    fleet.run(30)
    assert fleet.sizes == {"wide": 1}


def test_minimum_sizes_hold_and_k_is_remembered() -> None:
    offers = (replace(OFFERS[0], least=1), *OFFERS[1:])
    controller = CompositionController(POLICY, default_table(), offers, TERMS, {})
    controller.handle(OffersObserved({"tiny": OfferState(1, capacity={"light": 7})}), 0.0)
    handle(
        controller,
        FeedbackReceived(
            LoadFeedback(model="light", rho_max=0, required=0, waiting=0, capacity=0, workers=0)
        ),
        1.0,
    )
    assert controller.sizes == {"wide": 1, "tiny": 0, "both": 0}
    again = CompositionController(POLICY, default_table(), offers, TERMS, {})
    again.recall(controller.remember(0.0) or "", 0.0)
    known = {"wide": {"large": 4}, "tiny": {"light": 7}, "both": {"light": 12}}
    assert again.workers.capacity == known
    for changes in ({"sessions": {"large": 3}}, {"sessions": {"light": 2}}, {"kind": "big"}):
        changed = replace(OFFERS[1], **changes)
        third = CompositionController(POLICY, default_table(), (OFFERS[0], changed), TERMS, {})
        third.recall(controller.remember(0.0) or "", 0.0)
        assert third.workers.capacity == {"wide": {"large": 4}, "tiny": changed.sessions}
    with pytest.raises(LearnedStateError, match="no K by offer"):
        again.recall("{}", 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_random_demand_never_costs_a_session_its_place(seed: int) -> None:
    # `Fleet.decide` checks every step.
    chance, fleet = Random(seed), Fleet({"wide": 1})
    for _ in range(60):
        model = chance.choice(["large", "light"])
        fleet.live[model] = max(fleet.live[model] + chance.choice((-4, -2, -1, 1, 2, 4)), 0)
        fleet.fails = {"tiny"} if chance.random() < 0.1 else set()
        fleet.run(chance.randrange(1, 8))
    assert fleet.reasons
    fleet.live.clear()
    fleet.fails.clear()
    fleet.run(350)
    assert fleet.sizes == {}


def drawn_demand(chance: Random, seconds: int, arrivals: float, stay_s: float) -> list[int]:
    """Sessions of one class, second by second: Poisson arrivals at a rate that changes, exponential stays."""
    live, rate, found = list[float](), arrivals, []
    for now in range(seconds):
        if chance.random() < 0.01:
            rate = arrivals * chance.choice((0.3, 1.0, 2.0))
        while chance.random() < rate / (1 + rate):
            live.append(now + chance.expovariate(1 / stay_s))
        live = [until for until in live if until > now]
        found.append(len(live))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_what_is_expected_covers_the_demand_of_each_class_one_start_up_ahead(seed: int) -> None:
    chance, seconds, horizon = Random(seed), 1500, 5
    policy = ControlPolicy(most=8, horizon_s=horizon, peak_window_s=1.0, quantile=0.95)
    traces = {
        "large": drawn_demand(chance, seconds, 0.2, 60.0),
        "light": drawn_demand(chance, seconds, 1.5, 20.0),
    }
    demand = ClassDemand(tuple(traces), policy)
    covered, present = Counter[str](), Counter[str]()
    for now in range(seconds - horizon):
        for model, trace in traces.items():
            demand.update(
                LoadFeedback(
                    model=model, rho_max=0, required=trace[now], waiting=0, capacity=0, workers=0, at=now
                ),
                float(now),
            )
        for model, count in demand.expected(float(now)).items():
            covered[model] += count >= traces[model][now + horizon]
            present[model] += traces[model][now] >= traces[model][now + horizon]
    for model in traces:
        assert covered[model] / (seconds - horizon) >= 0.93
        # The present demand alone covers much less.
        assert present[model] < 0.8 * covered[model]
