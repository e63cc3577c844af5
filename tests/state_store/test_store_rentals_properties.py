"""Cost under any interleaving of clock steps, restarts, and reports that are lost, doubled or late."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from turboserve.contracts.cost import Rental
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core import aging
from turboserve.state_store.core.rentals import (
    BRIDGE_S,
    ClockReading,
    RentalRow,
    followed,
    reported,
    take_over,
)

PRICES = {"*": 1.0}
STEP_S = st.floats(-60 * 86_400.0, 60 * 86_400.0)
PASS_S = st.floats(0.0, 900.0)
SLACK_S = 1e-3
"""Maximum error of sums of floats that contain wall-clock times."""


@dataclass
class World:
    """One worker, its pool's processes and the store's, over true time `now`, in seconds."""

    now: float = 0.0
    wall_error: float = 1_700_000_000.0
    store: int = 0
    autoscaler: int = 0
    found_at: float = 0.0
    row: RentalRow | None = None
    current: tuple[str | None, tuple[str, ...]] = (None, ())
    sent: list[tuple[str, Rental]] = field(default_factory=list)
    bridges: int = 0
    """Number of times at which no process on either side continued."""
    both_new: bool = False
    history: list[RentalRow] = field(default_factory=list)

    def moment(self) -> ClockReading:
        # Each process's monotonic clock has a start of its own.
        return ClockReading(f"sto_{self.store}", self.now + 1_000.0 * self.store, self.now + self.wall_error)

    def send(self, ended: bool = False) -> None:
        ended_ago = 0.0 if ended else None
        rental = Rental(worker="w", age_s=self.now - self.found_at, ended_ago_s=ended_ago)
        self.sent.append((f"asc_{self.autoscaler}", rental))
        self.arrive(-1)

    def arrive(self, index: int) -> None:
        process, rental = self.sent[index]
        taken = take_over(*self.current, process)
        if taken is None:
            return
        self.current = taken
        changed = self.row is not None and self.row.source != process
        if changed and self.row is not None and self.row.meter != self.moment().process:
            self.bridges += 1
        self.row = reported(self.row, "p", process, rental, PRICES, self.moment())
        self.history.append(self.row)


ACTIONS = st.one_of(
    st.tuples(st.just("pass"), PASS_S),
    st.tuples(st.just("step"), STEP_S),
    st.tuples(st.just("report"), st.just(0.0)),
    st.tuples(st.just("report"), st.just(0.0)),
    st.tuples(st.just("again"), st.floats(0.0, 1.0)),
    st.tuples(st.just("store"), st.just(0.0)),
    st.tuples(st.just("autoscaler"), st.just(0.0)),
)


@given(st.lists(ACTIONS, max_size=40))
def test_what_is_paid_is_what_was_measured_and_a_bounded_rest(actions: list[tuple[str, float]]) -> None:
    world = World()
    world.send()
    for action, value in actions:
        match action:
            case "pass":
                world.now += value
            case "step":
                world.wall_error = max(world.wall_error + value, 1e6)
            case "report":
                world.send()
            case "again":
                world.arrive(int(value * (len(world.sent) - 1)))
            case "store":
                world.store += 1
            case "autoscaler":
                # It finds the worker at its start.
                world.autoscaler += 1
                world.found_at = world.now
    world.send(ended=True)
    row = world.row
    assert row is not None
    # Never more than true time, except for the wall clocks' share, which is bounded and marked.
    assert row.paid_s - row.estimated_s <= world.now + SLACK_S
    assert row.estimated_s <= world.bridges * BRIDGE_S + SLACK_S
    if not world.bridges:
        assert math.isclose(row.paid_s, world.now, abs_tol=SLACK_S)
        assert row.estimated_s == 0.0
    for before, after in zip(world.history, world.history[1:], strict=False):
        assert after.paid_s >= before.paid_s
    for one in world.history:
        for part in (one.starting_s, one.estimated_s, one.accrued_s):
            assert 0.0 <= part <= one.paid_s + SLACK_S
    paid_s = row.paid_s
    for index in range(len(world.sent)):
        world.arrive(index)
    assert world.row is not None
    assert world.row.paid_s == paid_s


@given(st.lists(st.tuples(st.sampled_from(["pass", "step", "store", "renew"]), STEP_S), max_size=40))
def test_a_worker_of_no_pool_is_paid_for_as_it_was_measured(actions: list[tuple[str, float]]) -> None:
    now, error, store, replaced = 0.0, 1_700_000_000.0, 0, 0
    renewed = error
    row: RentalRow | None = None
    for action, value in actions:
        match action:
            case "pass":
                now += abs(value) % 60.0
            case "step":
                error = max(error + value, 1e6)
            case "store":
                store, replaced = store + 1, replaced + 1
            case "renew":
                renewed = now + error
        record = WorkerRecord(
            id="w",
            model="m",
            capacity=1,
            phase=WorkerPhase.READY,
            started_at=1.7e9,
            renewed_at=renewed,
        )
        row = followed(row, record, PRICES, ClockReading(f"sto_{store}", now + 77.0 * store, now + error))
    if row is not None:
        assert row.paid_s - row.estimated_s <= now + SLACK_S
        assert 0.0 <= row.estimated_s <= min(row.paid_s + SLACK_S, (replaced + 1) * BRIDGE_S)


@given(st.lists(st.tuples(st.sampled_from(["look", "step", "restart"]), PASS_S, STEP_S), max_size=60))
def test_nothing_ages_faster_than_time_passes_whatever_clocks_do(
    actions: list[tuple[str, float, float]],
) -> None:
    now, error, restarts = 0.0, 1_700_000_000.0, 0
    age = aging.first(error)
    looked_at: float | None = 0.0
    begun = age.aged_to
    for action, passes, step in actions:
        now += passes
        if action == "step":
            error = max(error + step, 1e6)
        elif action == "restart":
            restarts, looked_at = restarts + 1, None
        before = age
        age = aging.went_on(before, now + error, None if looked_at is None else now - looked_at)
        looked_at = now
        assert age.aged_to <= age.wall
    assert age.aged_to - begun <= (now + restarts * aging.RESTART_S) * (1 + aging.CATCH_UP) + SLACK_S


def test_time_that_lies_behind_comes_back_to_the_wall_clock() -> None:
    age = aging.went_on(aging.first(0.0), 86_400.0, 30.0)
    assert age.aged_to < 60.0
    for second in range(86_400, 86_400 + 86_400 * 11, 3_600):
        age = aging.went_on(age, float(second), 3_600.0)
    assert age.aged_to == age.wall
