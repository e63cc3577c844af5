"""A pool with several offers, and workers that never start, cannot be ended, fail, or cost nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from random import Random
from typing import cast

import pytest

from tests.autoscaler.offer_fleet import OFFERS, POLICY, TERMS, Fleet, handle
from tests.helpers.virtual_clock import VirtualClock
from turboserve.autoscaler.composition_loop import CompositionLoop
from turboserve.autoscaler.control.composition import Terms
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import (
    CompositionGoal,
    GoalAnswered,
    GoalProblem,
    answer_to,
)
from turboserve.autoscaler.control.events import SizeOverridden
from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.control.pool_offers import (
    AVOIDED_LIMIT_S,
    AVOIDED_S,
    OfferState,
    OfferWorkers,
    PoolOffer,
)
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.autoscaler.pool_term import PoolTerm
from turboserve.autoscaler.store_link import StoreLink, WorkerUsage
from turboserve.bus import Bus
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase, PoolOrders, PoolReport


class MemberLoop:
    """A loop whose pool's members the test sets."""

    loop_class: type[CompositionLoop] = CompositionLoop
    offers: Sequence[PoolOffer] = OFFERS
    terms: Mapping[str, Terms] = TERMS

    def __init__(self, sizes: dict[str, int], *members: PoolMember) -> None:
        self.members, self.now = list(members), 0.0
        self.switches: list[tuple[str, str]] = []
        controller = CompositionController(POLICY, default_table(), self.offers, self.terms, sizes)
        self.workers = controller.workers
        self.sizes = controller.sizes
        self.loop = self.loop_class(
            controller,
            default_table(),
            None,
            lambda sizes, reason, switches: self.resized(sizes, switches),
            lambda: self.members,
            self.solve,
        )
        self.loop.ordered(PoolOrders(pool="p"), 0.0)

    def resized(self, sizes: Mapping[str, int], switches: Sequence[tuple[str, str]]) -> None:
        self.switches.extend(switches)

    def solve(self, problem: GoalProblem, answered: Callable[[GoalAnswered, float], None]) -> None:
        answered(answer_to(problem), self.now)

    def run(self, seconds: int, **live: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for model, count in live.items():
                load = LoadFeedback(
                    model=model, rho_max=0, required=count, waiting=0, capacity=0, workers=0, at=self.now
                )
                self.loop.on_feedback(load, self.now)
            self.loop.tick(self.members, self.now)


def member(name: str, phase: PoolMemberPhase, **more: object) -> PoolMember:
    offer, _, index = name.partition("-")
    return PoolMember(f"p-{name}", int(index), offer, phase, **more)  # type: ignore[arg-type]


def test_a_worker_that_never_was_ready_is_given_up_without_the_place_of_a_ready_one() -> None:
    """Incident: a release counted one ready worker less, and waited for ever. The other class starved."""
    fleet = Fleet({"wide": 1})
    fleet.fails.add("wide")
    fleet.live["large"] = 6
    fleet.run(5)
    assert fleet.sizes == {"wide": 2}
    fleet.live["large"], fleet.live["light"] = 4, 9
    fleet.run(60)
    assert fleet.sizes["wide"] == fleet.sizes["both"] == 1
    assert fleet.places()["light"] >= 9


def has_room(fleet: Fleet, broken: str) -> bool:
    """Whether a composition has a place for every live session, without new workers of a broken offer."""
    workers, ready = fleet.controller.workers, fleet.ready()
    for counts in product(range(3), repeat=len(OFFERS)):
        sizes = {offer.name: count for offer, count in zip(OFFERS, counts, strict=True)}
        fits = all(
            sum(sizes[offer.name] for offer in OFFERS if offer.kind == kind) <= terms.most
            for kind, terms in TERMS.items()
        )
        if fits and sizes[broken] <= ready[broken] and not workers.short(sizes, fleet.live):
            return True
    return False


@pytest.mark.parametrize("seed", range(2))
def test_every_session_gets_a_place_that_workers_without_a_broken_offer_have(seed: int) -> None:
    chance, checked = Random(seed), 0
    for _ in range(15):
        broken = chance.choice(OFFERS).name
        wide = chance.randrange(3)
        fleet = Fleet({"wide": wide, "tiny": chance.randrange(3), "both": chance.randrange(3 - wide)})
        fleet.fails.add(broken)
        fleet.workers[broken] = [chance.choice((0.0, math.inf)) for _ in fleet.workers[broken]]
        for seconds in (6, 60):
            fleet.live = Counter(large=chance.randrange(9), light=chance.randrange(13))
            # The store knows sessions that have a place before the scheduler reports their class.
            found = fleet.places()
            fleet.held = Counter(
                wide=min(found["large"], fleet.live["large"]), both=min(found["light"], fleet.live["light"])
            )
            fleet.run(seconds)
        if has_room(fleet, broken):
            checked += 1
            places = fleet.places()
            assert all(places[model] >= live for model, live in fleet.live.items()), (fleet.sizes, broken)
    assert checked > 4


@pytest.mark.parametrize("prices", [{"big": 4.0, "small": 0.0}, {"big": 0.0, "small": 0.0}])
def test_no_more_free_workers_run_than_are_needed(prices: dict[str, float]) -> None:
    terms = {kind: Terms(price, most=2, start_s=5.0, switch_s=5.0) for kind, price in prices.items()}
    fleet = Fleet({"tiny": 2}, terms=terms)
    fleet.live["light"] = 1
    fleet.run(40)
    assert fleet.sizes == {"tiny": 1}
    fleet.live.clear()
    fleet.run(40)
    assert fleet.sizes == {}


def test_a_shortage_of_one_class_keeps_no_idle_worker_of_another() -> None:
    """One worker less is less than a gap of 0.5 % of the cost of the shortage."""
    capacity = {"xa": 1, "xb": 2, "ya": 6, "za": 8, "zb": 1}
    offers = [PoolOffer(name, name[0], {name[1]: sessions}) for name, sessions in capacity.items()]
    prices = {"x": 3.7, "y": 1.0, "z": 2.9}
    terms = {kind: Terms(price, most=40, start_s=5.0, switch_s=5.0) for kind, price in prices.items()}
    sizes = {"xa": 0, "xb": 40, "ya": 40, "za": 8, "zb": 32}
    goal, sessions = CompositionGoal(OfferWorkers(offers, terms), sizes), {"a": 297, "b": 386}
    assert not goal.is_solved(sizes, sessions, sessions, None, 0.0)
    assert goal.problem is not None
    goal.answered(answer_to(goal.problem))
    assert goal.is_solved(sizes, sessions, sessions, None, 0.0)
    assert goal.sizes == sizes | {"ya": 39}


def test_no_release_waits_for_a_worker_that_cannot_be_ended() -> None:
    pool = MemberLoop(
        {"wide": 1},
        member("wide-0", PoolMemberPhase.READY),
        member("tiny-0", PoolMemberPhase.RELEASING, wanted=False),
    )
    pool.run(25, large=0)
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 0}
    pool.run(15, large=0)
    assert pool.sizes == {"wide": 0, "tiny": 0, "both": 0}


