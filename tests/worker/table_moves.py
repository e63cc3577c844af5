"""Session tables at both ends of a move: where a test begins."""

from __future__ import annotations

import table_bench
from table_bench import Bench

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told

A, B = "wrk_a", "wrk_b"
FROM = ("tcp://127.0.0.1:1",)


def row(session: str = "s1", **changes: object) -> SessionRecord:
    return table_bench.row(session, **{"worker": A, **changes})


def moving(**changes: object) -> SessionRecord:
    return row(**{"version": 5, "phase": Phase.MIGRATING, "target": B, "move": 5, **changes})


def running(chunks: int = 2) -> tuple[Bench, int]:
    """A source whose session has published `chunks`, and its run."""
    bench = Bench(worker=A)
    bench.tell(told.Assigned(row()))
    bench.tell(told.LogEndRead("s1", bench.last(do.ReadLogEnd).query, 0, False))
    run = bench.last(do.Admit).run
    for index in range(chunks):
        bench.tell(told.ChunkPackaged("s1", run, index, 0))
        bench.tell(told.Published("s1", run, index, (1, 10), told.Outcome.ACKED))
    return bench, run


def sealed() -> tuple[Bench, int]:
    """A source that has given its session away."""
    bench, run = running()
    bench.tell(told.Assigned(moving()))
    assert not bench.table.offer("s1", 5, B)
    bench.tell(told.FreezeWanted("s1", 5))
    assert bench.last(do.Freeze).run == run
    bench.tell(told.Frozen("s1", run, 2, bench.last(do.Freeze).number))
    assert bench.last(do.GiveRest) == do.GiveRest("s1", 5)
    assert bench.last(do.GiveSeal) == do.GiveSeal("s1", 5, 2)
    bench.tell(told.GiftSealed("s1", 5))
    return bench, run


def expecting(**changes: object) -> tuple[Bench, int]:
    """A target that was told of a move, and the run of the copy."""
    bench = Bench(worker=B)
    record = moving(**changes)
    bench.tell(told.Assigned(record, Incoming(record=record, source=FROM)))
    return bench, bench.last(do.Fetch).run


def verified(**changes: object) -> tuple[Bench, int]:
    bench, run = expecting(**changes)
    bench.tell(told.Arrived("s1", run, 2, 0, "d", 100, 0.5))
    return bench, run
