"""What is past its time: sessions nobody came back to; chunks of ended ones, then rows; rows of workers."""

from __future__ import annotations

import asyncio

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store.database import Database
from turboserve.state_store.repository import progress, workers
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.settings import Settings
from turboserve.subjects import CHUNK, CHUNKS, OWN

BATCH = 100

log = logs.get("retention")


class Retention:
    """Removing the same thing twice is fine: several instances may run this."""

    def __init__(
        self, database: Database, sessions: Sessions, bus: Bus, clock: Clock, settings: Settings
    ) -> None:
        self._database, self._sessions = database, sessions
        self._bus, self._clock, self._settings = bus, clock, settings

    async def run(self) -> None:
        while True:
            try:
                await self.purge()
            except TurboServeError as error:
                log.warning("retention waits", error=error.detail)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                log.warning("retention waits", error=repr(error))
            await asyncio.sleep(self._settings.purge_s)

    async def purge(self) -> int:
        """End the abandoned, purge what is due from the log, then delete rows that are due.

        Returns how many sessions were purged.
        """
        if ended := await self._sessions.end_abandoned():
            log.info("abandoned sessions ended", sessions=ended)
        now = self._clock.wall()
        async with self._database.transaction() as db:
            due = await progress.unpurged(db, now - self._settings.chunk_retention_s, BATCH)
        jetstream = self._bus.jetstream(3.0)
        for session in due:
            # The fence's absence refuses as well: an old owner names a revision that is not there.
            await jetstream.purge_stream(CHUNKS, subject=CHUNK.of(session))
            await jetstream.purge_stream(CHUNKS, subject=OWN.of(session))
        async with self._database.transaction() as db:
            if due:
                await progress.mark_purged(db, due, now)
            await progress.delete_ended(db, now - self._settings.session_retention_s)
            await workers.delete_gone(db, now - self._settings.session_retention_s)
        return len(due)
