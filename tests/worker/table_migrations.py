"""Session tables at both ends of a migration: the states in which tests begin."""

from __future__ import annotations

from typing import Any

from tests.worker import table_bench
from tests.worker.table_bench import Bench
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming
from turboserve.worker.service import commands, events, migration_commands

A, B = "wrk_a", "wrk_b"
FROM = ("tcp://127.0.0.1:1",)


def row(session: str = "s1", **changes: object) -> SessionRecord:
    return table_bench.row(session, **{"worker": A, **changes})


def migrating(**changes: Any) -> SessionRecord:
    return row(**{"version": 5, "phase": Phase.MIGRATING, "target": B, "migration": 5, **changes})


def running(chunks: int = 2) -> tuple[Bench, int]:
    """Return a source whose session has published `chunks`, and its run."""
    bench = Bench(worker=A)
    bench.handle(events.Assigned(row()))
    bench.handle(events.LogEndRead("s1", bench.last(commands.ReadLogEnd).query, 0, False))
    run = bench.last(commands.Admit).run
    for index in range(chunks):
        bench.handle(events.ChunkPackaged("s1", run, index, 0))
        bench.handle(events.Published("s1", run, index, (1, 10), events.PublishOutcome.ACKED))
    return bench, run


def sealed() -> tuple[Bench, int]:
    """Return a source that has given its session away."""
    bench, run = running()
    bench.handle(events.Assigned(migrating()))
    assert not bench.table.offer("s1", 5, B)
    bench.handle(events.QuiesceRequested("s1", 5))
    assert bench.last(commands.Quiesce).run == run
    bench.handle(events.Quiesced("s1", run, 2, bench.last(commands.Quiesce).number))
    assert bench.last(migration_commands.SendFinalDelta) == migration_commands.SendFinalDelta("s1", 5)
    assert bench.last(migration_commands.SendManifest) == migration_commands.SendManifest("s1", 5, 2)
    bench.handle(events.ManifestSent("s1", 5))
    return bench, run


def expecting(**changes: object) -> tuple[Bench, int]:
    """Return a target that was informed of a migration, and the run of the copy."""
    bench = Bench(worker=B)
    record = migrating(**changes)
    bench.handle(events.Assigned(record, Incoming(record=record, source=FROM)))
    return bench, bench.last(migration_commands.FetchState).run


def verified(**changes: object) -> tuple[Bench, int]:
    bench, run = expecting(**changes)
    bench.handle(events.StateReceived("s1", run, 2, 0, "d", 100, 0.5))
    return bench, run
