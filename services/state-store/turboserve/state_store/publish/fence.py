"""The fence follows the row: `own.<session>` for every committed epoch, then the word to the workers."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from turboserve import ids, logs
from turboserve.bus import Bus, append, last_entry
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import FencedError, TurboServeError
from turboserve.contracts.sessions import SessionRecord
from turboserve.state_store import metrics
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import SessionRow
from turboserve.state_store.publish.assignments import Assignments
from turboserve.subjects import CHUNKS, OWN

ATTEMPTS = 5
BATCH = 100
CONCURRENT_WRITES = 16

log = logs.get("fence")


class Fence:
    """Any number may work on the same session at once: the broker and the row decide, both by compare."""

    def __init__(self, database: Database, bus: Bus, assignments: Assignments) -> None:
        self._database, self._bus, self._assignments = database, bus, assignments

    async def settle(
        self, session: str, *named: str | None, known: SessionRow | None = None
    ) -> SessionRecord | None:
        """See to it that the session's current epoch is in the log; the row then, or None if there is none.

        `known` is the row as it was just committed; `named` are workers that are told as well: they may
        still run the session, or hold a place for it. Raises UnavailableError (the sweep will do it).
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
                return record
            revision = await self._write(record, row.fence_revision)
            row = None
            if revision is None:
                continue
            # Told before it is stored: it stands in the log, and whoever comes after finds it there.
            await self._assignments.notify(record.model_copy(update={"own_revision": revision}), *named)
            async with self._database.statement() as db:
                stored = await db.fence.store(session, record.epoch, revision)
            if stored is not None:
                return stored
        log.warning("owner changes faster than the fence follows", session=session)
        return None

    async def _write(self, record: SessionRecord, after: int) -> int | None:
        """Append `own` of the row's epoch behind revision `after`; its revision, or None: read again."""
        subject = OWN.of(record.id)
        own = Ownership(session=record.id, epoch=record.epoch, worker=record.worker)
        try:
            ack = await append(
                self._bus,
                subject,
                own.to_bytes(),
                # Never the same: workers append to this stream as well, and the broker takes whatever has a
                # known id for a repetition. A repetition of this one meets the fence that it wrote itself.
                message_id=ids.new_id("own"),
                expect=(subject, after),
                deadline_s=1.0,
            )
            metrics.fence_writes.add(1)
            return ack.sequence
        except FencedError:
            metrics.fenced.add(1)
        # Another life of the store was here: what it wrote tells whether this epoch, or one before or after.
        entry = await last_entry(self._bus, CHUNKS, subject)
        written = Ownership.from_bytes(entry.data) if entry is not None else None
        if entry is not None and written is not None and written.epoch == record.epoch:
            return entry.sequence
        async with self._database.statement() as db:
            await db.fence.store_seen(record.id, record.epoch, entry.sequence if entry else 0)
        return None

    async def sweep(self) -> int:
        """Settle what was left undone; how many there were."""
        async with self._database.statement() as db:
            missing = await db.fence.missing(BATCH)
        for session in missing:
            try:
                await self.settle(session)
            except ValidationError as error:
                # One entry that cannot be read must not keep the others waiting.
                log.error("unreadable owner in the log", session=session, error=str(error))
        return len(missing)

    async def verify(self) -> int:
        """Compare every row with the log, and write again what the log has lost; how many that were.

        A broker that comes back without the tail of its log would refuse every owner for ever.
        """
        async with self._database.statement() as db:
            settled = list(await db.fence.settled())
        gate = asyncio.Semaphore(CONCURRENT_WRITES)

        async def check(session: str, epoch: int, revision: int) -> bool:
            async with gate:
                entry = await last_entry(self._bus, CHUNKS, OWN.of(session))
                actual = entry.sequence if entry else 0
                if actual == revision:
                    return False
                written = Ownership.from_bytes(entry.data).epoch if entry else 0
                async with self._database.statement() as db:
                    # Only what is older than the row is a loss; a newer one belongs to a commit on its way.
                    if written > epoch or not await db.fence.reopen(session, epoch, revision, actual):
                        return False
                log.warning("the log had lost an owner", session=session, epoch=epoch, found=actual)
                await self.settle(session)
                return True

        results = await asyncio.gather(*(check(*row) for row in settled))
        return sum(results)

    async def sweep_forever(self, every_s: float) -> None:
        """Sweep now and then, and verify first and after every reconnect; never returns."""
        verified_for = -1
        while True:
            try:
                await self.sweep()
                connects = int(self._bus.client.stats["reconnects"])
                if connects != verified_for:
                    await self.verify()
                    verified_for = connects
            except TurboServeError as error:
                log.warning("fence waits", error=error.detail)
            await asyncio.sleep(every_s)
