from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.bench.streaming.player import Player

CHUNK_S = 0.75


def play(player: Player, arrivals: dict[int, float], until_s: float) -> None:
    """Play arrivals (chunk index → time); ticks every 10 ms, as a clock between events would."""
    now_s = 0.0
    due = sorted((when, index) for index, when in arrivals.items())
    while now_s < until_s:
        while due and due[0][0] <= now_s:
            _, index = due.pop(0)
            player.arrived(index, index * CHUNK_S, (index + 1) * CHUNK_S, now_s)
        player.tick(now_s)
        now_s += 0.01


def test_playback_waits_for_one_second_of_video() -> None:
    player = Player()
    play(player, {0: 0.0}, 2.0)
    assert (player.started, player.position_s) == (False, 0.0)
    player.arrived(1, 0.75, 1.5, 2.0)
    player.tick(2.5)
    assert player.started
    assert player.position_s == pytest.approx(0.5)


def test_chunks_in_time_play_without_a_stall() -> None:
    player = Player()
    play(player, {index: 0.3 + index * CHUNK_S for index in range(20)}, 14.0)
    assert (player.stalls, player.stall_s) == (0, 0.0)


def test_a_late_chunk_is_one_stall_of_its_length() -> None:
    player = Player()
    # Playback starts at 0.1 with 1.5 s; chunk 2 is due at 1.6 and comes at 3.0.
    play(player, {0: 0.0, 1: 0.1, 2: 3.0, 3: 3.0}, 4.0)
    assert player.stalls == 1
    assert player.stall_s == pytest.approx(1.4, abs=0.03)
    assert not player.stalled


def test_a_viewers_pause_is_no_stall() -> None:
    player = Player()
    play(player, {0: 0.0, 1: 0.0}, 1.0)
    player.pause(True, 1.0)
    player.tick(10.0)
    player.pause(False, 10.0)
    position_s = player.position_s
    player.tick(10.2)
    assert (player.stalls, player.stall_s) == (0, 0.0)
    assert player.position_s == pytest.approx(position_s + 0.2)


def test_gaps_and_repetitions_are_counted() -> None:
    player = Player()
    assert player.arrived(3, 2.25, 3.0, 0.0)
    assert player.arrived(4, 3.0, 3.75, 0.1)
    assert not player.arrived(4, 3.0, 3.75, 0.2)
    assert player.arrived(7, 5.25, 6.0, 0.3)
    assert (player.chunks, player.lost, player.repeated, player.next_chunk) == (3, 2, 1, 8)


def test_a_viewer_who_joins_late_starts_at_what_it_gets_first() -> None:
    player = Player()
    player.arrived(40, 30.0, 30.75, 0.0)
    player.arrived(41, 30.75, 31.5, 0.0)
    player.tick(0.5)
    assert player.position_s == pytest.approx(30.5)
    assert player.lost == 0


@given(st.lists(st.floats(0.0, 3.0), min_size=2, max_size=30))
def test_time_is_either_played_or_stalled(gaps_s: list[float]) -> None:
    player = Player()
    now_s, started_s = 0.0, None
    for index, gap_s in enumerate(gaps_s):
        now_s += gap_s
        player.arrived(index, index * CHUNK_S, (index + 1) * CHUNK_S, now_s)
        if player.started and started_s is None:
            started_s = now_s
        assert 0.0 <= player.position_s <= player.end_s + 1e-9
    if started_s is not None:
        assert player.position_s + player.stall_s == pytest.approx(now_s - started_s)
    assert (player.lost, player.repeated) == (0, 0)
