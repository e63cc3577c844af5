"""A session table by itself: tells it what happens, and keeps what it says."""

from __future__ import annotations

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.worker.service import commands as do
from turboserve.worker.service import inputs as told
from turboserve.worker.service.table import Table

ME, OTHER = "wrk_me", "wrk_other"
LEASE_S = 8.0


def row(session: str = "s1", **changes: object) -> SessionRecord:
    fields = {
        "id": session,
        "tenant": "t",
        "model": "toyworld",
        "prompt": "a red circle",
        "seed": 7,
        "phase": Phase.ACTIVE,
        "version": 2,
        "epoch": 1,
        "worker": ME,
        "own_revision": 10,
        "created_at": 0,
        "updated_at": 0,
        **changes,
    }
    return SessionRecord.model_validate(fields)


class Bench:
    """A table and what it said."""

    def __init__(self, capacity: int = 2, worker: str = ME) -> None:
        self.table = Table(worker, "toyworld", capacity, LEASE_S)
        self.now = 100.0
        self.said: list[do.Command] = []

    def tell(self, message: told.Input, now: float | None = None) -> list[do.Command]:
        self.now = self.now if now is None else now
        self.said = self.table.tell(message, self.now)
        return self.said

    def renew(self, *records: SessionRecord, asked_at: float | None = None) -> list[do.Command]:
        return self.tell(told.Renewed(self.now if asked_at is None else asked_at, records))

    def last(self, kind: type[do.Command]) -> do.Command:
        found = [command for command in self.said if isinstance(command, kind)]
        assert len(found) == 1, f"{kind.__name__} in {self.said}"
        return found[0]

    def none(self, *kinds: type[do.Command]) -> None:
        assert not [command for command in self.said if isinstance(command, kinds)], self.said

    def run_from(self, record: SessionRecord, log_end: int = 0, *, mine: bool = False) -> do.Admit:
        """Place a session and see it admitted at the log's end."""
        self.tell(told.Assigned(record))
        question = self.last(do.ReadLogEnd)
        self.tell(told.LogEndRead(record.id, question.query, log_end, mine))
        if log_end:
            fetch = self.last(do.FetchLatents)
            assert fetch.next_chunk == log_end
            self.tell(told.LatentsFetched(record.id, fetch.query))
        admit = self.last(do.Admit)
        assert isinstance(admit, do.Admit)
        assert admit.next_chunk == log_end
        return admit

    def package(self, session: str, run: int, index: int) -> list[do.Command]:
        return self.tell(told.ChunkPackaged(session, run, index, 0))

    def outcome(self, publish: do.PublishChunk, outcome: told.Outcome) -> list[do.Command]:
        return self.tell(
            told.Published(publish.session, publish.run, publish.index, publish.ownership, outcome)
        )
