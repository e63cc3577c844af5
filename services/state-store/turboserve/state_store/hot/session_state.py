"""Playheads and latents in the hot store, all of which may be lost, and the guard in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from turboserve import logs
from turboserve.audience import Audience
from turboserve.bus import Owners, skip
from turboserve.clock import Clock
from turboserve.contracts.chunks import LatentsHeader
from turboserve.contracts.errors import NotFoundError, UnavailableError
from turboserve.contracts.requests import GetLatents
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.versions import SchemaVersionError
from turboserve.contracts.workers import Playhead
from turboserve.state_store import metrics
from turboserve.state_store.ports.hot import HotRefusedError, HotStore, HotUnavailableError
from turboserve.static_frozen import statically_frozen
from turboserve.subjects import LATENTS

ATTEMPT_S = 0.5
"""Deadline of one attempt, which may consist of several commands, seconds."""
REST_S = 1.0

T = TypeVar("T")
log = logs.get("redis")


class HotStoreGuard:
    """Access to the hot store, with short deadlines and a pause after a failure.

    Callers get None while the store is down, and continue without it.
    """

    def __init__(self, store: HotStore, clock: Clock) -> None:
        self.store, self._clock = store, clock
        self._rest_until = 0.0
        self._quiet_until = 0.0
        self.refuses = False
        """Whether the store refused the last probe: see `HotStoreProbe`."""

    async def attempt(self, work: Callable[[HotStore], Awaitable[T]]) -> T | None:
        """Return the result of `work`; None if the store refuses or does not answer, now or a moment ago."""
        if self._clock.monotonic() < self._rest_until:
            return None
        try:
            async with asyncio.timeout(ATTEMPT_S):
                result = await work(self.store)
        except (HotUnavailableError, OSError) as error:
            # TimeoutError is an OSError.
            if self._rest_until == 0.0:
                log.warning("Redis does not answer; continuing without it", error=repr(error))
            self._rest_until = self._clock.monotonic() + REST_S
            return None
        except HotRefusedError as error:
            # Out of memory or disk (MISCONF): Redis may accept the write later, and still answers reads.
            if self._clock.monotonic() >= self._quiet_until:
                self._quiet_until = self._clock.monotonic() + REST_S
                log.warning("Redis refused a command", error=str(error))
            return None
        if self._rest_until:
            log.info("Redis answers again")
            self._rest_until = 0.0
        return result

    @property
    def backing_off(self) -> bool:
        """Whether the store's content may be old: the store does not answer or accepts no writes."""
        return self._rest_until > 0.0 or self.refuses

    async def close(self) -> None:
        await self.store.close()


FLUSH_S = 0.1
TTL_S = 86_400
STEP_S = 1.0
"""A difference in seconds between wall and monotonic clock from which on the wall clock has stepped."""
MEMORY = 20_000
"""Number of sessions in memory, for use while Redis is down. Those reported longest ago are dropped first."""


@statically_frozen()
class PlayheadSample:
    """The last report of a session. `watched_at` is the store's wall clock at the last one with a viewer."""

    playhead_s: float
    """Playhead over all gateways: see `Audience`."""
    watched_at: float
    at: float


