"""Where playback is, and when someone last watched: reported often, written to Redis in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from turboserve.audience import Audience
from turboserve.clock import Clock
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Playhead
from turboserve.state_store.hot.guard import HotStoreGuard
from turboserve.state_store.ports.hot import HotStore

FLUSH_S = 0.1
TTL_S = 86_400
SINCE_TTL_S = 30 * 86_400
STEP_S = 1.0
"""A wall clock that moves this much more or less than time has stepped."""
MEMORY = 20_000
"""Sessions remembered here, for while Redis is down; the longest unheard of are dropped first."""


@dataclass(frozen=True)
class PlayheadSample:
    """As of the last report; `watched_at` is the store's wall clock at the last one with a viewer."""

    playhead_s: float
    """Over all gateways: see `Audience`."""
    watched_at: float
    at: float


class Playheads:
    """The freshest playhead of each session, from this instance's memory and the others' by way of Redis."""

    def __init__(self, hot: HotStoreGuard, clock: Clock, ttl_s: int = TTL_S) -> None:
        """`ttl_s`: for how long Redis remembers a session that nobody reports of."""
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
        """The wall clock. Where it has stepped, what is remembered here steps with it: nobody stopped
        watching because a clock was set."""
        wall, monotonic = self._clock.wall(), self._clock.monotonic()
        step_s = wall - monotonic - self._offset_s
        if abs(step_s) > STEP_S:
            self._offset_s = wall - monotonic
            self._seen = {
                session: replace(
                    seen,
                    watched_at=max(seen.watched_at + step_s, 1.0) if seen.watched_at else 0.0,
                    at=seen.at + step_s,
                )
                for session, seen in self._seen.items()
            }
            self._dirty |= set(self._seen)
        return wall

    def known(self, session: str) -> float | None:
        """The playhead that this instance has heard of, seconds."""
        seen = self._seen.get(session)
        return None if seen is None else seen.playhead_s

    def apply_to(self, record: SessionRecord) -> SessionRecord:
        """The record with the playhead that this instance has heard of: without a word to Redis."""
        seen = self._seen.get(record.id)
        return record if seen is None else record.model_copy(update={"playhead_s": seen.playhead_s})

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
        for session, row in zip(sessions, rows or [nothing] * len(sessions), strict=True):
            playhead, watched, at = row
            mine = self._seen.get(session)
            if at is None and mine is None:
                continue
            stored = PlayheadSample(playhead or 0.0, watched or 0.0, at or 0.0)
            newest = stored if mine is None or stored.at > mine.at else mine
            watched_at = max(stored.watched_at, mine.watched_at if mine else 0.0)
            found[session] = PlayheadSample(newest.playhead_s, watched_at, newest.at)
        return found

    async def onto(self, records: Iterable[SessionRecord], wall: float | None = None) -> list[SessionRecord]:
        """The records with the freshest playhead, and with how long nobody has watched until `wall` (None:
        now).

        `unwatched_s` counts from the last viewer or the row's last change, whichever is later; it is None
        while Redis is down, since then nobody knows.
        """
        rows = list(records)
        self._wall()
        seen = await self._read([row.id for row in rows if not row.phase.ended])
        known = not self._hot.backing_off
        now = self._wall() if wall is None else wall
        out: list[SessionRecord] = []
        for row in rows:
            last = seen.get(row.id)
            update: dict[str, float | None] = {}
            if last is not None:
                update["playhead_s"] = last.playhead_s
            if known and not row.phase.ended:
                update["unwatched_s"] = max(0.0, now - max(last.watched_at if last else 0.0, row.updated_at))
            out.append(row.model_copy(update=update) if update else row)
        return out

    async def watched_s(self, session: str) -> float | None:
        """For how long nobody has watched, as far as reports say; None: no report of a viewer is known."""
        self._wall()
        seen = (await self._read([session])).get(session)
        return max(0.0, self._clock.wall() - seen.watched_at) if seen and seen.watched_at else None

    async def watching_since(self) -> float | None:
        """Since when Redis has kept who watches, wall-clock seconds: it may have come back empty, or with
        what it held before nobody could watch. None: it is away."""

        async def run(store: HotStore) -> float:
            # A restart that keeps the keys is a gap all the same.
            key = since_key(await store.run_id())
            return await store.first(key, self._clock.wall(), ttl_s=SINCE_TTL_S)

        return await self._hot.attempt(run)

    async def forget(self, session: str) -> None:
        self._seen.pop(session, None)
        self._audiences.pop(session, None)
        self._dirty.discard(session)

        await self._hot.attempt(lambda store: store.delete(_key(session)))


def since_key(run: str) -> str:
    """Where one run of Redis keeps when it began to be told who watches."""
    return f"watching_since:{run}"


def _key(session: str) -> str:
    return f"playhead:{session}"
