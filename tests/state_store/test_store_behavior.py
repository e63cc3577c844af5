"""Behavior of sessions: estimates, classes, and the departures that admission expects."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.state_store.core.behavior import STARTS_S, LifeTable, priors_of, shrunk
from turboserve.state_store.core.behavior_classes import (
    HYSTERESIS,
    LEAST_DEPARTURES,
    MOST_CLASSES,
    k_means,
    learn,
    nearest,
    reclassified,
)
from turboserve.state_store.core.behavior_learner import LEAST_COMPARED, BehaviorLearner, ForecastErrors
from turboserve.state_store.core.departures import (
    STEP_S,
    ExpectedDepartures,
    SteadyDepartures,
    expected,
    steady_departures,
)
from turboserve.state_store.core.forecast import WINDOW_S as COUNTED_S
from turboserve.state_store.core.session_spans import ENDED_LIMIT, SessionSpan, SessionTimes, spans_of

AMOUNTS = st.floats(0, 1e4)
POINTS = st.lists(st.tuples(*[st.integers(-40, 40).map(lambda tenth: tenth / 10)] * 3), max_size=40)
RATES = st.lists(st.floats(1e-5, 1.0), min_size=len(STARTS_S), max_size=len(STARTS_S))
SPANS = st.lists(
    st.builds(
        SessionSpan,
        session=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b"]),
        age_s=AMOUNTS,
        changes=st.integers(0, 500),
        chunks=st.integers(0, 20_000),
        left_ago_s=st.one_of(st.none(), st.floats(0, 3_600)),
        holds_slot=st.booleans(),
    ),
    max_size=30,
)


@given(AMOUNTS, AMOUNTS, st.floats(0, 10), st.floats(1, 1e4))
def test_an_estimate_lies_between_its_prior_and_what_was_seen(
    events: float, seconds: float, prior: float, pseudo_s: float
) -> None:
    found = shrunk(events, seconds, prior, pseudo_s)
    if seconds:
        low, high = sorted((prior, events / seconds))
        assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)
        # Twice as much of the same is further from the prior.
        assert abs(shrunk(2 * events, 2 * seconds, prior, pseudo_s) - prior) >= abs(found - prior) * (
            1 - 1e-9
        )
    else:
        assert found == pytest.approx(prior + events / pseudo_s)


@given(SPANS)
def test_every_estimate_is_a_number_within_its_limits(spans: list[SessionSpan]) -> None:
    model = learn(spans)
    assert 1 <= len(model.classes) <= MOST_CLASSES
    assert model.live.keys() == {span.session for span in spans if span.left_ago_s is None}
    for span in spans:
        own = model.behavior(span)
        assert 0 <= own.change_rate < math.inf
        assert 0 <= own.active_share <= 1
        assert 0 < own.remaining_s < math.inf
        assert 0 <= own.behavior_class < len(model.classes)
    departures = expected(model, spans)
    if departures is not None:
        assert list(departures.curve) == sorted(departures.curve)


@given(RATES, st.floats(0, 5_000), st.floats(0, 5_000), st.floats(0, 5_000))
def test_a_life_table_is_a_distribution(rates: list[float], age_s: float, first: float, more: float) -> None:
    table = LifeTable(tuple(rates))
    one, both = table.leaves(age_s, first), table.leaves(age_s, first + more)
    assert 0 <= one <= both <= 1
    # Who has stayed for the first time has its age then.
    assert both == pytest.approx(one + (1 - one) * table.leaves(age_s + first, more), abs=1e-6)


@given(st.floats(1e-4, 1.0), st.floats(0, 1e4))
def test_with_one_rate_the_rest_of_a_stay_does_not_depend_on_age(rate: float, age_s: float) -> None:
    table = LifeTable((rate,) * len(STARTS_S))
    assert table.remaining_s(age_s) == pytest.approx(1 / rate, rel=1e-6)
    assert table.leaves(age_s, 60.0) == pytest.approx(1 - math.exp(-60 * rate), rel=1e-6, abs=1e-9)


@given(POINTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_centers_do_not_depend_on_the_order_of_points(
    points: list[tuple[float, float, float]], count: int, order: random.Random
) -> None:
    centers = k_means(points, count)
    assert len(centers) <= min(count, len(set(points)))
    assert bool(centers) == bool(points)
    shuffled = list(points)
    order.shuffle(shuffled)
    assert k_means(shuffled, count) == centers


def test_clear_clusters_are_found() -> None:
    points = [(x + 0.01 * each, 0.0, 0.0) for x in (0.0, 5.0, 9.0) for each in range(10)]
    centers = sorted(k_means(points, 3))
    assert [round(x, 3) for x, _, _ in centers] == [0.045, 5.045, 9.045]
    assert {nearest(point, centers) for point in points[:10]} == {0}


def population(seed: int, *, alike: bool = False, count: int = 300) -> list[SessionSpan]:
    """Sessions of two tenants over the last hour. `alike`: both behave as the first one."""
    source, found = random.Random(seed), []
    for number in range(count):
        tenant = source.choice(("short", "long"))
        is_short = tenant == "short" or alike
        stay_s, every_s = (40.0, 8.0) if is_short else (900.0, 200.0)
        created_ago_s, age_s = source.uniform(0, 3_600), source.expovariate(1 / stay_s)
        left = age_s < created_ago_s
        age_s, changes = min(age_s, created_ago_s), 0
        changed_s = source.expovariate(1 / every_s)
        while changed_s < age_s:
            changed_s += source.expovariate(1 / every_s)
            changes += 1
        found.append(
            SessionSpan(
                f"s{number:04d}", tenant, age_s, changes, int(age_s),
                created_ago_s - age_s if left else None, not left,
            )
        )  # fmt: skip
    return found


def test_sessions_that_differ_get_classes_and_those_that_are_alike_do_not() -> None:
    several = learn(population(1))
    assert len(several.classes) > 1
    stays = [one.stays.remaining_s(0.0) for one in several.classes]
    assert stays == sorted(stays)
    assert stays[0] < 130 < 400 < stays[-1]
    # A test of significance is wrong now and then.
    assert sum(len(learn(population(seed, alike=True)).classes) > 1 for seed in range(10)) <= 1


def test_a_new_session_has_its_tenants_behavior_and_then_its_own() -> None:
    model = learn(population(1))
    tenants = model.priors.tenants
    assert tenants["short"].change_rate > 5 * tenants["long"].change_rate
    young = SessionSpan("new", "short", 1.0, 0, 1, holds_slot=True)
    assert model.classify(young) == 0
    # It has kept one prompt for minutes.
    old = replace(young, age_s=400.0, chunks=400)
    assert model.behavior(old).change_rate < 0.2 * model.behavior(young).change_rate
    assert model.priors.features(old)[0] < model.priors.features(young)[0] - 2


@pytest.mark.parametrize("tenant", ["short", "long"])
def test_expected_departures_are_those_of_the_sessions_that_hold_slots(tenant: str) -> None:
    """A pool full of one kind loses sessions at that kind's rate, whatever left in the last minutes."""
    history = [replace(span, holds_slot=False) for span in population(2)]
    every_s, stay_s = (8.0, 40.0) if tenant == "short" else (200.0, 900.0)
    there = [SessionSpan(f"t{n}", tenant, 20.0, int(20 / every_s), 20, None, True) for n in range(50)]
    spans = history + there
    departures = expected(learn(spans), spans)
    assert departures is not None
    # Half of them, before others have taken their places for long.
    truth_s = stay_s * math.log(2)
    assert departures.by(truth_s / 2) < 25 < departures.by(truth_s * 1.5)


