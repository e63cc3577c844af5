"""A session table alone: gives it events, and keeps its commands."""

from __future__ import annotations

from typing import TypeVar

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.worker.service import commands, events
from turboserve.worker.service.table import Table

ME, OTHER = "wrk_me", "wrk_other"
LEASE_S = 8.0

C = TypeVar("C", bound=commands.Command)


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
        "controls": {},
        **changes,
    }
    return SessionRecord.model_validate(fields)


class Bench:
    """A table and its commands."""

    def __init__(self, capacity: int = 2, worker: str = ME) -> None:
        self.table = Table(worker, "toyworld", capacity, LEASE_S)
        self.now = 100.0
        self.said: list[commands.Command] = []

    def handle(self, message: events.Input, now: float | None = None) -> list[commands.Command]:
        self.now = self.now if now is None else now
        self.said = self.table.handle(message, self.now)
        return self.said

    def renew(self, *records: SessionRecord, asked_at: float | None = None) -> list[commands.Command]:
        return self.handle(events.Renewed(self.now if asked_at is None else asked_at, records))

    def last(self, kind: type[C]) -> C:
        found = [command for command in self.said if isinstance(command, kind)]
        assert len(found) == 1, f"{kind.__name__} in {self.said}"
        return found[0]

    def none(self, *kinds: type[commands.Command]) -> None:
        assert not [command for command in self.said if isinstance(command, kinds)], self.said

    def run_from(self, record: SessionRecord, log_end: int = 0, *, mine: bool = False) -> commands.Admit:
        """Place a session and check that it is admitted at the log's end."""
        self.handle(events.Assigned(record))
        question = self.last(commands.ReadLogEnd)
        self.handle(events.LogEndRead(record.id, question.query, log_end, mine))
        if log_end:
            fetch = self.last(commands.FetchLatents)
            assert fetch.next_chunk == log_end
            self.handle(events.LatentsFetched(record.id, fetch.query))
        admit = self.last(commands.Admit)
        assert isinstance(admit, commands.Admit)
        assert admit.next_chunk == log_end
        return admit

    def package(self, session: str, run: int, index: int) -> list[commands.Command]:
        return self.handle(events.ChunkPackaged(session, run, index, 0))

    def outcome(
        self,
        publish: commands.PublishChunk,
        outcome: events.PublishOutcome,
        sequence: int = 0,
        *,
        duplicate: bool = False,
    ) -> list[commands.Command]:
        return self.handle(
            events.Published(
                publish.session, publish.run, publish.index, publish.ownership, outcome, sequence, duplicate
            )
        )