def test_workers_that_an_autoscaler_finds_are_heard_before_any_is_released() -> None:
    """Incident: after a restart, with no worker ready, one was released that another session used."""
    found = member("wide-0", PoolMemberPhase.LAUNCHING, adopted=True, since=0.0)
    other = member("both-0", PoolMemberPhase.LAUNCHING, adopted=True, since=0.0)
    pool = MemberLoop({"wide": 1, "both": 1}, found, other)
    pool.run(4, large=0, light=9)
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 1}
    found.phase = other.phase = PoolMemberPhase.READY
    pool.run(4, large=0, light=9)
    assert pool.sizes == {"wide": 1, "tiny": 0, "both": 1}, "reports do not cover the window yet"
    pool.run(10, large=0, light=9)
    assert pool.sizes == {"wide": 0, "tiny": 0, "both": 1}


def test_a_worker_that_is_found_and_stays_silent_holds_up_releases_for_half_a_minute() -> None:
    silent = member("both-0", PoolMemberPhase.LAUNCHING, adopted=True, since=0.0)
    pool = MemberLoop({"wide": 1, "both": 1}, member("wide-0", PoolMemberPhase.READY), silent)
    pool.run(30, large=0, light=9)
    assert pool.sizes["wide"] == 1
    pool.run(3, large=0, light=9)
    assert pool.sizes["wide"] == 0


def test_hardware_that_cannot_be_freed_is_not_used() -> None:
    pool = MemberLoop({}, *(member(f"tiny-{n}", PoolMemberPhase.RELEASING, wanted=False) for n in range(2)))
    pool.run(25, light=1)
    assert not any(pool.sizes.values())
    pool.run(15, light=1)
    # The small kind has no room. Before the workers are stuck, the cheapest goal waits for it.
    assert pool.sizes == {"wide": 0, "tiny": 0, "both": 1}


