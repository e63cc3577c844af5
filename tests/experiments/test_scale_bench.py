"""`turboserve bench scale`: its parts, and a short run with real services."""

from __future__ import annotations

import io

import av
import pytest

from turboserve.contracts.events import SessionCreated, SessionPlaced
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.experiments.scale import command
from turboserve.experiments.scale.clients import missing
from turboserve.experiments.scale.hosted import Hosted
from turboserve.experiments.scale.observed import CommandTimes, percentiles
from turboserve.experiments.scale.usage import service_of
from turboserve.experiments.scale.workers import encoded, profile_of

KEYS = {
    "sessions", "event_to_command_s", "create_s", "prompt_applied_s", "chunk_delivery_s", "creates_per_s",
    "cpu_s_by_service", "rss_by_service", "chunks_lost",
}  # fmt: skip
RECORD = SessionRecord(
    id="ses_1",
    version=1,
    tenant="local",
    model="toyworld",
    phase=Phase.REQUESTED,
    prompt="x",
    seed=1,
    epoch=0,
    created_at=1.0,
    updated_at=1.0,
)


def test_the_time_of_a_command_begins_with_the_event_that_asks_for_it() -> None:
    times = CommandTimes()
    times.add(SessionCreated(id="e1", at=10.0, record=RECORD))
    assert times.unanswered == 1
    times.add(SessionPlaced(id="e2", at=10.25, record=RECORD, kind="place"))
    # A recovery answers no event.
    times.add(SessionPlaced(id="e3", at=12.0, record=RECORD, kind="recover"))
    assert times.seconds == [(10.0, 0.25)]
    assert times.unanswered == 0
    assert times.kinds == {"session.created": 1, "session.placed": 2}


def test_a_failover_is_counted_apart() -> None:
    times = [(1.0, 0.1), (9.95, 2.1), (10.5, 1.5), (12.5, 0.2), (20.0, 0.3)]
    usual, failover = command.split(times, killed_at=10.0)
    assert usual == [0.1, 0.2, 0.3]
    assert failover == [2.1, 1.5]
    assert command.split(times, None) == ([0.1, 2.1, 1.5, 0.2, 0.3], [])


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([]) == {"p50": None, "p99": None, "max": None, "count": 0}
    assert percentiles([float(n) for n in range(1, 101)]) == {
        "p50": 50.0,
        "p99": 99.0,
        "max": 100.0,
        "count": 100,
    }


@pytest.mark.parametrize(("indexes", "lost"), [([], 0), ([0, 1, 2], 0), ([0, 2, 2, 5], 3), ([3], 3)])
def test_missing_chunks_are_counted_once(indexes: list[int], lost: int) -> None:
    assert missing(indexes) == lost


@pytest.mark.parametrize(
    ("program", "arguments", "service"),
    [
        ("nats-server", ["/x/nats-server", "-c", "nats.conf"], "nats"),
        ("postgres", ["postgres: walwriter"], "postgres"),
        ("python", ["python", "-m", "turboserve.state_store"], "state-store"),
        ("python", ["python", "-m", "turboserve.cli.main", "up"], "supervisor"),
        ("python", ["python", "-I", "guard.py"], "supervisor"),
    ],
)
def test_processes_are_counted_for_their_service(program: str, arguments: list[str], service: str) -> None:
    assert service_of(program, arguments) == service


def test_a_chunk_has_the_declared_size_and_is_video() -> None:
    chunk = encoded(12, 16, 2_048)
    assert len(chunk.fragment) == 2_048
    with av.open(io.BytesIO(chunk.init + chunk.fragment), "r") as container:
        assert sum(1 for _ in container.decode(video=0)) == 12
    assert len(encoded(12, 16, 0).fragment) > 100


@pytest.mark.parametrize("slots", [1, 4, 12])
def test_a_worker_serves_its_slots_in_real_time(slots: int) -> None:
    hosted = Hosted("nats://127.0.0.1:1", {"wk0": "secret"}, slots)
    profile = profile_of(hosted)
    assert max(profile.chunk_s().values()) <= 0.6 * profile.config.chunk_media_s + 1e-9
    assert profile.slabs == slots


def test_a_short_run_loses_no_chunk_although_the_leader_is_killed() -> None:
    found = command.run(workers=2, sessions=6, playing=0.7, minutes=0.25)
    assert found.keys() >= KEYS
    assert found["sessions"] == 6
    assert found["chunks"] > 0
    assert found["chunks_lost"] == 0
    assert found["silent_viewers"] == 0
    assert found["failover"]["killed"]
    assert found["event_to_command_s"]["count"] + found["failover"]["event_to_command_s"]["count"] >= 6
    services = {"gateway", "scheduler", "autoscaler", "state-store", "nats", "redis", "postgres", "workers"}
    assert found["cpu_s_by_service"].keys() >= services
    assert min(found["rss_by_service"].values()) > 0
