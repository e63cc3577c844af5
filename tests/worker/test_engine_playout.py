"""Playout slack, credit, tiers and forecasts: pure rules over many cases, and against what an engine does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.worker.engine.gather import Candidate, LatencyProfile, LeastCreditFirst
from turboserve.worker.engine.interface import ChunkReady, Control, SessionSpec
from turboserve.worker.engine.playout import FORECAST_TURNS, Playout, Upcoming, forecast, tier_of

MakeDriver = Callable[..., Any]
PROFILE = LatencyProfile({1: 0.02, 2: 0.03, 4: 0.05, 8: 0.08})
STEPS = 5
CHUNK_S = 0.02 * STEPS


def upcoming(name: str, done: int = 0, due_s: float = 0.0, slack_s: float = 1.0) -> Upcoming:
    return Upcoming(name, [(3, done, STEPS)], due_s, slack_s, CHUNK_S, 0.0, True)


def expected(queue: list[Upcoming], limit: int = 8) -> dict[str, Any]:
    policy = LeastCreditFirst()
    return forecast(
        queue, lambda ready: policy.gather(ready, PROFILE, limit), lambda _frames, rows: PROFILE(rows)
    )


queues = st.lists(
    st.tuples(st.integers(0, STEPS - 1), st.floats(-1, 2), st.floats(-2, 5)), min_size=1, max_size=10
).map(lambda rows: [upcoming(f"s{i}", *row) for i, row in enumerate(rows)])


@settings(max_examples=150, deadline=None)
@given(queues, st.integers(1, 8))
def test_no_forecast_is_faster_than_the_session_alone_or_slower_than_all_one_by_one(
    queue: list[Upcoming], limit: int
) -> None:
    found = expected(queue, limit)
    assert found.keys() == {one.session for one in queue}
    one_by_one = max(0.0, *(one.due_s for one in queue)) + sum(STEPS * PROFILE(1) for _ in queue)
    for one in queue:
        [(_, done, total)] = one.parts
        to_clean = total - 1 - done
        least = max(0.0, one.due_s) + to_clean * PROFILE(1) if to_clean else 0.0
        assert least - 1e-9 <= found[one.session].clean_s <= one_by_one + 1e-9
        assert PROFILE(1) <= found[one.session].forward_s <= PROFILE(8)


@given(queues)
@settings(max_examples=50, deadline=None)
def test_without_a_queue_the_time_is_that_of_a_chunk_alone(queue: list[Upcoming]) -> None:
    alone = expected(queue[:1])[queue[0].session]
    [(_, done, _)] = queue[0].parts
    due = max(0.0, queue[0].due_s) if done < STEPS - 1 else 0.0
    assert alone.clean_s == pytest.approx(due + (STEPS - 1 - done) * PROFILE(1))
    assert alone.forward_s == pytest.approx(PROFILE(1))


def test_the_cost_of_a_forecast_is_bounded() -> None:
    asked: list[Sequence[Candidate]] = []

    def choose(ready: Sequence[Candidate]) -> Sequence[Candidate]:
        asked.append(ready)
        return list(ready)[:1]

    found = forecast([upcoming(f"s{i}") for i in range(200)], choose, lambda _frames, _rows: 0.02)
    assert len(asked) == FORECAST_TURNS
    unfinished = [one.clean_s for one in found.values() if one.clean_s > FORECAST_TURNS * 0.02]
    assert unfinished
    # What is left is spread over the last batch's rate: as long as all forwards take, but the clean pass of
    # the session that was simulated last.
    assert max(unfinished) == pytest.approx((200 * STEPS - 1) * 0.02)


@given(st.floats(-100, 100), st.floats(0.001, 10))
def test_tiers_are_ordered_by_credit(credit_s: float, next_s: float) -> None:
    order = ["urgent", "normal", "relaxed"]
    assert order.index(tier_of(credit_s, next_s)) <= order.index(tier_of(credit_s + next_s, next_s))
    assert tier_of(2 * next_s, next_s) == "normal"
    assert tier_of(1.99 * next_s, next_s) == "urgent"
    assert tier_of(4.01 * next_s, next_s) == "relaxed"


def test_a_playing_sessions_slack_shrinks_with_time_and_a_paused_ones_does_not() -> None:
    assert Playout(1.0, 0.1, 0.2).after(0.5).credit_s == pytest.approx(0.2)
    assert Playout(1.0, 0.1, 0.2, playing=False).after(0.5).credit_s == pytest.approx(0.7)


def test_the_forecast_asks_the_policy_about_the_same_candidates(make_driver: MakeDriver) -> None:
    """The forecast's candidates at its start are the gather policy's own."""
    driver = timed(make_driver)
    for i in range(3):
        driver.engine.admit(SessionSpec(f"s{i}", "a red circle", waiting_s=i * 0.1), driver.now)
    driver.run(until=lambda _: any(s.task and s.task.work.done for s in driver.engine.sessions.values()))
    seen: list[list[Candidate]] = []
    engine = driver.engine
    choose = engine.forward.choose

    def spy(candidates: Any, *rest: Any) -> Any:
        seen.append(list(candidates))
        return choose(candidates, *rest)

    engine.forward.choose = spy
    engine.playouts(driver.now)
    forecasted = {each.session: each for each in seen[0]}
    waiting = engine.forward.waiting(engine.sessions.values())
    for session in waiting:
        real = engine.pacing.candidate(session, driver.now)
        ours = forecasted[session.name]
        assert (ours.frames, ours.step, ours.steps_left) == (real.frames, real.step, real.steps_left)
        assert (ours.slack_s, ours.waiting_s) == pytest.approx((real.slack_s, real.waiting_s))
        assert ours.credit_s == pytest.approx(real.credit_s)


def test_the_rest_of_a_chunk_counts_its_own_forwards_after_a_recache() -> None:
    """Incident: after a recache, the forecast took the recache's time for each forward of the chunk."""
    seen: list[Candidate] = []

    def choose(ready: Sequence[Candidate]) -> Sequence[Candidate]:
        seen.append(ready[0])
        return ready

    switched = replace(upcoming("s"), parts=[(9, 0, 1), (3, 0, STEPS)])
    forecast([switched], choose, lambda frames, _rows: 0.5 if frames > 3 else 0.02)
    third = seen[2]
    assert (third.step, third.steps_left) == (1, STEPS - 1)
    assert third.slack_s == pytest.approx(1.0 - 0.5 - 0.02)
    assert third.credit_s == pytest.approx(third.slack_s - (STEPS - 1) * 0.02 - CHUNK_S)