class Playheads:
    """The newest playhead of each session, from the memory of this instance and, by Redis, of the others."""

    def __init__(self, hot: HotStoreGuard, clock: Clock, ttl_s: int = TTL_S) -> None:
        """`ttl_s`: time for which Redis keeps a session without reports, seconds."""
        self._hot, self._clock, self._ttl_s = hot, clock, ttl_s
        self._seen: dict[str, PlayheadSample] = {}
        self._audiences: dict[str, Audience] = {}
        self._dirty: set[str] = set()
        self._offset_s = clock.wall() - clock.monotonic()

    async def report(self, message: Playhead, _: bytes) -> None:
        now = self._wall()
        before = self._seen.pop(message.session, None)
        watched_at = now if message.viewers else (before.watched_at if before else 0.0)
        audience = self._audiences.setdefault(message.session, Audience())
        together = audience.update(message, self._clock.monotonic())
        self._seen[message.session] = PlayheadSample(together.playhead_s, watched_at, now)
        self._dirty.add(message.session)
        if len(self._seen) > MEMORY:
            oldest = next(iter(self._seen))
            del self._seen[oldest], self._audiences[oldest]

    def _wall(self) -> float:
        """Return the wall clock. If it has stepped, move the remembered times with it.

        A clock that was set must not look like a pause in watching.
        """
        wall, monotonic = self._clock.wall(), self._clock.monotonic()
        step_s = wall - monotonic - self._offset_s
        if abs(step_s) > STEP_S:
            self._offset_s = wall - monotonic
            for session, seen in self._seen.items():
                watched_at = max(seen.watched_at + step_s, 1.0) if seen.watched_at else 0.0
                self._seen[session] = PlayheadSample(seen.playhead_s, watched_at, seen.at + step_s)
            self._dirty |= set(self._seen)
        return wall

    def known(self, session: str) -> float | None:
        """Return the playhead in this instance's memory, seconds."""
        return None if (seen := self._seen.get(session)) is None else seen.playhead_s

    def apply_to(self, record: SessionRecord) -> SessionRecord:
        """Return the record with the playhead in this instance's memory and `waiting_s`, without Redis."""
        seen = self._seen.get(record.id)
        update = self._waiting(record, self._wall())
        if seen is not None:
            update["playhead_s"] = seen.playhead_s
        return record.model_copy(update=update) if update else record

    @staticmethod
    def _waiting(record: SessionRecord, now: float) -> dict[str, float]:
        """Return `waiting_s` as of `now`, as an update of the record."""
        since = record.requested_at
        return {} if since is None or record.phase.ended else {"waiting_s": max(0.0, now - since)}

    async def flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._dirty:
                await self.flush()

    async def flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        batch = {session: self._seen[session] for session in dirty if session in self._seen}
        hashes: dict[str, dict[str, float]] = {}
        for session, seen in batch.items():
            fields = {"playhead_s": seen.playhead_s, "at": seen.at}
            if seen.watched_at:
                fields["watched_at"] = seen.watched_at
            hashes[_key(session)] = fields

        async def run(store: HotStore) -> bool:
            await store.write(hashes, ttl_s=self._ttl_s)
            return True

        if await self._hot.attempt(run) is None:
            self._dirty |= batch.keys()

    async def _read(self, sessions: Sequence[str]) -> dict[str, PlayheadSample]:
        keys = [_key(session) for session in sessions]
        fields = ("playhead_s", "watched_at", "at")
        rows = await self._hot.attempt(lambda store: store.read(keys, fields)) if sessions else None
        found: dict[str, PlayheadSample] = {}
        nothing: list[float | None] = [None, None, None]
        for session, (playhead, watched, at) in zip(sessions, rows or [nothing] * len(sessions), strict=True):
            mine = self._seen.get(session)
            if at is None and mine is None:
                continue
            stored = PlayheadSample(playhead or 0.0, watched or 0.0, at or 0.0)
            newest = stored if mine is None or stored.at > mine.at else mine
            watched_at = max(stored.watched_at, mine.watched_at if mine else 0.0)
            found[session] = PlayheadSample(newest.playhead_s, watched_at, newest.at)
        return found

    async def onto(self, records: Iterable[SessionRecord], wall: float | None = None) -> list[SessionRecord]:
        """Return the records with playhead, `waiting_s` and `unwatched_s` as of `wall` (None: now).

        `unwatched_s` counts from the last viewer or the row's last change, whichever is later. It is None
        while Redis is down, since it is unknown then.
        """
        rows = list(records)
        self._wall()
        seen = await self._read([row.id for row in rows if not row.phase.ended])
        now = self._wall() if wall is None else wall
        out: list[SessionRecord] = []
        for row in rows:
            last = seen.get(row.id)
            update = self._waiting(row, now)
            if last is not None:
                update["playhead_s"] = last.playhead_s
            if not self._hot.backing_off and not row.phase.ended:
                update["unwatched_s"] = max(0.0, now - max(last.watched_at if last else 0.0, row.updated_at))
            out.append(row.model_copy(update=update) if update else row)
        return out

    async def newest(self, session: str) -> float | None:
        """Return the newest playhead that any instance heard of, seconds; None if none is known."""
        return next((seen.playhead_s for seen in (await self._read([session])).values()), None)

    async def watched_s(self, session: str) -> float | None:
        """Return the seconds since the last report of a viewer; None if none is known."""
        self._wall()
        seen = (await self._read([session])).get(session)
        return max(0.0, self._clock.wall() - seen.watched_at) if seen and seen.watched_at else None

    async def forget(self, session: str) -> None:
        self._seen.pop(session, None)
        self._audiences.pop(session, None)
        self._dirty.discard(session)
        await self._hot.attempt(lambda store: store.delete(_key(session)))


def _key(session: str) -> str:
    return f"playhead:{session}"


class Latents:
    """Stores latents under one key per session: chunk index → header line, then raw bytes.

    Late latents of a former owner replace and remove nothing. Chunk 0, the sink, is always kept.
    """

    def __init__(self, hot: HotStoreGuard, *, kept: int, ttl_s: float) -> None:
        self._hot, self._kept, self._ttl_s = hot, kept, int(ttl_s)

    async def keep_of_owner(self, owners: Owners, header: LatentsHeader, data: bytes) -> None:
        """Keep the latents if the worker that sent them owns or owned the session at that epoch."""
        try:
            owned = bool(header.worker) and await owners.has_owned(
                header.session, header.epoch, str(header.worker)
            )
        except UnavailableError:
            # The log does not answer. Without these latents, a takeover continues from the kept ones.
            return
        if owned:
            await self.keep(header, data)
        else:
            metrics.foreign_latents.add(1)

    async def keep(self, header: LatentsHeader, data: bytes) -> None:
        value = header.to_bytes() + b"\n" + data
        key = _latents_key(header.session)

        async def run(store: HotStore) -> None:
            await store.keep_latents(
                key, header.index, header.epoch, value, kept=self._kept, ttl_s=self._ttl_s
            )

        await self._hot.attempt(run)

    async def get(self, request: GetLatents) -> tuple[LatentsHeader, bytes]:
        """Return kept latents. Without them, the caller continues from an empty context.

        Raises NotFoundError if there are none, Redis is down, or they are of another MAJOR schema version.
        """
        value = await self._hot.attempt(
            lambda store: store.latents(_latents_key(request.session), request.index)
        )
        if value is None:
            raise NotFoundError(
                f"the latents of chunk {request.index} of session {request.session} are not kept",
                field="index",
                limit=self._kept,
            )
        head, _, data = value.partition(b"\n")
        try:
            return LatentsHeader.from_bytes(head), data
        except SchemaVersionError as error:
            skip(LATENTS.of(request.worker or "*"), error)
            raise NotFoundError(
                f"the latents of chunk {request.index} of session {request.session}: {error}", field="index"
            ) from None

    async def forget(self, session: str) -> None:
        await self._hot.attempt(lambda store: store.delete(_latents_key(session)))


def _latents_key(session: str) -> str:
    return f"latents:{session}"
