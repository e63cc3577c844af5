"""Writes the fence: `own.<session>` for every committed epoch, and then informs the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import nats
from pydantic import ValidationError

from turboserve import ids, logs
from turboserve.bus import Bus, Entry, append, last_entry
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import FencedError, IncompatibleVersionError, TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.versions import SchemaVersionError
from turboserve.contracts.workers import Assignment, Incoming, MigrationKey
from turboserve.state_store import metrics
from turboserve.state_store.hot.session_state import Playheads
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.publish.canaries import Canaries
from turboserve.subjects import ASSIGN, CANARY_CHUNKS, CHUNKS, OWN
from turboserve.telemetry import continuing

ATTEMPTS = 5
BATCH = 100
CONCURRENT_WRITES = 16
APPEND_S = 1.0
"""Deadline of one append to the log, seconds. The sweep repeats what took longer."""

log = logs.get("fence")
assignments_log = logs.get("assignments")


class Assignments:
    """Publishes ASSIGN to the workers that a row names and to those that it named before, at most once.

    The next renewal repairs a lost assignment.
    """

    def __init__(self, bus: Bus, database: Database, playheads: Playheads) -> None:
        self._bus, self._database, self._playheads = bus, database, playheads

    async def notify(self, record: SessionRecord, *named: str | None) -> None:
        """Send `record` to its workers and to `named`, unless its fence is not in the log. Never raises.

        A worker that misses the message gets the row with its next renewal.
        """
        if record.own_revision is None:
            return
        heard = self._playheads.apply_to(record)
        incoming, key = (None, None) if record.target is None else await self._migration(heard)
        for worker in dict.fromkeys((record.worker, *named)):
            if worker in (None, record.target):
                continue
            its_key = key if worker == record.worker else None
            await self._send(str(worker), Assignment(record=heard, key=its_key))
        if record.target is not None:
            await self._send(record.target, Assignment(record=heard, incoming=incoming, key=key))

    async def _migration(self, record: SessionRecord) -> tuple[Incoming | None, MigrationKey | None]:
        """Return what the two workers of a migration need besides the row."""
        try:
            async with self._database.statement() as db:
                source = await db.workers.get(str(record.worker))
                keys = await db.sessions.migration_keys(str(record.worker), record.id)
        except TurboServeError as error:
            assignments_log.debug("source of a migration not read", session=record.id, error=error.detail)
            return None, None
        key = next((key for key in keys if key.migration == record.migration), None)
        return Incoming(record=record, source=() if source is None else source.transfer), key

    async def _send(self, worker: str, message: Assignment) -> None:
        try:
            await self._bus.publish(ASSIGN, worker, message)
        except (nats.errors.Error, OSError) as error:
            assignments_log.debug("assignment not sent", worker=worker, error=repr(error))


class Fence:
    """Writes fences. Several instances may work on one session: broker and row compare before they set."""

    def __init__(self, database: Database, bus: Bus, assignments: Assignments, canaries: Canaries) -> None:
        self._database, self._bus = database, bus
        self._assignments, self._canaries = assignments, canaries

    async def settle(
        self, session: str, *named: str | None, known: SessionRow | None = None
    ) -> SessionRecord | None:
        """Write the session's current epoch to the log. Returns the row; None if there is no row.

        `known` is the row as it was just committed. `named` are further workers to inform: they may still run
        the session or hold a slot for it. Raises UnavailableError; the sweep then writes the fence.
        """
        row = known
        for _ in range(ATTEMPTS):
            if row is None:
                async with self._database.statement() as db:
                    row = await db.sessions.get_row(session)
            if row is None:
                return None
            record = row.record
            if record.own_revision is not None or record.epoch == 0:
                if known is not None and record.epoch == known.record.epoch:
                    # A sweep was first. It knows the row's workers, and not `named`.
                    await self._assignments.notify(record, *named)
                return record
            # A sweep has no span of its own: it continues what changed the owner.
            with continuing(record.traceparent):
                revision = await self._write(record, row.fence_revision)
                row = None
                if revision is None:
                    continue
                # No worker may know a revision that the row does not: the row's is the greatest that any
                # worker has, and every later one is greater.
                async with self._database.statement() as db:
                    stored = await db.fence.store(session, record.epoch, revision)
                if stored is not None:
                    await self._assignments.notify(stored, *named)
                    return stored
        log.warning("owner changes faster than the fence is written", session=session)
        return None

    async def _write(self, record: SessionRecord, newest: int) -> int | None:
        """Append `own` of the row's epoch. Returns its revision; None: read the row again.

        `newest` is the greatest revision that the session ever had. The new one is greater, also where the
        log has lost `newest`: the broker compares sequences alone, and would take the new entry for the lost
        one of a worker that was cut off meanwhile.
        """
        revision = await self._append(record, newest)
        if revision is not None:
            return revision
        entry = await last_entry(self._bus, CHUNKS, OWN.of(record.id))
        actual = entry.sequence if entry else 0
        if entry is not None and actual > newest:
            # Another process of the store was first, with this epoch or another one.
            if _epoch_of(entry) == record.epoch:
                return actual
            async with self._database.statement() as db:
                await db.fence.store_seen(record.id, record.epoch, actual)
            return None
        await self._canaries.advance(CANARY_CHUNKS, newest)
        return await self._append(record, actual)

    async def _append(self, record: SessionRecord, after: int) -> int | None:
        """Append `own` after revision `after`. Returns its revision; None: `after` is not the newest."""
        subject = OWN.of(record.id)
        own = Ownership(session=record.id, epoch=record.epoch, worker=record.worker)
        try:
            ack = await append(
                self._bus,
                subject,
                own.to_bytes(),
                # Always a new id: workers append to this stream as well, and the broker drops a message with
                # a known id as a repetition. The fence itself refuses a repetition of this message.
                message_id=ids.new_id("own"),
                expect=(subject, after),
                deadline_s=APPEND_S,
            )
        except FencedError:
            metrics.fence_refused.add(1)
            return None
        metrics.fence_writes.add(1)
        return ack.sequence

    async def sweep(self) -> int:
        """Write the fences that were left undone. Returns how many there were."""
        async with self._database.statement() as db:
            missing = await db.fence.missing(BATCH)
        for session in missing:
            try:
                await self.settle(session)
            except (ValidationError, IncompatibleVersionError) as error:
                # An unreadable entry must not block the other sessions.
                log.error("unreadable owner in the log", session=session, error=str(error))
        return len(missing)

    async def verify(self) -> int:
        """Compare every row with the log, and write again the fences that it lacks. Returns their number.

        A broker that comes back without the end of its log would otherwise refuse every owner forever. After
        an upgrade to another MAJOR schema version, no reader can read the fences of sessions that still run.
        """
        async with self._database.statement() as db:
            settled = list(await db.fence.settled())
        gate = asyncio.Semaphore(CONCURRENT_WRITES)

        async def check(session: str, epoch: int, revision: int) -> bool:
            async with gate:
                entry = await last_entry(self._bus, CHUNKS, OWN.of(session))
                actual = entry.sequence if entry else 0
                try:
                    written = _epoch_of(entry) if entry else 0
                except (ValidationError, IncompatibleVersionError) as error:
                    # An unreadable entry must not block the other sessions.
                    log.error("unreadable owner in the log", session=session, error=str(error))
                    return False
                # Only an entry older than the row shows a loss. A newer one belongs to a current commit.
                if (actual, written) == (revision, epoch) or written > epoch:
                    return False
                async with self._database.statement() as db:
                    if not await db.fence.reopen(session, epoch, revision):
                        return False
                log.warning("lost owner restored in the log", session=session, epoch=epoch, found=actual)
                await self.settle(session)
                return True

        results = await asyncio.gather(*(check(*row) for row in settled))
        return sum(results)

    async def sweep_forever(self, every_s: float, streams_made: Callable[[], int] = lambda: 0) -> None:
        """Sweep every `every_s`; never returns.

        Verifies at first, after every reconnect, and after a change of `streams_made`, the number of streams
        that this process created.
        """
        verified_for = (-1, 0)
        while True:
            try:
                await self.sweep()
                current = int(self._bus.client.stats["reconnects"]), streams_made()
                if current != verified_for:
                    await self.verify()
                    verified_for = current
            except TurboServeError as error:
                log.warning("fence delayed", error=error.detail)
            await asyncio.sleep(every_s)


def _epoch_of(entry: Entry) -> int:
    """Return the epoch that an entry of `own` names, or 0 for an entry of an earlier MAJOR schema version.

    Raises IncompatibleVersionError for a later MAJOR, and ValidationError.
    """
    try:
        return Ownership.from_bytes(entry.data).epoch
    except SchemaVersionError as error:
        if error.newer:
            raise IncompatibleVersionError(f"{entry.subject}: {error}") from None
        return 0


async def newest_fence(database: Database) -> int:
    """Return the greatest revision that any session's fence ever had, by the rows; 0: there is none.

    Raises UnavailableError.
    """
    # A stream is created before the first start's migration.
    await database.migrate()
    async with database.statement() as db:
        return await db.fence.newest()
