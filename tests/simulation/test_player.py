"""A simulated viewer's player, by cases computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.simulation.player import Player, ViewerPause


def test_a_chunk_is_in_time_if_it_is_there_when_the_playhead_reaches_it() -> None:
    player = Player(starts_s=4.0)
    assert player.receive(1.0, 0.5)
    assert player.receive(4.5, 1.25)
    # The playhead reaches 1.25 s of media at 5.25 s.
    assert not player.receive(6.0, 2.0)
    assert player.stalls == [pytest.approx(0.75)]
    # The stall shifts the next deadline to 6.75 s.
    assert player.receive(6.7, 2.75)
    assert player.advance(7.5) == pytest.approx(2.75)
    assert player.advance(99.0) == pytest.approx(2.75)


def test_a_first_chunk_after_the_start_buffer_is_one_stall() -> None:
    player = Player(starts_s=4.0)
    assert not player.receive(5.5, 0.5)
    assert player.stalls == [pytest.approx(1.5)]
    assert player.receive(6.0, 1.25)


def test_the_playhead_rests_during_a_pause() -> None:
    player = Player(0.0, [ViewerPause(1.0, 10.0)])
    assert player.receive(0.0, 2.0)
    assert player.advance(5.0) == pytest.approx(1.0)
    # It plays on at 11 s and reaches the end at 12 s.
    assert player.receive(12.0, 3.0)
    assert not player.receive(14.0, 4.0)
    assert player.stalls == [pytest.approx(1.0)]


def test_a_pause_where_video_is_missing_hides_the_wait() -> None:
    player = Player(0.0, [ViewerPause(1.0, 5.0)])
    assert player.receive(0.0, 1.0)
    assert player.receive(5.9, 2.0)
    assert player.stalls == []


def test_after_a_dropped_buffer_the_next_chunk_has_a_new_deadline() -> None:
    player = Player(0.0, [ViewerPause(1.5, 100.0)])
    assert player.receive(0.0, 3.0)
    player.drop_buffer(1.0, resumes_s=5.0)
    assert player.advance(2.0) == pytest.approx(3.0)
    # A chunk under the old prompt is discarded, and moves no deadline.
    assert player.receive(4.0, 3.5)
    assert player.advance(4.0) == pytest.approx(3.5)
    assert player.receive(4.9, 4.5, skips=True)
    assert player.advance(5.5) == pytest.approx(4.0)
    assert not player.receive(8.0, 5.0)
    assert player.stalls == [pytest.approx(2.0)]


def test_the_chunk_to_skip_to_is_late_after_its_deadline() -> None:
    player = Player(0.0)
    assert player.receive(0.0, 3.0)
    player.drop_buffer(1.0, resumes_s=5.0)
    assert player.receive(6.0, 3.5)
    assert not player.receive(6.5, 4.5, skips=True)
    assert player.stalls == [pytest.approx(1.5)]


def test_without_a_deadline_the_chunk_to_skip_to_is_in_time() -> None:
    player = Player(0.0)
    assert player.receive(0.0, 3.0)
    player.drop_buffer(1.0, resumes_s=math.inf)
    assert player.receive(9.0, 4.0, skips=True)
    assert player.advance(9.5) == pytest.approx(3.5)
    assert not player.receive(11.0, 5.0)
    assert player.stalls == [pytest.approx(1.0)]


@given(
    waits=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30),
    starts_s=st.floats(0.0, 5.0),
    looks=st.lists(st.floats(0.0, 100.0), max_size=10),
)
def test_looking_changes_nothing_and_the_end_is_start_plus_media_plus_stalls(
    waits: list[float], starts_s: float, looks: list[float]
) -> None:
    watched, alone, now = Player(starts_s), Player(starts_s), 0.0
    for number, wait in enumerate(waits, 1):
        for look in sorted(looks):
            if now <= look < now + wait:
                watched.advance(look)
        now += wait
        assert watched.receive(now, 0.75 * number) == alone.receive(now, 0.75 * number)
    assert watched.stalls == pytest.approx(alone.stalls)
    ends_s = starts_s + 0.75 * len(waits) + sum(alone.stalls)
    assert alone.advance(ends_s - 0.1) < 0.75 * len(waits)
    assert alone.advance(ends_s + 1e-6) == pytest.approx(0.75 * len(waits))
