"""Removes data after its retention: abandoned sessions, chunks and rows of ended ones, workers, history.

For recordings, it begins the deletion, which the recorder carries out.
"""

from __future__ import annotations

import asyncio

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store.core import aging
from turboserve.state_store.hot.probe import watching_since
from turboserve.state_store.hot.session_state import HotStoreGuard, Playheads
from turboserve.state_store.log_purge import LogPurge
from turboserve.state_store.ports.database import Database
from turboserve.state_store.service import pool_history
from turboserve.state_store.service.sessions import Sessions
from turboserve.state_store.settings import Settings

BATCH = 100
"""Maximum number of sessions whose chunks are purged at once."""
ABANDONED = 1_000
"""Maximum number of sessions checked at once for abandonment."""
ROWS = 500
"""Maximum number of rows that one transaction deletes."""
RETENTION = "retention"
BEHIND_S = 3_600.0
"""A warning is logged if the aging time is further behind the wall clock than this, seconds."""

log = logs.get("retention")


class Retention:
    """Removes expired data. Several instances may run this, since each removal can be repeated."""

    def __init__(
        self,
        database: Database,
        sessions: Sessions,
        playheads: Playheads,
        hot: HotStoreGuard,
        bus: Bus,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self._database, self._sessions = database, sessions
        self._playheads, self._hot = playheads, hot
        self._log = LogPurge(bus)
        self._clock, self._settings = clock, settings
        self._last: tuple[aging.Aging, float] | None = None
        """The aging time that this instance wrote last, and when, by its monotonic clock."""
        self._told_s = 0.0

    async def run(self) -> None:
        while True:
            try:
                await self.purge()
            except TurboServeError as error:
                log.warning("retention delayed", error=error.detail)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                log.warning("retention delayed", error=repr(error))
            await asyncio.sleep(self._settings.purge_s)

    async def purge(self) -> int:
        """End abandoned sessions, purge expired chunks from the log, then delete expired rows.

        Returns the number of purged sessions.
        """
        now = await self._aged_to()
        if ended := await self._end_abandoned(now):
            log.info("abandoned sessions ended", sessions=ended)
        purged = await self._purge_chunks(now)
        before = now - self._settings.session_retention_s
        deleted = ROWS
        while deleted == ROWS:
            async with self._database.transaction() as db:
                deleted = await db.progress.delete_ended(before, ROWS)
        async with self._database.transaction() as db:
            await db.tenants.delete_unused(before)
            await db.workers.delete_gone(before)
            if expired := await db.recordings.expire(now):
                log.info("recordings expired", recordings=expired)
        await pool_history.purge(self._database, now, self._settings)
        return purged

    async def _end_abandoned(self, now: float) -> int:
        """End sessions suspended, unchanged and unwatched for `abandoned_after_s`. Returns how many.

        `now`: the aging time, Unix seconds.
        """
        limit_s = self._settings.abandoned_after_s
        if not limit_s:
            return 0
        since = await watching_since(self._hot, self._clock)
        if since is None or now - since < limit_s:
            # It is unknown who watched before that time.
            return 0
        async with self._database.transaction() as db:
            rows = await db.sessions.suspended_since(now - limit_s, ABANDONED)
        reason = f"no viewer for {limit_s:g} s"
        ended = 0
        for row in await self._playheads.onto(rows, now):
            # None: it is unknown who watches while Redis is down.
            if row.unwatched_s is not None and row.unwatched_s >= limit_s:
                after = await self._sessions.abandon(row, reason)
                ended += after.phase.ended and after.version == row.version + 1
        return ended

    async def _purge_chunks(self, now: float) -> int:
        purged = 0
        while True:
            async with self._database.transaction() as db:
                due = await db.progress.unpurged(now - self._settings.chunk_retention_s, BATCH)
            if not due:
                return purged
            await self._log.sessions(due)
            async with self._database.transaction() as db:
                await db.progress.mark_purged(due, now)
            purged += len(due)

    async def _aged_to(self) -> float:
        """Advance the aging time and return it, Unix seconds: see `core.aging`.

        Each instance advances it by at most the time that it has measured since the last advance.
        """
        async with self._database.transaction() as db:
            before = await db.clocks.get(RETENTION)
            monotonic, wall = self._clock.monotonic(), self._clock.wall()
            if before is None:
                after = aging.first(wall)
            else:
                after = aging.went_on(before, wall, self._elapsed_s(before, monotonic))
            await db.clocks.put(RETENTION, after)
        self._last = (after, monotonic)
        behind_s = wall - after.aged_to
        if behind_s > BEHIND_S and behind_s > self._told_s * 1.5:
            log.warning(
                "the wall clock stepped forward or no state store was running: ages do not advance",
                behind_s=behind_s,
            )
        self._told_s = max(behind_s, 0.0)
        return after.aged_to

    def _elapsed_s(self, before: aging.Aging, monotonic: float) -> float | None:
        if self._last is None:
            return None
        mine, at = self._last
        if mine == before:
            return monotonic - at
        # Another instance has advanced it meanwhile: use the rest of this instance's own measurement.
        return max(monotonic - at - max(before.aged_to - mine.aged_to, 0.0), 0.0)
