"""The transactional database in memory: tables, commits that may be in doubt, what a crash takes back.

What a transaction reads and decides is the state store's; here is only what Postgres does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from turboserve.bench.simulate.kernel import Kernel
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.events import Event
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.sessions import Decision, PromptReceipt, SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True)
class Row:
    """A session's row with what only the store reads of it."""

    record: SessionRecord
    fence_revision: int
    request: CreateSession


class Table(Generic[V]):
    """Rows by key, in the order of their insertion; every write can be taken back."""

    def __init__(self, database: Database) -> None:
        self._rows: dict[Any, V] = {}
        self._database = database

    def get(self, key: Any) -> V | None:
        return self._rows.get(key)

    def values(self) -> Iterator[V]:
        return iter(self._rows.values())

    def items(self) -> Iterator[tuple[Any, V]]:
        return iter(self._rows.items())

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: Any, value: V) -> None:
        before = self._rows.get(key)
        self._rows[key] = value
        if before is None:
            self._database.undo.append(lambda: self._rows.pop(key, None))
        else:
            self._database.undo.append(lambda: self._rows.__setitem__(key, before))

    def remove(self, key: Any) -> None:
        before = self._rows.pop(key)
        # Its old place in the order does not come back; the outbox sorts by key.
        self._database.undo.append(lambda: self._rows.__setitem__(key, before))


class Database:
    """Postgres: rows of sessions and workers, decisions, controls, outbox, the counter's position."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.undo: list[Callable[[], object]] = []
        self._loose: list[list[Callable[[], object]]] = []
        """Transactions that a crash may take back: all since the last one that waited for the disk."""
        self.up = True
        self.in_doubt = 0.0
        """Probability that a committed transaction's sender is told otherwise."""
        self.sessions: Table[Row] = Table(self)
        self.workers: Table[WorkerRecord] = Table(self)
        self.decisions: Table[Decision] = Table(self)
        """By (session, version); noted ones have a negative version."""
        self.controls: Table[tuple[PromptReceipt, int | None]] = Table(self)
        """By event id: the receipt, and the chunk it was applied with."""
        self.outbox: Table[tuple[Event, str]] = Table(self)
        """By number: the event and its subject."""
        self.cursors: Table[int] = Table(self)
        self.leaders: Table[LeaderRecord] = Table(self)
        self.pools: Table[tuple[int, float]] = Table(self)
        """By name: workers at most, and when it last reported."""
        self._numbers = 0
        self._durable = True
        self._changed: dict[str, SessionRecord | None] = {}
        self.on_row: Callable[[SessionRecord | None, SessionRecord], None] = lambda _before, _after: None
        """Called with every change of a session's row, at its commit."""
        self._gone: list[str] = []
        self.on_gone: Callable[[str], None] = lambda _worker: None
        """Called when it is committed that a worker is gone."""

    def transaction(self, work: Callable[[], T], *, durable: bool = True) -> T:
        """All of `work` or nothing of it. Raises what it raises, and UnavailableError."""
        if not self.up:
            raise UnavailableError("the database does not answer at the moment", retry_after_s=1.0)
        self.undo = []
        self._durable = durable
        changed: dict[str, SessionRecord | None] = {}
        self._changed, self._gone = changed, []
        try:
            result = work()
        except BaseException:
            for step in reversed(self.undo):
                step()
            raise
        for session, before in changed.items():
            row = self.sessions.get(session)
            assert row is not None
            self.on_row(before, row.record)
        for worker in self._gone:
            self.on_gone(worker)
        if self._durable:
            self._loose.clear()
        elif self.undo:
            self._loose.append(self.undo)
        if self._kernel.chance(self.in_doubt):
            raise UnavailableError("the connection to the database was lost", retry_after_s=1.0)
        return result

    def make_durable(self) -> None:
        """Let a transaction that began without wait for the disk after all."""
        self._durable = True

    def crash(self) -> None:
        """Down at once; what did not wait for the disk may be gone, the newest first."""
        self.up = False
        for _ in range(self._kernel.random.randint(0, len(self._loose))):
            for step in reversed(self._loose.pop()):
                step()
        self._loose.clear()
        self._kernel.note("postgres down")

    def recover(self) -> None:
        self.up = True
        self._kernel.note("postgres up")

    # Statements that several transactions share

    def write_row(self, record: SessionRecord, fence_revision: int | None = None) -> None:
        row = self.sessions.get(record.id)
        assert row is not None
        self._changed.setdefault(record.id, row.record)
        revision = row.fence_revision if fence_revision is None else fence_revision
        self.sessions.put(record.id, Row(record, revision, row.request))

    def insert_row(self, record: SessionRecord, request: CreateSession) -> None:
        self._changed.setdefault(record.id, None)
        self.sessions.put(record.id, Row(record, 0, request))

    def write_gone(self, worker: WorkerRecord) -> None:
        self.workers.put(worker.id, worker)
        self._gone.append(worker.id)

    def tell(self, event: Event, subject: str) -> None:
        """Into the outbox, in the transaction of what it tells of."""
        self._numbers += 1
        self.outbox.put(self._numbers, (event, subject))

    def decided(self, decision: Decision, version: int) -> None:
        self.decisions.put((decision.session, version), decision)

    def rows(self) -> Iterator[SessionRecord]:
        return (row.record for row in self.sessions.values())

    def slots_used(self, worker: str, besides: str = "") -> int:
        """Sessions that hold a slot of this worker, or have one reserved by moving there."""
        return sum(
            worker in (record.worker, record.target)
            for record in self.rows()
            if record.phase.holds_slot and record.id != besides
        )

    def living(self) -> list[WorkerRecord]:
        """Rows of workers that are not gone, each with its counts."""
        return [self.counted(row) for row in self.workers.values() if row.phase is not WorkerPhase.GONE]

    def counted(self, worker: WorkerRecord) -> WorkerRecord:
        mine = [r for r in self.rows() if r.worker == worker.id and not r.phase.ended]
        used = sum(record.phase.holds_slot for record in mine)
        incoming = sum(record.target == worker.id for record in self.rows())
        return worker.model_copy(
            update={"sessions": used, "suspended": len(mine) - used, "incoming": incoming}
        )