def timed(make_driver: MakeDriver, **options: Any) -> Any:
    """A driver whose forwards take the time of `PROFILE`."""
    driver = make_driver(**options)
    engine = driver.engine
    for size, seconds in PROFILE.to_mapping().items():
        engine.forward.profile._set(size, seconds)
    real = engine.backend.forward

    def forward(works: list[Any]) -> Any:
        driver.now += engine.forward.profile(len(works))
        return real(works)

    engine.backend.forward = forward
    return driver


@pytest.mark.parametrize("sessions", [1, 2, 3, 5])
@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_the_forecast_is_what_the_engine_does(make_driver: MakeDriver, sessions: int, forwards: int) -> None:
    # A lead of less than a chunk: each session generates its first chunk only.
    driver = timed(make_driver, slabs=8, max_lead_s=0.5)
    engine = driver.engine
    for i in range(sessions):
        engine.admit(SessionSpec(f"s{i}", "a red circle", i, waiting_s=i * 0.05), driver.now)
    while sum(s.work is not None for s in engine.sessions.values()) < sessions:
        engine.step(driver.now)
    for _ in range(forwards):
        engine.step(driver.now)
    began = driver.now
    found = engine.playouts(began)
    pending = {name for name, s in engine.sessions.items() if not s.delivered and not s.undecoded}
    assert pending
    ready: dict[str, float] = {}
    while pending - ready.keys():
        for event in engine.step(driver.now):
            if isinstance(event, ChunkReady):
                ready[event.session] = driver.now
    for name in pending:
        slack_s = found[name].slack_s
        assert found[name].lateness_s == pytest.approx(max(0.0, ready[name] - began - slack_s), abs=0.005)
        # T as the gather rule batches, which is never less than a chunk's time alone.
        assert found[name].next_s >= engine.pacing.chunk_seconds - 1e-9


