"""Memory of a calm run with many sessions, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from turboserve.simulation import calm
from turboserve.simulation.runtime.broker.stream import EXPIRING_KEPT, Stream
from turboserve.simulation.world import World


def test_the_checks_keep_no_chunks_of_sessions_that_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worlds: list[World] = []
    users = calm.CalmUsers

    class Noted(users):  # type: ignore[misc, valid-type]
        def __init__(self, world: World, arrivals: list[calm.SessionArrival]) -> None:
            worlds.append(world)
            super().__init__(world, arrivals)

    monkeypatch.setattr(calm, "CalmUsers", Noted)
    arrivals = tmp_path / "arrivals.csv"
    arrivals.write_text("arrives_s,plays_s\n5,15\n8,15\n10,80\n")
    result = calm.run_calm(seed=1, workers=2, slots=4, sessions=0, seconds=60.0, arrivals=arrivals)

    assert not any(result["violations"].values())
    kept = sorted(len(log.chunks) for log in worlds[0].checker.log.sessions.values())
    assert kept[:2] == [0, 0]
    assert kept[2] > 30
    assert all(log.last is not None for log in worlds[0].checker.log.sessions.values())


def test_a_stream_keeps_no_times_of_expiry_of_messages_that_a_limit_has_removed() -> None:
    now = [0.0]
    config = {"name": "LOG", "subjects": ["log.*"], "max_msgs_per_subject": 10, "allow_msg_ttl": True}
    stream = Stream(config, lambda: now[0])
    for number in range(5 * EXPIRING_KEPT):
        now[0] += 0.01
        stream.append(f"log.{number % 2}", b"body", {"Nats-TTL": "100s"})

    assert stream.count == 20
    assert len(stream._expiring) <= 2 * stream.count + EXPIRING_KEPT
    # The first of the newest 20 was stored 0.19 s before the last.
    now[0] += 100.0 - 0.095
    stream.expire()
    assert stream.count == 10
    now[0] += 0.2
    stream.expire()
    assert stream.count == 0