@given(POINTS.filter(bool), st.data())
def test_a_session_changes_its_class_only_if_another_one_is_clearly_nearer(
    centers: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    point = data.draw(st.tuples(*[st.floats(-5, 5)] * 3))
    former = data.draw(st.integers(0, len(centers) - 1))
    found = reclassified(point, centers, former)
    squares = [math.dist(point, center) ** 2 for center in centers]
    assert reclassified(point, centers, None) == nearest(point, centers)
    assert (found == former) is (
        former == nearest(point, centers) or min(squares) >= HYSTERESIS * squares[former]
    )
    # It has settled: no later look with the same features changes it again.
    assert reclassified(point, centers, found) == found


def test_live_sessions_keep_their_classes_by_the_model_before() -> None:
    spans = population(1)
    model = learn(spans)
    assert learn(spans, model.live).live == model.live
    # Of all live sessions, those between two centers stay in a class that is not the nearest one.
    wrong = {name: 1 - min(place, 1) for name, place in model.live.items()}
    held = [name for name, place in learn(spans, wrong).live.items() if place != model.live[name]]
    assert len(held) < len(model.live) / 2


@settings(max_examples=20)
@given(st.integers(0, LEAST_DEPARTURES - 1), st.integers(0, 100))
def test_with_little_data_or_one_class_nothing_is_expected_of_behavior(few: int, seed: int) -> None:
    spans = population(seed, count=150)
    left = [span for span in spans if span.left_ago_s is not None]
    there = [span for span in spans if span.left_ago_s is None]
    for some in (left[:few] + there, []):
        model = learn(some)
        assert len(model.classes) == 1
        assert expected(model, some) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e4)), max_size=20), st.floats(0, 1e4))