def test_the_first_chunks_deadline_counts_from_the_request(make_driver: MakeDriver) -> None:
    driver = timed(make_driver)
    driver.engine.admit(SessionSpec("new", "a red circle"), driver.now)
    driver.engine.admit(SessionSpec("late", "a red circle", waiting_s=3.0), driver.now)
    now, found = driver.now, driver.engine.playouts(driver.now)
    first_s = 4 * driver.engine.pacing.chunk_seconds
    assert found["new"].slack_s == pytest.approx(first_s)
    assert found["late"].slack_s == pytest.approx(first_s - 3.0)
    assert found["late"].tier == "urgent"
    # It counts on while the session waits, whatever the engine does.
    driver.now += 0.5
    assert driver.engine.playouts(driver.now)["new"].slack_s == pytest.approx(first_s - 0.5)
    assert driver.engine.playouts(now)["new"].playing


def test_a_resumed_sessions_deadline_counts_from_its_resumption(make_driver: MakeDriver) -> None:
    driver = timed(make_driver, max_lead_s=0.5)
    engine = driver.engine
    engine.admit(SessionSpec("a", "a red circle"), driver.now)
    driver.run()
    engine.playhead("a", 0.5625, now=driver.now, playing=False)
    driver.run()
    # The viewer has seen everything.
    engine.playhead("a", 1.3125, now=driver.now, playing=False)
    engine.suspend("a")
    driver.run()
    engine.resume("a", driver.now, waiting_s=0.25)
    engine.playhead("a", 1.3125, now=driver.now, playing=False)
    assert engine.playouts(driver.now)["a"].slack_s == pytest.approx(
        4 * engine.pacing.chunk_seconds - 0.25, abs=0.01
    )


def test_dropping_the_buffer_resets_the_slack_and_moves_the_lead(make_driver: MakeDriver) -> None:
    driver = timed(make_driver, max_lead_s=3.0)
    engine = driver.engine
    engine.admit(SessionSpec("a", "a red circle"), driver.now)
    driver.run()
    buffered = engine.sessions["a"].delivered
    assert buffered >= 4
    assert engine.playouts(driver.now)["a"].slack_s > 2.0
    assert not engine.has_work(driver.now)
    # Without the drop, a prompt changes nothing for the viewer's buffer.
    engine.control("a", Control(1, prompt="a blue square"))
    engine.control("a", Control(1, drops_buffer_since_s=driver.now - 0.1))
    slack_s = engine.playouts(driver.now)["a"].slack_s
    assert slack_s == pytest.approx(4 * engine.pacing.chunk_seconds - 0.1, abs=0.01)
    events = driver.run()
    made = [event for event in events if isinstance(event, ChunkReady)]
    # The next chunk is due at once, and a whole lead after it: the viewer skips to it.
    assert made[0].index == buffered
    assert made[0].control_seq == 1
    # The first chunk is shorter than the others.
    assert len(made) == buffered - 1
    # A report from before the skip does not move the lead back.
    engine.playhead("a", 0.2, now=driver.now)
    start_s = engine.config.media_start(buffered)
    assert engine.pacing.playhead(engine.sessions["a"], driver.now + 0.1) == pytest.approx(start_s)
    engine.playhead("a", start_s + 0.2, now=driver.now)
    assert engine.pacing.playhead(engine.sessions["a"], driver.now + 0.1) == pytest.approx(start_s + 0.3)


def test_a_lead_is_at_least_a_chunk(make_driver: MakeDriver) -> None:
    driver = timed(make_driver, max_lead_s=3.0)
    engine = driver.engine
    engine.admit(SessionSpec("a", "a red circle", max_lead_s=0.001), driver.now)
    assert engine.sessions["a"].max_lead_s == engine.config.chunk_media_s
    made = [event.index for event in driver.run() if isinstance(event, ChunkReady)]
    # Chunks start at 0, 0.5625 and 1.3125 s of video.
    assert made == [0, 1]
    engine.playhead("a", 0.6, now=driver.now, playing=False)
    assert [e.index for e in driver.run() if isinstance(e, ChunkReady)] == [2]
    engine.control("a", Control(0, max_lead_s=2.0))
    assert [e.index for e in driver.run() if isinstance(e, ChunkReady)] == [3]
