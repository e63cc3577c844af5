"""Slots go to tenants fairly, for any numbers of waiting sessions."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise, permutations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.test_scheduler_core import Bench, session, worker
from turboserve.contracts.sessions import SLOT_COST, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.deciding import in_fair_order
from turboserve.scheduler.messages import (
    Answered,
    Place,
    Refused,
    SessionChanged,
    WorkerChanged,
)
from turboserve.scheduler.session_view import SessionView, Waiting

TENANTS = ("ta", "tb", "tc")
MODELS = ("ma", "mb")


def waiting(name: str, tenant: str, since: float, model: str = "ma") -> SessionView:
    view = SessionView(session(name, tenant=tenant, model=model), 1, 0.0)
    view.waiting = Waiting(since)
    return view


def since_of(view: SessionView) -> float:
    assert view.waiting is not None
    return view.waiting.since


queues = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.sampled_from(MODELS), st.integers(0, 5)), max_size=30
).map(
    lambda rows: [
        waiting(f"s{number:02}", tenant, float(since), model)
        for number, (tenant, model, since) in enumerate(rows)
    ]
)
holding = st.dictionaries(
    st.tuples(st.sampled_from(MODELS), st.sampled_from(TENANTS)), st.integers(0, 8), max_size=6
)


@given(queues, holding, holding)
def test_no_tenant_gets_ahead_of_one_that_waits_by_more_than_one_slot(
    sessions: list[SessionView], slots: dict[tuple[str, str], int], served: dict[tuple[str, str], int]
) -> None:
    costs = {share: SLOT_COST * count for share, count in slots.items()}
    order = in_fair_order(sessions, costs, served)
    assert sorted(view.id for view in order) == sorted(view.id for view in sessions)
    left = Counter(view.share for view in sessions)
    has = Counter(slots)
    got: set[tuple[str, str]] = set()
    for view in order:
        share = view.share
        has[share] += 1
        left[share] -= 1
        got.add(share)
        for other in left:
            if other[0] == share[0] and left[other]:
                assert has[share] <= has[other] + 1


@given(queues)
def test_within_a_tenant_who_waited_longest_comes_first(sessions: list[SessionView]) -> None:
    order = in_fair_order(sessions, {}, {})
    assert {view.id for view in order} == {view.id for view in sessions}
    for share in {view.share for view in sessions}:
        own = [(since_of(view), view.id) for view in order if view.share == share]
        assert own == sorted(own)


@given(st.integers(1, 30), st.integers(2, 8), st.integers(0, 240), st.randoms(use_true_random=False))
def test_with_equal_demand_shares_differ_by_one_at_most(
    each: int, tenants: int, slots: int, draw: random.Random
) -> None:
    sessions = [
        waiting(f"s{tenant}-{number}", f"t{tenant}", draw.random())
        for tenant in range(tenants)
        for number in range(each)
    ]
    draw.shuffle(sessions)
    first = in_fair_order(sessions, {}, {})[:slots]
    counts = Counter(view.record.tenant for view in first)
    shares = [counts[f"t{tenant}"] for tenant in range(tenants)]
    assert max(shares) - min(shares) <= 1


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(0, 2**32))
def test_no_tenant_starves_while_another_always_has_a_thousand_waiting(capacity: int, seed: int) -> None:
    """Slots are freed one at a time, at random.

    After some time both tenants hold half of them, and take turns with an odd one.
    """
    draw = random.Random(seed)
    greedy = [waiting(f"g{number:03}", "greedy", 0.0) for number in range(110)]
    modest = [waiting(f"m{number:03}", "modest", float(number + 1)) for number in range(110)]
    running = [greedy.pop(0) for _ in range(capacity)]
    served: dict[tuple[str, str], int] = {}
    turns, fair = [], False
    for turn in range(100):
        running.pop(draw.randrange(len(running)))
        slots: Counter[tuple[str, str]] = Counter()
        for view in running:
            slots[view.share] += view.record.slot_cost
        chosen = in_fair_order([*greedy[:9], modest[0]], slots, served)[0]
        running.append(chosen)
        served[chosen.share] = turn + 1
        (greedy if chosen in greedy else modest).remove(chosen)
        turns.append(chosen.record.tenant)
        now = Counter(view.record.tenant for view in running)
        near = abs(now["greedy"] - now["modest"]) <= 1
        assert near or not fair
        fair = fair or near
    assert fair
    if capacity == 1:
        assert all(one != other for one, other in pairwise(turns))


def test_with_one_tenant_it_is_first_come_first_served() -> None:
    views = [waiting(name, "ta", since) for name, since in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", 1.0))]
    assert [view.id for view in in_fair_order(views, {("ma", "ta"): 7 * SLOT_COST}, {("ma", "ta"): 3})] == [
        "b",
        "d",
        "c",
        "a",
    ]


@given(
    st.dictionaries(st.sampled_from(TENANTS), st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0)), min_size=2),
    st.integers(1, 40),
)
def test_slots_are_in_proportion_to_the_weights(weights: dict[str, float], slots: int) -> None:
    """While all wait, no tenant is behind another by more than one slot of its own."""
    views = []
    for tenant, weight in weights.items():
        for number in range(slots):
            view = waiting(f"{tenant}{number:02}", tenant, float(number))
            view.record = view.record.model_copy(update={"weight": weight})
            views.append(view)
    got: Counter[str] = Counter()
    for view in in_fair_order(views, {}, {})[:slots]:
        got[view.record.tenant] += 1
        for one, other in permutations(weights, 2):
            # Rounding of the costs is below a ten-thousandth of a slot.
            assert (got[one] - 1) / weights[one] <= got[other] / weights[other] + 0.01


# The core


def ours(name: str, tenant: str, **more: Any) -> SessionRecord:
    return session(name, tenant=tenant, **more)


def place_all(bench: Bench, rows: dict[str, SessionRecord]) -> list[str]:
    """Let the store carry out all placements. Returns the placed sessions, in order."""
    placed = []
    while bench.all(Place):
        place = bench.take(Place)
        rows[place.session] = bench.confirm(place, rows[place.session])
        placed.append(place.session)
    return placed


def end(bench: Bench, rows: dict[str, SessionRecord], name: str) -> None:
    row = rows.pop(name)
    after = row.model_copy(update={"phase": Phase.TERMINATED, "worker": None, "version": row.version + 1})
    bench.feed(SessionChanged(after))


def test_a_freed_slot_goes_to_the_tenant_that_has_none() -> None:
    rows = {f"g{number:03}": ours(f"g{number:03}", "greedy") for number in range(200)}
    bench = Bench(worker("a", capacity=4), *rows.values())
    assert place_all(bench, rows) == ["g000", "g001", "g002", "g003"]
    rows["m"] = ours("m", "modest", created_at=9)
    bench.feed(SessionChanged(rows["m"]), after=5.0)
    assert not bench.all(Place)
    end(bench, rows, "g002")
    assert place_all(bench, rows) == ["m"]
    end(bench, rows, "g001")
    assert place_all(bench, rows) == ["g004"]


def test_a_worker_that_comes_is_shared() -> None:
    rows = {f"g{number}": ours(f"g{number}", "greedy") for number in range(9)}
    rows |= {f"m{number}": ours(f"m{number}", "modest", created_at=9) for number in range(3)}
    bench = Bench(*rows.values())
    bench.feed(WorkerChanged(worker("a", capacity=4)))
    assert sorted(place_all(bench, rows)) == ["g0", "g1", "m0", "m1"]
    bench.feed(WorkerChanged(worker("b", capacity=4)))
    assert sorted(place_all(bench, rows)) == ["g2", "g3", "g4", "m2"]


def test_a_reservation_counts_until_its_outcome_is_known() -> None:
    """Two workers of one slot: the second does not go to the tenant that just got the first."""
    bench = Bench(worker("a"), ours("g0", "greedy"), ours("g1", "greedy"))
    first = bench.take(Place)
    bench.feed(SessionChanged(ours("m0", "modest", created_at=9)), after=1.0)
    bench.feed(Answered(first.ticket, refused=Refused.UNKNOWN))
    bench.feed(WorkerChanged(worker("b")))
    assert bench.take(Place).session == "m0"


def test_sessions_that_lost_their_worker_come_first_and_share_fairly() -> None:
    """Their viewers' video has stopped. They hold no slot, so a tenant with more of them is not behind."""

    def running(name: str, tenant: str) -> SessionRecord:
        return ours(name, tenant, phase=Phase.ACTIVE, worker="a", epoch=1, version=2)

    interrupted = [running(f"g{number}", "greedy") for number in range(4)] + [running("o0", "other")]
    bench = Bench(worker("a", capacity=5), *interrupted)
    bench.feed(WorkerChanged(worker("a", WorkerPhase.GONE, capacity=5)))
    rows = {f"m{number}": ours(f"m{number}", "modest", created_at=9) for number in range(2)}
    for row in rows.values():
        bench.feed(SessionChanged(row), after=1.0)

    def placed_on(name: str, capacity: int) -> list[str]:
        bench.feed(WorkerChanged(worker(name, capacity=capacity)))
        placed = sorted(place.session for place in bench.all(Place))
        bench.out.clear()
        return placed

    assert placed_on("b", 2) == ["g0", "o0"]
    assert placed_on("c", 2) == ["g1", "g2"]
    assert placed_on("d", 2) == ["g3", "m0"]