def test_a_drain_with_sessions_may_wait_for_a_worker_of_its_model_alone() -> None:
    workers, none = OfferWorkers(OFFERS, TERMS), dict.fromkeys(("wide", "tiny", "both"), 0)
    workers.observe({"wide": OfferState(blocked=2, blocked_models=frozenset({"large"}))}, 0.0)
    assert [workers.of_kind("big", none, offer) for offer in ("wide", "both")] == [0, 2]
    assert workers.maximum("large", none, {"light": 0}) == 2
    workers.observe({"wide": OfferState(stuck=1)}, 1.0)
    assert [workers.of_kind("big", none, offer) for offer in ("wide", "both")] == [1, 1]
    assert workers.maximum("large", none, {"light": 0}) == 1


def test_an_offer_that_fails_keeps_its_worker_that_still_starts() -> None:
    pool = MemberLoop(
        {"tiny": 2},
        member("tiny-0", PoolMemberPhase.BACKING_OFF, failures=2),
        member("tiny-1", PoolMemberPhase.LOADING),
    )
    pool.run(2, light=3)
    assert pool.sizes == {"wide": 0, "tiny": 1, "both": 0}


def test_the_time_without_an_offer_that_fails_doubles_until_a_worker_of_it_is_stable() -> None:
    workers, now = OfferWorkers(OFFERS, TERMS), 0.0
    failing, waits = OfferState(failing=True), list[float]()
    for _ in range(9):
        workers.observe({"tiny": failing}, now)
        began = now
        while workers.most("tiny") is not None:
            now += 10.0
            workers.observe({}, now)
        waits.append(now - began)
    assert waits == [min(AVOIDED_S * 2**n, AVOIDED_LIMIT_S) for n in range(9)]
    workers.observe({"tiny": failing}, now)
    # A worker that was stable before says nothing about new ones.
    workers.observe({"tiny": OfferState(1, stable_since=now - 1.0)}, now + 40.0)
    assert workers.most("tiny") == 1
    workers.observe({"tiny": OfferState(1, stable_since=now + 1.0)}, now + 40.0)
    assert workers.most("tiny") is None
    workers.observe({"tiny": failing}, now + 50.0)
    workers.observe({"tiny": failing}, now + 50.0 + AVOIDED_S - 1.0)
    workers.observe({}, now + 50.0 + AVOIDED_S)
    assert workers.most("tiny") is None


def test_a_worker_is_stable_after_half_a_minute() -> None:
    ready = member("tiny-0", PoolMemberPhase.READY, ready_at=2.0)
    failed = member("tiny-1", PoolMemberPhase.BACKING_OFF, failures=2)
    pool = MemberLoop({"tiny": 2}, failed)
    pool.run(1, light=4)
    assert pool.workers.most("tiny") == 0
    pool.members = [ready]
    pool.run(29, light=4)
    assert pool.workers.most("tiny") == 1
    pool.run(3, light=4)
    assert pool.workers.most("tiny") is None


def test_an_order_counts_on_an_offer_that_fails_if_the_others_have_too_few_workers() -> None:
    fleet = Fleet()
    fleet.fails.add("tiny")
    fleet.live["light"] = 1
    fleet.run(30)
    assert fleet.sizes == {"both": 1}
    handle(fleet.controller, SizeOverridden(4, "an operator"), 30.0)
    fleet.run(10)
    assert sum(fleet.sizes.values()) == 4


class ReportStore:
    """The reports of a pool, as the state store gets them."""

    def __init__(self) -> None:
        self.pools: list[str] = []

    async def call(self, _endpoint: object, report: PoolReport) -> PoolOrders:
        self.pools.append(report.pool)
        return PoolOrders(pool="p")


class OddLoop(CompositionLoop):
    @property
    def further_models(self) -> dict[str, tuple[str, int]]:
        return {"tiny": ("no id", 1), "both": ("light", 1)}


class OddMemberLoop(MemberLoop):
    loop_class = OddLoop


def link_of(loop: CompositionLoop, store: ReportStore, leads: list[bool]) -> StoreLink:
    term = PoolTerm("p", 3, lambda now: leads[-1], lambda: None)
    pool, usage = Pool("p", lambda: "w"), WorkerUsage(None, 1.0)
    return StoreLink(cast(Bus, store), VirtualClock(), pool, usage, loop, term)


async def test_a_process_whose_term_is_over_does_not_report_further_models() -> None:
    """Their rows have no leader, so the state store would accept them."""
    store, leads = ReportStore(), [True]
    link = link_of(MemberLoop({}).loop, store, leads)
    await link.report()
    assert store.pools == ["p", "p-tiny"]
    leads.append(False)
    await link.report()
    assert store.pools == ["p", "p-tiny", "p"]


async def test_a_report_about_a_further_model_that_cannot_be_made_is_a_problem() -> None:
    store = ReportStore()
    link = link_of(OddMemberLoop({}).loop, store, [True])
    await link.report()
    assert (link.problem or "").startswith("the workers for no id are not reported: model: ")
    assert store.pools == ["p", "p-both"]
