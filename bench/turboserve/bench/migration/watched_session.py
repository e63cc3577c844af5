"""One session with a viewer, migrated back and forth, and the delay of each chunk."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from turboserve.bench.migration.stack import WORKERS, MigrationStack
from turboserve.bench.report import BenchError
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.errors import ConflictError, UnavailableError
from turboserve.contracts.requests import (
    BeginMigration,
    CommitMigration,
    CreateSession,
    EndSession,
    PlaceSession,
    SessionRef,
)
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import MigrationReport, MigrationStage, Playhead
from turboserve.ids import new_id
from turboserve.subject_types import Endpoint, Req, Resp
from turboserve.subjects import (
    BEGIN_MIGRATION,
    CHUNK,
    COMMIT_MIGRATION,
    CREATE_SESSION,
    END_SESSION,
    GET_SESSION,
    PLACE_SESSION,
    PLAYHEAD,
)
from turboserve.tasks import stop

LIMIT_S = 300.0
WAIT_TIMEOUT_S = 60.0
PLAYHEAD_S = 0.1
PROMPT = "a red circle moves right"
SETTLED = 6
"""The first chunks are made at full speed until the lead is reached, so they are never due."""


@dataclass
class LoggedChunk:
    """A chunk as it came out of the log."""

    at: float
    header: ChunkHeader
    data: bytes


@dataclass
class WatchedSession:
    """A session, its chunks, and its viewer, who never stops."""

    stage: MigrationStack
    session: str = field(default_factory=lambda: new_id("ses"))
    chunks: dict[int, LoggedChunk] = field(default_factory=dict)
    began_at: float = 0.0

    async def begin(self, worker: str, seed: int) -> None:
        """Create and place the session, and watch from its first chunk on."""
        bus = self.stage.bus
        self._subscription = await bus.client.subscribe(CHUNK.live(self.session), cb=self._arrived)
        await self._ask(
            CREATE_SESSION,
            CreateSession(id=self.session, tenant="bench", model="toyworld", prompt=PROMPT, seed=seed),
        )
        record = await self.record()
        decision = Decision(session=self.session, epoch=1, worker=worker, kind="place", reason="bench")
        await self._ask(
            PLACE_SESSION,
            PlaceSession(
                session=self.session, expected_version=record.version, worker=worker, decision=decision
            ),
        )
        await self.until(1)
        self.began_at = self.chunks[0].at
        self._watching = asyncio.create_task(self._watch())

    async def end(self) -> None:
        """End the session and its viewer."""
        await stop(self._watching)
        with suppress(asyncio.CancelledError):
            self._watching.result()
        await self._subscription.unsubscribe()
        await self._ask(END_SESSION, EndSession(session=self.session))

    async def record(self) -> SessionRecord:
        return await self._ask(GET_SESSION, SessionRef(session=self.session))

    async def until(self, count: int) -> None:
        """Wait until the session has `count` chunks."""
        end = time.monotonic() + LIMIT_S
        while len(self.chunks) < count:
            if time.monotonic() > end:
                raise BenchError(f"only {len(self.chunks)} of {count} chunks within {LIMIT_S:g} s")
            await asyncio.sleep(0.02)

    async def migrate(self) -> MigrationReport:
        """Migrate to the other worker, as the scheduler would."""
        record = await self.record()
        target = WORKERS[1] if record.worker == WORKERS[0] else WORKERS[0]
        decision = Decision(
            session=self.session, epoch=record.epoch, worker=target, kind="migrate", reason="bench"
        )
        begin = BeginMigration(
            session=self.session, expected_version=record.version, target=target, decision=decision
        )
        try:
            row = await self._ask(BEGIN_MIGRATION, begin)
        except ConflictError:
            # An attempt without an answer may have taken effect: the row decides.
            row = await self.record()
        assert row.migration is not None
        report = await self._verified(target, row.migration)
        await self._ask(
            COMMIT_MIGRATION,
            CommitMigration(
                session=self.session,
                migration=row.migration,
                target=target,
                next_chunk=report.next_chunk,
                digest=report.digest,
            ),
        )
        return report

    def lateness(self, max_lead_s: float) -> dict[int, float]:
        """Return the seconds from when each settled chunk became due to its arrival."""
        return {
            index: chunk.at - (self.began_at + chunk.header.start_s - max_lead_s)
            for index, chunk in self.chunks.items()
            if index >= SETTLED
        }

    async def _ask(self, endpoint: Endpoint[Req, Resp], request: Req) -> Resp:
        """Send a request, and repeat it while a busy machine does not answer: requests are not measured."""
        end = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            try:
                return await self.stage.bus.call(endpoint, request, deadline_s=WAIT_TIMEOUT_S)
            except UnavailableError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.5)

    async def _verified(self, target: str, migration: int) -> MigrationReport:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for report in self.stage.loads[target].migrations:
                if (report.session, report.migration) == (self.session, migration):
                    if report.stage is MigrationStage.VERIFIED:
                        return report
                    if report.stage is MigrationStage.FAILED:
                        raise BenchError(f"a migration failed: {report.reason}")
            await asyncio.sleep(0.001)
        raise BenchError(f"a migration was not verified within {LIMIT_S:g} s")

    async def _watch(self) -> None:
        while True:
            at = time.monotonic() - self.began_at
            playhead = Playhead(session=self.session, playhead_s=max(0.0, at), viewers=1)
            await self.stage.bus.publish(PLAYHEAD, self.session, playhead)
            await asyncio.sleep(PLAYHEAD_S)

    async def _arrived(self, message: Msg) -> None:
        now = time.monotonic()
        header = ChunkHeader.from_headers(message.headers or {})
        self.chunks.setdefault(header.index, LoggedChunk(now, header, message.data))


def keeps_up(lateness: dict[int, float], chunk_s: float) -> bool:
    """Return whether chunks came as fast as they were played, `chunk_s` seconds of video each.

    The criterion is that nine of ten chunks were late by less than one chunk. Otherwise the machine is too
    slow or too busy, and a stall means nothing.
    """
    late = sorted(lateness.values())
    return late[int(0.9 * (len(late) - 1))] < chunk_s


def stalls(lateness: dict[int, float], migrated: list[int]) -> list[float]:
    """Return the delay of the first chunk after each migration beyond the median of untouched chunks."""
    touched = {index + after for index in migrated for after in (0, 1)}
    usual = statistics.median(late for index, late in lateness.items() if index not in touched)
    return [max(0.0, lateness[index] - usual) for index in migrated if index in lateness]
