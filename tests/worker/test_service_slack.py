"""Slack between the engine and the services: when it is measured, what reports and the table make of it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.table_bench import Bench, row
from turboserve.contracts.fidelity import LARGEST_SLACK_S, QualityLimits, Tier
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import HeldSession
from turboserve.worker import metrics
from turboserve.worker.engine.playout import Playout
from turboserve.worker.service import commands, events
from turboserve.worker.service.quality import (
    MEASURE_S,
    SlackBoard,
    SlackMeasured,
    SlackMonitor,
    count,
    session_slack,
)

RELAXED, URGENT = Playout(5.0, 0.1, 0.2), Playout(0.1, 0.1, 0.2)


class FakeEngine:
    """Counts forecasts, which cost time; tiers are cheap."""

    def __init__(self) -> None:
        self.found: dict[str, Playout] = {}
        self.forecasts = 0

    def playouts(self, _now: float) -> dict[str, Playout]:
        self.forecasts += 1
        return dict(self.found)

    def expected_late(self, _now: float) -> int:
        return 3

    def tiers(self, _now: float) -> dict[str, str]:
        return {name: one.tier for name, one in self.found.items()}


def test_a_change_of_tier_is_measured_at_once_and_not_more_often_than_the_interval() -> None:
    engine: Any = FakeEngine()
    monitor = SlackMonitor(engine, 0.1)
    engine.found["a"] = RELAXED
    first = monitor.measure(0.0, {"a": 1})
    assert first is not None
    assert first.tiers_changed
    assert first.sessions == {"a": (1, RELAXED)}
    assert first.late == 3
    assert monitor.measure(0.2, {"a": 1}) is None
    engine.found["a"] = URGENT
    changed = monitor.measure(0.31, {"a": 1})
    assert changed is not None
    assert changed.tiers_changed
    engine.found["a"] = RELAXED
    assert monitor.measure(0.4, {"a": 1}) is None
    back = monitor.measure(0.42, {"a": 1})
    assert back is not None
    assert back.tiers_changed
    assert engine.forecasts == 3


def test_without_a_change_a_measurement_comes_after_the_longer_interval() -> None:
    engine: Any = FakeEngine()
    engine.found["a"] = RELAXED
    monitor = SlackMonitor(engine, 0.1)
    assert monitor.measure(0.0, {"a": 1}) is not None
    found = [monitor.measure(step / 100, {"a": 1}) for step in range(1, 201)]
    measured = [each for each in found if each is not None]
    assert 2 / MEASURE_S - 1 <= len(measured) <= 2 / MEASURE_S
    assert not any(each.tiers_changed for each in measured)


def test_a_worker_without_sessions_measures_nothing() -> None:
    engine: Any = FakeEngine()
    assert SlackMonitor(engine, 0.1).measure(0.0, {}) is None
    assert not engine.forecasts


def held(session: str = "a", **rest: Any) -> HeldSession:
    return HeldSession(session=session, epoch=1, next_chunk=0, resident=True, **rest)


def test_a_report_has_the_slack_as_of_its_own_time_and_of_the_same_run() -> None:
    board = SlackBoard()
    board.measured(SlackMeasured(10.0, {"a": (1, Playout(2.0, 0.1, 0.2)), "b": (1, RELAXED)}, True))
    one, other_run, suspended = board.onto(
        [held("a"), held("b"), held("a").model_copy(update={"resident": False})], {"a": 1, "b": 2}, 10.5
    )
    assert one.slack is not None
    assert (one.slack.slack_s, one.slack.credit_s) == pytest.approx((1.5, 1.2))
    assert one.slack.tier is Tier.RELAXED
    assert other_run.slack is None
    assert suspended.slack is None


def test_each_playing_session_needs_a_credit_of_its_own() -> None:
    board, idle = SlackBoard(), Playout(0.0, 0.1, 0.2, playing=False)
    board.measured(SlackMeasured(10.0, {"a": (1, Playout(1.0, 0.1, 0.2)), "b": (1, idle)}, True))
    # Half a second later, `a` has 0.2 s.
    assert board.all_have({"a": 0.19}.__getitem__, 10.5)
    assert not board.all_have({"a": 0.21}.__getitem__, 10.5)


def test_no_measurement_is_beyond_the_contract() -> None:
    found = session_slack(Playout(-math.inf, 0.0, 0.1, math.inf))
    assert (found.slack_s, found.lateness_s) == (-LARGEST_SLACK_S, LARGEST_SLACK_S)


# The table


def test_a_late_chunk_is_counted_and_no_histogram_gets_a_value_below_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: the SDK drops such a value with a warning, so that late chunks were in no metric."""
    recorded: dict[str, list[float]] = {}
    for name in ("slack", "credit", "lateness"):
        recorder = SimpleNamespace(record=recorded.setdefault(name, []).append)
        monkeypatch.setattr(metrics, name, recorder)
    count(Playout(-0.4, 0.0, 0.5))
    count(Playout(0.3, 0.0, 0.5))
    count(Playout(2.0, 0.0, 0.5))
    assert recorded == {"slack": [0.0, 0.3, 2.0], "credit": [0.0, 0.0, 1.5], "lateness": [0.4]}


def test_the_age_of_a_request_travels_from_the_row_to_the_engine() -> None:
    bench = Bench()
    bench.handle(events.Assigned(row(requested_at=5.0, waiting_s=1.5)), now=100.0)
    query = bench.last(commands.ReadLogEnd).query
    bench.handle(events.LogEndRead("s1", query, 0, False), now=100.25)
    assert bench.last(commands.Admit).waiting_s == pytest.approx(1.75)


