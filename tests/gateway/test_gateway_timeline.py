"""The timeline's core: its published playhead is right for any order of events."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.gateway.timeline.playback import Publish, Recovered, Stalled
from turboserve.gateway.timeline.timeline import Timeline

INTERVAL_S, TIMEOUT_S = 0.25, 5.0

viewers = st.sampled_from(["v1", "v2", "v3"])
media = st.floats(0, 1e9)
steps = st.lists(
    st.tuples(
        st.floats(0, 3),
        st.one_of(
            st.tuples(st.just("joined"), viewers, media, st.booleans()),
            st.tuples(st.just("left"), viewers),
            st.tuples(st.just("delivered"), viewers, st.floats(0, 2)),
            st.tuples(st.just("reported"), viewers, media, media),
            st.tuples(st.just("playing"), st.booleans()),
            st.tuples(st.just("tick")),
        ),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_no_playhead_lies_beyond_what_was_delivered_and_the_last_to_leave_is_announced_once(
    steps: list[tuple[Any, ...]],
) -> None:
    timeline, now = Timeline(INTERVAL_S, TIMEOUT_S), 100.0
    delivered: dict[str, float] = {}
    reach = 0.0
    announced_empty = True
    stalled = 0
    for pause_s, (what, *given_) in steps:
        now += pause_s
        commands = []
        match what:
            case "joined":
                viewer, start_s, self_paced = given_
                if viewer in delivered:
                    continue
                delivered[viewer] = start_s
                reach = max(reach, start_s)
                announced_empty = False
                commands = timeline.joined("s", viewer, start_s, now, self_paced=self_paced)
            case "left":
                commands = timeline.left("s", given_[0], now)
                if given_[0] not in delivered:
                    assert commands == []
                delivered.pop(given_[0], None)
            case "delivered":
                viewer, more_s = given_
                if viewer in delivered:
                    delivered[viewer] += more_s
                    reach = max(reach, delivered[viewer])
                    commands = timeline.delivered("s", viewer, delivered[viewer], 0.1, now)
            case "reported":
                viewer, playhead_s, buffered_s = given_
                commands = timeline.reported("s", viewer, playhead_s, buffered_s, now)
            case "playing":
                commands = timeline.playing("s", given_[0], now)
            case "tick":
                commands = timeline.tick(now)
        for command in commands:
            match command:
                case Publish("s", playhead_s, count, age_s=age_s):
                    assert 0 <= playhead_s <= playhead_s + age_s <= reach * (1 + 1e-9)
                    assert count == len(delivered)
                    if count == 0:
                        assert not announced_empty
                        announced_empty = True
                case Stalled("s"):
                    stalled += 1
                case Recovered("s", seconds):
                    assert seconds >= 0
        view = timeline.view("s")
        assert (view is not None) == bool(delivered)
        if view is not None:
            assert view.viewers == len(delivered)
            assert view.slack_s >= 0
    if not delivered:
        assert announced_empty
        assert timeline.tick(now) == []


def test_the_playhead_is_that_of_the_furthest_viewer_and_goes_back_when_that_one_leaves() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    for viewer in ("near", "far"):
        timeline.joined("s", viewer, 0.0, 0.0)
        timeline.delivered("s", viewer, 10.0, 0.1, 0.0)
    timeline.tick(6.9)
    timeline.reported("s", "near", 2.0, 1.0, 7.0)
    assert timeline.reported("s", "far", 7.0, 3.0, 7.0) == []  # Published less than an interval ago.
    assert timeline.tick(7.25) == [Publish("s", 7.0, 2, age_s=0.25)]
    assert timeline.left("s", "far", 7.5) == [Publish("s", 2.0, 1, age_s=0.5)]


def test_the_oldest_viewer_is_the_one_that_came_first_of_those_that_watch() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    assert timeline.oldest_viewer("s") is None
    for number, viewer in enumerate("abc"):
        timeline.joined("s", viewer, 0.0, 1.0 + number)
    timeline.joined("other", "d", 0.0, 1.0)
    assert (timeline.oldest_viewer("s"), timeline.oldest_viewer("other")) == ("a", "d")
    timeline.left("s", "a", 5.0)
    timeline.joined("s", "a", 0.0, 6.0)
    assert timeline.oldest_viewer("s") == "b"
    for viewer in "cba":
        timeline.left("s", viewer, 7.0)
    assert timeline.oldest_viewer("s") is None


def test_a_viewer_who_falls_silent_no_longer_moves_the_playhead_but_is_still_counted() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    for viewer in ("near", "far"):
        timeline.joined("s", viewer, 0.0, 0.0)
        timeline.delivered("s", viewer, 10.0, 0.1, 0.0)
    timeline.reported("s", "far", 7.0, 3.0, 1.0)
    timeline.reported("s", "near", 2.0, 1.0, 6.5)
    assert timeline.tick(6.75) == [Publish("s", 2.0, 2, age_s=0.25)]
    # When all are silent, the playhead stays: further chunks would have no viewer.
    assert timeline.tick(60.0) == [Publish("s", 2.0, 2, live=False)]


def test_a_claim_beyond_what_was_sent_does_not_make_a_worker_run_away() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0)
    timeline.delivered("s", "v", 1.5, 0.1, 0.1)
    assert timeline.reported("s", "v", 1e9, 1e9, 2.0) == [Publish("s", 1.5, 1)]


def test_a_viewer_who_was_sent_nothing_yet_waits_at_the_start_whatever_its_clock_shows() -> None:
    """Taken to be at 0, it would wait for a worker that waits for it: a lost log sends nothing."""
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v1", 5.0, now=0.0)
    [published] = timeline.reported("s", "v1", 0.0, 0.0, now=1.0)
    assert published == Publish("s", 5.0, 1)
    timeline.delivered("s", "v1", 5.75, 0.1, now=1.5)
    assert timeline.reported("s", "v1", 5.25, 0.5, now=2.0) == [Publish("s", 5.25, 1)]


def test_a_viewer_who_comes_back_with_video_left_is_where_it_plays() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v1", 5.0, now=0.0)
    assert timeline.reported("s", "v1", 3.5, 1.5, now=1.0) == [Publish("s", 3.5, 1)]


def test_a_player_that_cannot_report_plays_at_speed_one_and_stops_where_the_video_stops() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 4.0, 0.0, self_paced=True)
    assert timeline.tick(3.0) == [Publish("s", 4.0, 1)]  # Nothing was sent: waiting to start is no stall.
    timeline.delivered("s", "v", 5.0, 0.1, 3.0)
    assert timeline.tick(3.5) == [Publish("s", 4.5, 1)]
    assert timeline.tick(4.5) == [Stalled("s"), Publish("s", 5.0, 1)]
    timeline.delivered("s", "v", 6.0, 0.1, 5.5)
    assert timeline.tick(6.0) == [Recovered("s", 1.5), Publish("s", 5.5, 1)]


def test_running_dry_is_a_stall_until_it_plays_again_and_pausing_is_none() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0)
    timeline.delivered("s", "v", 1.0, 0.1, 0.0)
    assert Stalled("s") not in timeline.reported("s", "v", 0.0, 0.0, 1.0)  # It has not begun to play.
    timeline.reported("s", "v", 0.9, 0.1, 2.0)
    assert Stalled("s") in timeline.reported("s", "v", 1.0, 0.0, 3.0)
    assert Stalled("s") not in timeline.reported("s", "v", 1.0, 0.0, 4.0)
    timeline.delivered("s", "v", 2.0, 0.1, 4.5)
    assert Recovered("s", 2.0) in timeline.reported("s", "v", 1.4, 0.6, 5.0)
    timeline.playing("s", False, 6.0)
    assert Stalled("s") not in timeline.reported("s", "v", 2.0, 0.0, 9.0)
    view = timeline.view("s")
    assert view is not None
    assert view.stalls == 1


def test_slack_is_that_of_the_viewer_who_has_least_left() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    for viewer, playhead_s in (("near", 1.0), ("far", 2.5)):
        timeline.joined("s", viewer, 0.0, 0.0)
        timeline.delivered("s", viewer, 3.0, 0.2, 0.0)
        timeline.reported("s", viewer, playhead_s, 3.0 - playhead_s, 3.0)
    view = timeline.view("s")
    assert view is not None
    assert (view.viewers, view.slack_s) == (2, 0.5)


def test_credit_is_slack_less_the_time_of_one_more_chunk() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0)
    timeline.delivered("s", "v", 3.0, 0.2, 0.0)
    timeline.reported("s", "v", 1.0, 2.0, 1.0)
    view = timeline.view("s")
    assert view is not None
    assert (view.slack_s, view.credit_s) == (2.0, 1.8)


def test_a_skip_moves_the_playhead_at_once_and_a_report_from_before_does_not_move_it_back() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0)
    timeline.delivered("s", "v", 3.0, 0.1, 0.0)
    timeline.reported("s", "v", 0.5, 2.5, 0.5)
    assert timeline.skipped("s", "v", 3.0, 0.6) == [Publish("s", 3.0, 1)]
    view = timeline.view("s")
    assert view is not None
    assert view.slack_s == 0.0
    timeline.delivered("s", "v", 3.75, 0.1, 0.6)
    # Sent before the skip arrived.
    timeline.reported("s", "v", 0.6, 2.4, 0.7)
    assert timeline.tick(1.0) == [Publish("s", 3.0, 1)]
    timeline.reported("s", "v", 3.2, 0.5, 1.5)
    [published] = timeline.tick(2.0)
    assert published == Publish("s", 3.2, 1, age_s=0.5)


def test_a_viewer_of_plain_http_skips_nothing() -> None:
    timeline = Timeline(INTERVAL_S, TIMEOUT_S)
    timeline.joined("s", "v", 0.0, 0.0, self_paced=True)
    timeline.delivered("s", "v", 3.0, 0.1, 0.0)
    assert timeline.skipped("s", "v", 3.0, 0.1) == []
    assert timeline.skipped("s", "unknown", 3.0, 0.1) == []
