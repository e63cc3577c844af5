"""The controller while workers absorb bursts: the price of quality, scale-outs by debt, off at 0."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.absorption import (
    DEBT_WINDOW_S,
    LEARNS_S,
    QualityPrice,
    floor_of,
    peak_slots,
    priced,
)
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    ControlTick,
    DryRunSet,
    Event,
    FeedbackReceived,
    PoolObserved,
    ScalingAction,
    SizeOverridden,
)
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.pool import LoadFeedback

K = 5


def table(rho: float = 0.5) -> ProfileTable:
    row = LevelParameters(level=1, volatility_from=0, latency_weight=0, target_utilization=rho)
    return ProfileTable(levels=(row,), provenance=Provenance(source="a test"))


def feedback(required: int, workers: int, at: float, **more: float) -> LoadFeedback:
    held = {"rho_max": -(-required // workers) / K, "waiting": 0, "floor_capacity": 2 * K * workers}
    return LoadFeedback.model_validate(
        {"model": "m", "required": required, "workers": workers, "capacity": K * workers, "at": at}
        | held
        | more
    )


class Run:
    """A controller whose workers are ready as soon as they are ordered."""

    def __init__(self, workers: int, limit: float = 0.1, rho: float = 0.5, **policy: float) -> None:
        values = {"least": 1, "most": 20, "capacity": K, "quality_debt_limit": limit, **policy}
        self.controller = Controller(ControlPolicy(**values), table(rho), workers)  # type: ignore[arg-type]
        self.now, self.before, self.changes = 0.0, workers, 0

    def advance(self, seconds: int, required: int, **more: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            workers = self.controller.target
            self.controller.handle(PoolObserved(ready=workers), self.now)
            self.controller.handle(FeedbackReceived(feedback(required, workers, self.now, **more)), self.now)

    @property
    def target(self) -> int:
        return self.controller.target

    @property
    def advice(self) -> str:
        return self.controller.advisor.advise(self.target, False, self.now).reason

    def actions(self, action: ScalingAction) -> int:
        return sum(decision.action is action for decision in self.controller.decisions)


class TestPrice:
    def test_it_reaches_its_ends_and_rests_at_the_limit(self) -> None:
        price, at = QualityPrice(0.1), 0.0
        for debt, share, expected in ((0.2, 2.0, 1.0), (0.1, 1.0, 1.0), (0.0, 0.5, 0.5), (0.0, 1.0, 0.0)):
            for _ in range(int(share * LEARNS_S)):
                at += 1.0
                price.observe(debt, at)
            assert price.value == pytest.approx(expected, abs=0.02)

    def test_a_pause_of_the_feedback_counts_ten_seconds_at_most(self) -> None:
        price = QualityPrice(0.1)
        price.observe(0.2, 0.0)
        price.observe(0.2, 1e6)
        assert price.value == pytest.approx(10.0 / LEARNS_S)

    @settings(deadline=None)
    @given(
        st.floats(5e-324, 1),
        st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1)), max_size=50),
    )
    def test_it_stays_within_0_to_1(self, limit: float, history: list[tuple[float, float]]) -> None:
        price = QualityPrice(limit)
        now = 0.0
        for pause_s, debt in history:
            now += pause_s
            price.observe(debt, now)
            assert 0.0 <= price.value <= 1.0
            assert price.exceeded_s(now) >= 0.0


class TestParameters:
    @given(st.floats(0.01, 1), st.integers(1, 1_000), st.integers(0, 1_000), st.floats(0, 1), st.floats(0, 1))
    def test_rho_lies_between_the_tables_and_1_and_falls_with_the_price(
        self, rho: float, capacity: int, more: int, one: float, other: float
    ) -> None:
        row = table(rho).levels[0]
        low, high = sorted((one, other))
        cheap = priced(row, capacity, capacity + more, low).target_utilization
        dear = priced(row, capacity, capacity + more, high).target_utilization
        assert rho <= dear <= cheap + 1e-12
        assert cheap <= min(max(rho * (capacity + more) / capacity, rho), 1.0) + 1e-12

    def test_without_a_floor_the_row_is_the_tables_own(self) -> None:
        row = table().levels[0]
        assert priced(row, K, K, 0.0) is row
        assert floor_of(feedback(3, 2, 0.0).model_copy(update={"floor_capacity": None}), K) == K

    def test_a_scale_in_keeps_room_for_the_last_peak_at_the_price(self) -> None:
        assert [peak_slots(5, 10, price) for price in (0.0, 0.5, 1.0)] == [7.5, 6.25, 5]
        for price, kept in ((0.0, 6), (1.0, 8)):
            run = Run(8, rho=1.0, horizon_s=1e6)
            run.advance(20, 40)
            for _ in range(60):
                run.controller.advisor.price.value = price
                run.advance(1, 1)
            assert run.target == kept

    def test_the_pool_buys_what_the_price_says(self) -> None:
        # ρ̂ 0.5 and K_floor = 2 K: at price 0 the slots may be full, at price 1 half of them.
        for price, expected in ((0.0, 4), (0.5, 6), (1.0, 8)):
            run = Run(1, out_cooldown_s=0.0)
            run.controller.advisor.price.value = price
            run.advance(1, 20)
            assert run.target == expected


class TestDebt:
    def test_the_pool_shrinks_only_when_debt_and_deficit_are_zero_and_no_worker_borrows(self) -> None:
        for owes in ({"quality_debt": 1e-9}, {"deficit": 0.01}, {"borrowing": 1}):
            run = Run(12)
            run.advance(60, 10, **owes)
            assert run.actions(ScalingAction.IN) == 0
            assert "not scaling in" in run.advice
            run.advance(600, 10)
            assert run.actions(ScalingAction.IN) >= 1

    def test_a_loan_alone_neither_grows_the_pool_nor_keeps_one_that_does_not_absorb(self) -> None:
        run = Run(8)
        run.advance(600, 12, borrowing=2)
        assert run.actions(ScalingAction.OUT) == 0
        run = Run(12, limit=0.0)
        run.advance(600, 10, borrowing=2)
        assert run.actions(ScalingAction.IN) >= 1

    def test_a_deficit_that_falls_scales_out_by_one_worker_in_a_start_up_time(self) -> None:
        run = Run(8)
        for deficit in (9.0, 5.0, 2.5):
            run.advance(10, 12, deficit=deficit)
        assert run.target == 11
        decision = run.controller.decisions[-1]
        assert decision.action is ScalingAction.OUT
        assert "2.5 late chunks are expected" in decision.reason
        assert decision.numbers["deficit"] == 2.5

    def test_a_deficit_that_no_worker_lowers_waits_twice_as_long_each_time(self) -> None:
        run = Run(8)
        run.advance(80, 15, deficit=2.5)
        outs = [one.at for one in run.controller.decisions if one.action is ScalingAction.OUT]
        assert outs == [1.0, 11.0, 31.0, 71.0]

    def test_more_workers_than_sessions_help_no_chunk(self) -> None:
        run = Run(8)
        run.advance(300, 10, deficit=9.0, quality_debt=1.0)
        assert run.target == 10

    def test_debt_scales_out_only_after_the_debt_of_one_burst_would_be_over(self) -> None:
        run = Run(8, limit=0.05, horizon_s=10.0)
        run.advance(int(DEBT_WINDOW_S) + 10, 10, quality_debt=0.06)
        assert run.target == 8
        run.advance(3, 10, quality_debt=0.06)
        assert run.target == 9
        assert "6.0% of the last minute's chunks" in run.controller.decisions[-1].reason

    @settings(deadline=None, max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(
        st.integers(2, 12),
        st.floats(1.0, 20.0),
        st.floats(0.0, 60.0),
        st.sampled_from((3.0, 10.0, 30.0)),
        st.booleans(),
    )
    def test_constant_demand_with_a_deficit_that_returns_is_scaled_a_bounded_number_of_times(
        self, workers: int, deficit: float, delay_s: float, horizon_s: float, as_debt: bool
    ) -> None:
        """The demand fits by count and is late on `workers`, but not on one more."""
        run = Run(
            workers,
            rho=0.75,
            horizon_s=horizon_s,
            in_window_s=horizon_s,
            in_cooldown_s=4.0,
            peak_window_s=6.0,
        )
        required, late_s = workers * K // 2 + 1, 0.0
        for _ in range(1800):
            late_s = late_s + 1.0 if run.target <= workers else 0.0
            owes = {"quality_debt": 1.0} if as_debt else {"deficit": deficit}
            run.advance(1, required, **(owes if late_s > delay_s else {}))
            run.changes += run.target != run.before
            run.before = run.target
        # Holds of 2, 4, 8 and 16 minutes make four pairs of changes. The way to the first size comes first.
        assert run.changes <= 8 + workers

    def test_the_same_mistake_is_not_made_again_before_long(self) -> None:
        """Four sessions are late on three workers of two slots, as on seed 700040 of the simulation."""
        run = Run(3, rho=0.75, horizon_s=3.0, in_window_s=4.0, in_cooldown_s=4.0, peak_window_s=4.0)
        run.advance(5, 12)
        run.advance(2, 12, deficit=1.0)
        assert run.target == 4
        run.advance(100, 12)
        assert run.target == 4
        assert "3 workers were short at 12 sessions" in run.advice
        run.advance(60, 12)
        assert run.target == 3
        run.advance(2, 12, deficit=1.0)
        run.advance(200, 12)
        assert run.target == 4

    def test_less_demand_than_was_short_releases_the_extra_worker(self) -> None:
        run = Run(3, rho=0.75, horizon_s=3.0, in_window_s=4.0, in_cooldown_s=4.0, peak_window_s=4.0)
        run.advance(5, 12)
        run.advance(2, 12, deficit=1.0)
        assert run.target == 4
        run.advance(30, 8)
        assert run.target < 4

    def test_the_maximum_holds(self) -> None:
        run = Run(20)
        run.advance(300, 90, deficit=9.0, quality_debt=1.0)
        assert run.target == 20


class TestAbsorbing:
    @pytest.mark.parametrize(
        ("events", "expected"),
        [
            ((PoolObserved(ready=20),), False),
            ((PoolObserved(ready=19, starting=1),), True),
            ((PoolObserved(ready=19),), True),
            # An order fixes the size, and its end lets the pool grow again.
            ((PoolObserved(ready=10), SizeOverridden(10)), False),
            ((PoolObserved(ready=10), SizeOverridden(10), SizeOverridden(None)), True),
            ((PoolObserved(ready=10), SizeOverridden(10), SizeOverridden(None), DryRunSet(True)), False),
        ],
    )
    def test_it_lasts_while_capacity_is_on_its_way(self, events: tuple[Event, ...], expected: bool) -> None:
        controller = Run(20).controller
        for event in events:
            controller.handle(event, 0.0)
        assert controller.absorbs is expected

    def test_at_the_maximum_the_operator_chooses(self) -> None:
        values = {"most": 20, "capacity": K, "absorb_at_maximum": True}
        for limit, expected in ((0.1, True), (0.0, False)):
            policy = ControlPolicy(quality_debt_limit=limit, **values)  # type: ignore[arg-type]
            controller = Controller(policy, table(), 20)
            controller.handle(PoolObserved(ready=20), 0.0)
            assert controller.absorbs is expected


DEBTS = st.tuples(st.floats(0, 1), st.floats(0, 1e6), st.one_of(st.none(), st.integers(0, 10**6)))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.floats(0.1, 15), st.integers(0, 120), st.integers(1, 20), DEBTS), min_size=1, max_size=60
    ),
    st.floats(0.1, 1),
    st.booleans(),
)
def test_a_limit_of_zero_changes_no_decision(
    history: list[tuple[float, int, int, tuple[float, float, int | None]]], rho: float, predictive: bool
) -> None:
    policy = ControlPolicy(least=1, most=20, capacity=K, absorb_at_maximum=True, predictive=predictive)
    with_signal, without = (Controller(policy, table(rho), 3) for _ in range(2))
    now = 0.0
    for pause_s, required, workers, (debt, deficit, floor) in history:
        now += pause_s
        plain = feedback(required, workers, now).model_copy(update={"floor_capacity": None})
        signal = plain.model_copy(update={"quality_debt": debt, "deficit": deficit, "floor_capacity": floor})
        for controller, one in ((with_signal, signal), (without, plain)):
            controller.handle(PoolObserved(ready=workers), now)
            controller.handle(FeedbackReceived(one), now)
            controller.handle(ControlTick(), now)
        assert with_signal.absorbs is False
    assert list(with_signal.decisions) == list(without.decisions)


def test_a_limit_outside_0_to_1_is_refused() -> None:
    for limit in (-0.1, 1.5):
        with pytest.raises(ValueError, match="quality_debt_limit"):
            ControlPolicy(quality_debt_limit=limit)
