"""Memory of a calm run with many sessions, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from turboserve.simulation import calm
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
