"""The controller under any input: no exception, and a size within its limits.

A forecast of a billionth of a session once ended the autoscaler with a division by zero.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.budget import budget, fullest
from turboserve.autoscaler.control.controller import Controller
from turboserve.autoscaler.control.events import (
    ControlTick,
    DryRunSet,
    Event,
    FeedbackReceived,
    PoolObserved,
    SessionChange,
    SessionChanged,
    SizeOverridden,
)
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.pool import LoadFeedback

MOST = 64
COUNTS = st.one_of(st.integers(0, 300), st.integers(0, 10**12), st.just(10**400))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def feedbacks() -> st.SearchStrategy[LoadFeedback]:
    return st.builds(
        LoadFeedback.model_construct,
        st.none(),
        model=st.just("m"),
        rho_max=st.one_of(st.floats(0, 2), NUMBERS),
        required=COUNTS,
        waiting=COUNTS,
        capacity=COUNTS,
        workers=COUNTS,
        quality_debt=st.one_of(st.floats(0, 1), NUMBERS),
        deficit=st.one_of(st.floats(0, 100), NUMBERS),
        floor_capacity=st.one_of(st.none(), COUNTS),
        decisions=st.just(0),
        at=st.one_of(st.floats(0, 1e3), NUMBERS),
    )


def sane_feedbacks() -> st.SearchStrategy[LoadFeedback]:
    """Generate plausible feedback: workers and capacity together, no more sessions waiting than required."""

    def build(
        workers: int, members: int, required: int, waiting: int, rho: float, at: float,
        debt: float, deficit: float, floor: int | None,
    ) -> LoadFeedback:  # fmt: skip
        return LoadFeedback(
            model="m",
            rho_max=rho,
            required=required,
            waiting=min(waiting, required),
            capacity=workers * members,
            workers=workers,
            quality_debt=debt,
            deficit=deficit,
            floor_capacity=floor,
            at=at,
        )

    counts = st.integers(0, 10**9)
    at = st.floats(0, 1e3)
    return st.builds(
        build, st.integers(0, 10**4), st.integers(1, 10**4), counts, counts, st.floats(0, 1e6), at,
        st.floats(0, 1), st.one_of(st.just(0.0), st.floats(0, 1e9)), st.one_of(st.none(), counts),
    )  # fmt: skip


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(FeedbackReceived, sane_feedbacks()),
    st.builds(FeedbackReceived, feedbacks()),
    st.builds(SessionChanged, st.sampled_from(SessionChange), st.integers(0, 10**6)),
    st.builds(PoolObserved, ready=st.integers(0, MOST), suspended=st.integers(0, 100)),
    st.builds(SizeOverridden, st.one_of(st.none(), st.integers(0, MOST)), st.just("operator")),
    st.builds(DryRunSet, st.booleans()),
    st.just(ControlTick()),
)
ROWS = st.builds(
    LevelParameters,
    level=st.just(1),
    volatility_from=st.just(0.0),
    latency_weight=st.one_of(st.just(0.2), st.floats(0, 1_000)),
    target_utilization=st.floats(0.01, 1),
    predictive=st.booleans(),
)
POLICIES = st.builds(
    ControlPolicy,
    least=st.integers(0, 4),
    most=st.integers(4, MOST),
    capacity=st.integers(1, 8),
    hysteresis=st.floats(0, 0.99),
    scale_to_zero=st.booleans(),
    predictive=st.sampled_from([None, True, False]),
    quantile=st.floats(0.01, 0.99),
    quality_debt_limit=st.one_of(st.just(0.0), st.floats(5e-324, 1)),
    absorb_at_maximum=st.booleans(),
    horizon_s=st.floats(0.1, 60),
    learns=st.booleans(),
)


@settings(deadline=None, max_examples=300)
@given(POLICIES, ROWS, st.lists(st.tuples(st.floats(0, 30), EVENTS), max_size=60))
def test_no_input_ends_the_controller_and_its_target_keeps_the_limits(
    policy: ControlPolicy, row: LevelParameters, history: list[tuple[float, Event]]
) -> None:
    table = ProfileTable(levels=(row,), provenance=Provenance(source="a test"))
    controller = Controller(policy, table, target=policy.least)
    now, largest = 0.0, policy.most
    for pause_s, event in history:
        now += pause_s
        if isinstance(event, SizeOverridden):
            # An order may exceed the limits; its end changes nothing until the next decision.
            largest = max(largest, event.size or 0)
        controller.handle(event, now)
        assert 0 <= controller.target <= largest
        assert policy.quality_debt_limit > 0 or not controller.absorbs
        assert all(math.isfinite(number) for number in controller.numbers().values())


@settings(deadline=None)
@given(
    st.one_of(st.floats(0, 1e-6), st.floats(0, 1e9)),
    st.integers(1, 10**6),
    ROWS,
    st.one_of(st.none(), st.just(MOST)),
)
@example(2e-9, 5, LevelParameters(level=1, volatility_from=0, latency_weight=0, target_utilization=0.8), None)
def test_a_demand_above_zero_needs_a_worker_however_small_it_is(
    required: float, capacity: int, row: LevelParameters, most: int | None
) -> None:
    if most is None:
        row = row.model_copy(update={"latency_weight": 0.0})
    size = budget(required, capacity, row, most=most)
    assert size >= (1 if required > 1e-9 else 0)
    if size:
        assert fullest(required, size) >= 1


@pytest.mark.parametrize("required", [0.0, -1.0, 1e-10])
def test_no_demand_needs_no_worker(required: float) -> None:
    row = LevelParameters(level=1, volatility_from=0, latency_weight=0.2, target_utilization=0.8)
    assert budget(required, 5, row) == 0