def test_a_request_is_answered_by_a_chunk() -> None:
    bench = Bench()
    record = row(requested_at=5.0, waiting_s=1.5)
    admit = bench.run_from(record)
    bench.package("s1", admit.run, 0)
    publish = bench.last(commands.PublishChunk)
    bench.outcome(publish, events.PublishOutcome.ACKED)
    suspended = row(version=3, phase=Phase.SUSPENDED, requested_at=5.0, waiting_s=60.0)
    bench.handle(events.Assigned(suspended))
    bench.handle(events.MovedToHost("s1", admit.run, 1))
    # The row runs again without a new request.
    bench.handle(events.Assigned(row(version=4, requested_at=5.0, waiting_s=61.0)))
    assert bench.last(commands.Resume).waiting_s is None
    bench.handle(events.Assigned(suspended.model_copy(update={"version": 5})))
    bench.handle(events.MovedToHost("s1", admit.run, 1))
    bench.handle(events.Assigned(row(version=6, requested_at=70.0, waiting_s=0.5)))
    assert bench.last(commands.Resume).waiting_s == pytest.approx(0.5)


def test_limits_reach_the_engine_with_the_session_and_at_every_change() -> None:
    bench = Bench()
    admit = bench.run_from(row(quality=QualityLimits(pin=True), max_lead_s=0.75))
    assert admit.limits == commands.Limits(QualityLimits(pin=True), 0.75)
    bench.renew(row(quality=QualityLimits(pin=True), max_lead_s=0.75))
    bench.none(commands.SetLimits)
    bench.handle(events.Assigned(row(version=3, quality=None, max_lead_s=2.0)))
    assert bench.last(commands.SetLimits).limits == commands.Limits(None, 2.0)
    bench.renew(row(version=3, quality=None, max_lead_s=2.0))
    bench.none(commands.SetLimits)


def test_a_prompt_that_drops_the_buffer_is_one_prompt_and_one_drop() -> None:
    bench = Bench()
    bench.run_from(row())
    dropping = row(version=3, control_seq=1, drop_buffer_seq=1, requested_at=9.0, waiting_s=0.5)
    bench.handle(events.Assigned(dropping))
    assert [type(each) for each in bench.said] == [commands.SetConditions, commands.DropBuffer]
    assert bench.last(commands.DropBuffer).waiting_s == pytest.approx(0.5)
    bench.renew(dropping)
    bench.none(commands.DropBuffer)
    # A later prompt that drops nothing.
    bench.handle(events.Assigned(row(version=4, control_seq=2, drop_buffer_seq=1)))
    bench.none(commands.DropBuffer)


def test_a_worker_that_takes_a_session_over_drops_what_no_chunk_shows_yet() -> None:
    shown, waiting = Bench(), Bench()
    record = row(epoch=2, control_seq=3, drop_buffer_seq=3, next_chunk=4)
    for bench, last_control in ((shown, 3), (waiting, 2)):
        bench.handle(events.Assigned(record))
        query = bench.last(commands.ReadLogEnd).query
        bench.handle(events.LogEndRead("s1", query, 4, False, 1, control_seq=last_control))
        bench.handle(events.LatentsFetched("s1", bench.last(commands.FetchLatents).query))
    assert not shown.last(commands.Admit).drops_buffer
    assert waiting.last(commands.Admit).drops_buffer


@pytest.mark.parametrize("kept", [0, 2], ids=["no chunk", "older chunks"])
@pytest.mark.parametrize(("applied", "drops"), [(3, False), (2, True)])
def test_a_prompt_that_a_lost_chunk_has_shown_drops_nothing_again(
    kept: int, applied: int, drops: bool
) -> None:
    """Incident: after the log had lost the chunk, viewers were to discard what they had got since."""
    bench = Bench()
    bench.handle(
        events.Assigned(
            row(epoch=2, control_seq=3, drop_buffer_seq=3, next_chunk=4, applied_control_seq=applied)
        )
    )
    query = bench.last(commands.ReadLogEnd).query
    bench.handle(events.LogEndRead("s1", query, kept, False, 1, control_seq=kept))
    bench.handle(events.LatentsFetched("s1", bench.last(commands.FetchLatents).query))
    assert bench.last(commands.Admit).drops_buffer is drops


@pytest.mark.parametrize(("control_seq", "drops"), [(0, False), (1, True)])
def test_the_first_chunk_under_the_prompt_is_the_one_to_skip_to(control_seq: int, drops: bool) -> None:
    bench = Bench()
    admit = bench.run_from(row())
    bench.handle(events.Assigned(row(version=3, control_seq=1, drop_buffer_seq=1)))
    bench.handle(events.ChunkPackaged("s1", admit.run, 0, control_seq))
    publish = bench.last(commands.PublishChunk)
    assert (publish.last_control < publish.drop_buffer_seq <= control_seq) is drops
    bench.handle(
        events.Published(
            "s1", publish.run, 0, publish.ownership, events.PublishOutcome.ACKED, control_seq=control_seq
        )
    )
    bench.handle(events.ChunkPackaged("s1", admit.run, 1, 1))
    following = bench.last(commands.PublishChunk)
    assert (following.last_control < following.drop_buffer_seq <= 1) is not drops
