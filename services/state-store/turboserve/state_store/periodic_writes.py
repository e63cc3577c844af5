"""Counts that are kept in memory and written at intervals: the chunks of workers, and use by viewers."""

from __future__ import annotations

import abc
import asyncio

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.workers import Playhead
from turboserve.state_store.core.chunk_history import rows_of
from turboserve.state_store.core.tenants import hour_of
from turboserve.state_store.ports.database import Database
from turboserve.state_store.ports.records import ViewerUse

CHUNKS_S = 2.0
"""Interval at which the history of chunks is written, seconds."""
VIEWERS_S = 5.0
"""Interval at which use by viewers is written, seconds."""
CLOSE_S = 1.0
"""Deadline of the last write when the service stops, seconds."""
ROWS_AT_ONCE = 500
"""Maximum number of rows of the history of chunks in one statement."""

log = logs.get("accounting")


class PeriodicWriter(abc.ABC):
    """What one instance has counted and not written yet.

    A crash loses at most the counts of one interval. An orderly stop loses none if the database answers.
    """

    def __init__(self, database: Database, clock: Clock, interval_s: float, what: str) -> None:
        """`what`: name of the counts in the log."""
        self._database, self._clock = database, clock
        self._interval_s, self._what = interval_s, what
        self._writing = asyncio.Lock()
        """Held while counts are written, so that `close` waits for a write that is under way."""

    @abc.abstractmethod
    async def _write(self) -> None:
        """Take what is not written yet and write it. Raises TurboServeError."""

    async def run(self) -> None:
        """Write at intervals; never returns."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def close(self) -> None:
        """Write what is left, within `CLOSE_S`."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.flush()
        except TimeoutError:
            log.warning("counts are lost", what=self._what, limit_s=CLOSE_S)

    async def flush(self) -> None:
        """Write what is not written yet. If that fails, the counts are lost."""
        async with self._writing:
            try:
                await self._write()
            except TurboServeError as error:
                # The outcome of a commit may be unknown: better too little than the same counts twice.
                log.warning("counts are lost", what=self._what, error=error.detail)


class WorkerChunks(PeriodicWriter):
    """Chunks that the log has accepted, for the history. The instance that counts chunks adds them."""

    def __init__(self, database: Database, clock: Clock, *, enabled: bool) -> None:
        super().__init__(database, clock, CHUNKS_S, "chunks in the history")
        self._enabled = enabled
        self._chunks: list[tuple[ChunkHeader, float]] = []
        """Chunks that are not written yet, each with when it was read, Unix seconds."""

    def add(self, header: ChunkHeader) -> None:
        if self._enabled:
            self._chunks.append((header, self._clock.wall()))

    async def _write(self) -> None:
        chunks, self._chunks = self._chunks, []
        rows = rows_of(chunks)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            async with self._database.transaction(durable=False) as db:
                await db.pool_history.add_chunks(rows[first : first + ROWS_AT_ONCE])


class ViewerUsage(PeriodicWriter):
    """The time of viewers and what they were sent, as gateways report it, for their tenants' usage.

    Each instance adds what it has received.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, clock, VIEWERS_S, "use by viewers")
        self._used: dict[str, ViewerUse] = {}
        """What is not written yet, by session."""

    def add(self, report: Playhead) -> None:
        """Take what viewers have used since the gateway's report before."""
        if report.viewer_s or report.delivered_bytes:
            new = ViewerUse(report.viewer_s, report.delivered_bytes)
            self._used[report.session] = self._used.get(report.session, ViewerUse()) + new

    async def _write(self) -> None:
        used, self._used = self._used, {}
        if not used:
            return
        async with self._database.transaction(durable=False) as db:
            await db.progress.add_viewer_use(hour_of(self._clock.wall()), used)
