"""When a connection is overdue, and how many frames it may send: the rules alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.gateway.serving.guard import Deadlines, FrameBudget, Overdue, Progress, Stage

DEADLINES = Deadlines(head_s=10, body_s=20, write_s=30, idle_s=75, close_s=2)


def test_each_part_of_a_request_has_its_own_time() -> None:
    progress = Progress(0.0)
    assert progress.overdue(DEADLINES, 10.0) is None
    assert progress.overdue(DEADLINES, 10.1) is Overdue.HEAD
    assert progress.enter(Stage.BODY, 9.0)
    assert not progress.enter(Stage.BODY, 20.0)  # Nor does a repeat prolong it.
    assert progress.overdue(DEADLINES, 29.0) is None
    assert progress.overdue(DEADLINES, 29.1) is Overdue.BODY
    assert progress.enter(Stage.ANSWER, 29.0)
    assert progress.overdue(DEADLINES, 1e9) is None  # The application may take its time.
    assert progress.enter(Stage.HEAD, 1e9)
    assert progress.overdue(DEADLINES, 1e9 + 10.1) is Overdue.HEAD


def test_an_answered_connection_may_wait_longer_than_a_head_may_take() -> None:
    progress = Progress(0.0)
    progress.enter(Stage.ANSWER, 0.0)
    progress.enter(Stage.IDLE, 1.0)
    assert progress.overdue(DEADLINES, 76.0) is None
    assert progress.overdue(DEADLINES, 76.1) is Overdue.IDLE
    # The first byte of the next request begins the time for its head.
    assert progress.enter(Stage.HEAD, 70.0)
    assert progress.overdue(DEADLINES, 80.0) is None
    assert progress.overdue(DEADLINES, 80.1) is Overdue.HEAD


def test_who_takes_nothing_is_overdue_from_the_first_moment_on() -> None:
    progress = Progress(0.0)
    progress.enter(Stage.ANSWER, 0.0)
    progress.blocked(5.0)
    progress.blocked(30.0)
    assert progress.overdue(DEADLINES, 35.0) is None
    assert progress.overdue(DEADLINES, 35.1) is Overdue.UNREAD
    progress.drained()
    assert progress.overdue(DEADLINES, 1e9) is None


def test_a_closed_connection_has_little_time_whatever_it_did_before() -> None:
    progress = Progress(0.0)
    progress.blocked(0.0)
    progress.closing(29.0)
    progress.closing(31.0)
    assert progress.overdue(DEADLINES, 31.0) is None
    assert progress.overdue(DEADLINES, 31.1) is Overdue.CLOSING


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 500)), max_size=50))
def test_no_more_frames_than_the_rate_and_one_burst(batches: list[tuple[float, int]]) -> None:
    budget, now, frames, begun = FrameBudget(10.0, 100.0, 50.0), 50.0, 0, 50.0
    last = 0
    for pause_s, count in batches:
        now += pause_s
        frames += count
        wait_s = budget.spend(count, now)
        last = count
        # After the wait, the client exceeds the rate by one batch at most.
        assert frames <= 100 + (now + wait_s - begun) * 10.0 + 1e-6
        now += wait_s
    assert frames - last <= 100 + (now - begun) * 10.0 + 1e-6


def test_a_player_is_never_held_up() -> None:
    budget, now = FrameBudget(100.0, 1_000.0, 0.0), 0.0
    for _ in range(1_000):
        now += 0.25
        assert budget.spend(3, now) == 0.0
