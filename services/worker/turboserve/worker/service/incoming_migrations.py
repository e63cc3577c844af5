"""Sessions that are migrating to this worker, as their target sees them. Pure.

A copied state belongs to no worker until the row names the owner. It then becomes an entry of the table, or
is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationReport, MigrationStage
from turboserve.worker.service import commands, events


@dataclass(eq=False)
class IncomingMigration:
    """One migration to this worker."""

    record: SessionRecord
    """The source's row, with target and migration."""
    learned_at: float
    run: int
    stage: MigrationStage = MigrationStage.COPYING
    next_chunk: int = 0
    control_seq: int = 0
    """Number of the newest control that the state was generated under."""
    digest: str | None = None
    bytes_copied: int = 0
    state_bytes: int = 0
    seconds: float = 0.0
    limit_s: float = 0.0
    """Time after which the copy is given up, from its beginning, seconds. 0: the copy has not begun."""
    reason: str | None = None
    code: str | None = None
    playhead_s: float = 0.0
    playhead_at: float = 0.0
    """When `playhead_s` was reported, monotonic seconds."""
    playing: bool = False

    @property
    def migration(self) -> int:
        return self.record.migration or 0

    @property
    def on_host(self) -> bool:
        """Whether the session is suspended and goes to host memory."""
        return self.record.phase is Phase.SUSPENDED

    @property
    def takes_slot(self) -> bool:
        return not self.on_host and self.stage is not MigrationStage.FAILED

    def report(self) -> MigrationReport:
        return MigrationReport(
            session=self.record.id,
            migration=self.migration,
            stage=self.stage,
            next_chunk=self.next_chunk,
            digest=self.digest,
            bytes_copied=self.bytes_copied,
            state_bytes=self.state_bytes,
            seconds=self.seconds,
            limit_s=self.limit_s,
            reason=self.reason,
            code=self.code,
        )


class IncomingMigrations:
    """All migrations to this worker. Commands go to `out`."""

    def __init__(self, worker: str, model: str, out: list[commands.Command]) -> None:
        self._worker, self._model, self._out = worker, model, out
        self._all: dict[str, IncomingMigration] = {}

    def __iter__(self) -> Iterator[IncomingMigration]:
        return iter(list(self._all.values()))

    def get(self, session: str) -> IncomingMigration | None:
        return self._all.get(session)

    @property
    def slots(self) -> int:
        """Slots that are kept for arriving sessions."""
        return sum(arrival.takes_slot for arrival in self._all.values())

    def reports(self) -> tuple[MigrationReport, ...]:
        return tuple(arrival.report() for arrival in self._all.values())

    def expect(self, incoming: Incoming, now: float, run: int, free_slots: int) -> None:
        """Handle a row that names this worker as its target. `run`: number of a new migration's copy."""
        record = incoming.record
        if record.target != self._worker or record.migration is None:
            return
        known = self._all.get(record.id)
        if known is not None and known.migration == record.migration:
            known.record, known.learned_at = record, now
            return
        if known is not None:
            free_slots += known.takes_slot
            self.drop(record.id)
        arrival = IncomingMigration(record, now, run)
        self._all[record.id] = arrival
        self._out.append(commands.Report())
        if record.model != self._model:
            self._fail(arrival, f"model: this worker serves {self._model}, not {record.model}")
        elif arrival.takes_slot and free_slots < 1:
            self._fail(arrival, "slots: all are in use or reserved")
        else:
            self._out.append(
                commands.FetchState(
                    record.id,
                    run,
                    record.migration,
                    incoming.source,
                    on_host=arrival.on_host,
                    traceparent=record.migration_traceparent,
                )
            )

    def forget(self, session: str, learned_before: float | None = None) -> None:
        """Drop the migration: the row does not name this worker as its target any more."""
        arrival = self._all.get(session)
        if arrival is not None and (learned_before is None or arrival.learned_at < learned_before):
            self.drop(session)
            self._out.append(commands.Report())

    def drop(self, session: str) -> None:
        """Release what was copied."""
        arrival = self._all.pop(session)
        if arrival.stage is not MigrationStage.FAILED:
            self._out.append(commands.CancelFetch(session, arrival.run))

    def take(self, record: SessionRecord) -> IncomingMigration | None:
        """Return the verified state for a row that names this worker as its owner; None if there is none.

        Drops a state that is not verified, or whose epoch is not the one before the row's.
        """
        arrival = self._all.get(record.id)
        if arrival is None:
            return None
        if arrival.stage is MigrationStage.VERIFIED and record.epoch == arrival.record.epoch + 1:
            return self._all.pop(record.id)
        self.drop(record.id)
        return None

    def handle(self, message: events.CopyStarted | events.StateReceived | events.StateFetchFailed) -> None:
        """Handle the outcome of a copy."""
        arrival = self._all.get(message.session)
        if arrival is None or arrival.run != message.run or arrival.stage is not MigrationStage.COPYING:
            return
        if isinstance(message, events.CopyStarted):
            arrival.limit_s = message.limit_s
        elif isinstance(message, events.StateFetchFailed):
            self._fail(arrival, message.reason, message.code)
        else:
            arrival.stage = MigrationStage.VERIFIED
            arrival.next_chunk, arrival.control_seq = message.next_chunk, message.control_seq
            arrival.digest, arrival.bytes_copied = message.digest, message.bytes_copied
            arrival.seconds, arrival.state_bytes = message.seconds, message.state_bytes
        self._out.append(commands.Report())

    def _fail(self, arrival: IncomingMigration, reason: str, code: str | None = None) -> None:
        """Mark a copy as failed, its memory already released. Reports repeat this until the row changes."""
        arrival.stage, arrival.reason, arrival.code = MigrationStage.FAILED, reason, code