def test_steady_departures_are_those_of_the_last_minutes(left_at: Sequence[float | None], now: float) -> None:
    rows = [
        SessionTimes(f"s{number}", "a", 0.0, left, 0, 0, left is None, left is not None)
        for number, left in enumerate(left_at)
    ]
    count = sum(left is not None and left > now - COUNTED_S for left in left_at)
    assert steady_departures(rows, now).by(COUNTED_S) == pytest.approx(count)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.one_of(st.none(), st.floats(0, 1e4))), max_size=20),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_only_the_part_of_a_stay_in_the_window_counts(
    stays: Sequence[tuple[float, float | None]], since: float, now: float
) -> None:
    rows = [
        SessionTimes(f"s{number}", "a", created, left, 0, 0, left is None, left is not None)
        for number, (created, left) in enumerate(stays)
    ]
    spans, begins = spans_of(rows, since, now)
    assert begins == since
    assert {span.session for span in spans} >= {row.session for row in rows if row.left_at is None}
    for span in spans:
        assert 0 <= span.since_s <= span.age_s
        assert span.left_ago_s is None or 0 <= span.left_ago_s <= max(now - since, 0)
    # The seconds of all sessions together are those of the window.
    seconds = sum(span.age_s - span.since_s for span in spans)
    assert seconds <= len(rows) * max(now - since, 0.0) + 1e-6


def test_the_window_begins_when_the_first_of_the_sessions_that_are_read_ended() -> None:
    ended = [SessionTimes(f"e{n}", "a", 0.0, 100.0 + n, 0, 0, False, True) for n in range(ENDED_LIMIT)]
    lives = SessionTimes("l", "a", 50.0, None, 0, 0, True, False)
    found, begins = spans_of([*ended, lives], 10.0, 5_000.0)
    spans = {span.session: span for span in found}
    assert begins == 100.0
    assert "e0" not in spans
    assert spans["l"].since_s == 50.0
    assert priors_of(list(spans.values())).everyone.departure_rate > 0


def rows_at(now: float, began: float) -> tuple[SessionTimes, ...]:
    """What the rows of `population` say at `now`. Its hour ended at `began`."""
    return tuple(
        SessionTimes(
            span.session, span.tenant, began - span.created_ago_s,
            None if span.left_ago_s is None else began - span.left_ago_s,
            span.changes, span.chunks, span.holds_slot, span.left_ago_s is not None,
        )
        for span in population(1)
        if began - span.created_ago_s <= now
    )  # fmt: skip


def test_forecasts_are_compared_once_their_time_is_over() -> None:
    errors = ForecastErrors()
    for minute in range(LEAST_COMPARED):
        errors.add(60.0 * minute, 5.0, 4.0)
        assert errors.part is None
    # Three sessions leave in each minute.
    left_at = [20.0 * third + 1 for third in range(3 * LEAST_COMPARED)]
    errors.compare(left_at, 0.0, 60.0 * LEAST_COMPARED - 1)
    assert errors.part is None
    errors.compare(left_at, 0.0, 60.0 * LEAST_COMPARED)
    assert errors.part == pytest.approx(1 / 2)


@given(st.lists(st.floats(0, 5), min_size=30, max_size=30), st.floats(0, 5), st.integers(0, 30))
def test_the_mean_of_two_forecasts_lies_between_them(rises: list[float], rate: float, step: int) -> None:
    curve = (0.0, *(math.fsum(rises[:end]) for end in range(1, len(rises) + 1)))
    one, other = ExpectedDepartures(curve), SteadyDepartures(rate)
    at_s = step * STEP_S
    low, high = sorted((one.by(at_s), other.by(at_s)))
    assert low - 1e-6 <= one.mean_with(other).by(at_s) <= high + 1e-6


def test_forecasts_of_which_not_all_departures_are_known_are_not_compared() -> None:
    errors = ForecastErrors()
    for minute in range(LEAST_COMPARED):
        errors.add(60.0 * minute, 5.0, 0.0)
    # The first one is left out, so one too few is left.
    errors.compare([], 1.0, 1e4)
    assert errors.part is None


def renewed(learner: BehaviorLearner, times: int, began: float) -> None:
    """Renew a learner once a minute, while nobody leaves any more and the last minutes say otherwise."""
    for minute in range(times):
        now = began + 60.0 * minute
        learner.renew(rows_at(now, began), now - 3_600.0, SteadyDepartures(1e3), now)


def test_a_restarted_store_learns_the_same_from_rows() -> None:
    first, restarted = BehaviorLearner(), BehaviorLearner()
    renewed(first, LEAST_COMPARED + 2, 10_000.0)
    now = 10_000.0 + 60.0 * (LEAST_COMPARED + 1)
    restarted.renew(rows_at(now, 10_000.0), now - 3_600.0, SteadyDepartures(1e3), now)
    assert first.model is not None
    assert restarted.model is not None
    assert restarted.model.priors == first.model.priors
    assert restarted.model.classes == first.model.classes
    assert first.errors.part is not None
    # It has made no forecasts of its own that could be compared.
    assert restarted.errors.part is None
