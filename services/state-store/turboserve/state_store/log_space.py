"""Watches the room in the log: announces when it is low, and makes room before the log is full."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing

import nats
from nats.js import api

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.canaries import SpaceLevel
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store import metrics
from turboserve.state_store.core import space
from turboserve.state_store.core.space import Disk, Shares
from turboserve.state_store.log_histories import LogHistories
from turboserve.state_store.log_purge import LogPurge
from turboserve.state_store.ports.database import Database
from turboserve.state_store.publish.canaries import Canaries
from turboserve.state_store.settings import Settings
from turboserve.subjects import CHUNKS, EVENTS
from turboserve.telemetry_names import STREAM

BATCH = 16
ROUNDS = 12
"""Maximum halvings of the longest histories in one check: enough to get from the longest to the floor."""
_LEVELS = tuple(SpaceLevel)

log = logs.get("log-space")


class LogSpace:
    """Watches and makes room. Several instances may run this, since each removal can be repeated."""

    def __init__(
        self,
        database: Database,
        bus: Bus,
        clock: Clock,
        canaries: Canaries,
        histories: LogHistories,
        settings: Settings,
    ) -> None:
        self._database, self._bus, self._clock = database, bus, clock
        self._canaries, self._histories, self._settings = canaries, histories, settings
        self._purge = LogPurge(bus)
        self._shares = Shares(settings.log_low_share, settings.log_scarce_share, settings.log_full_share)
        self._level = SpaceLevel.ENOUGH
        self._detail: str | None = None

    def warning(self) -> str | None:
        """Return the warning for /readyz; None while there is enough room."""
        return self._detail

    async def run(self) -> None:
        """Check the room, and make some if needed; never returns."""
        while True:
            try:
                await self.check()
            except TurboServeError as error:
                log.warning("log space not checked", error=error.detail)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                log.warning("log space not checked", error=repr(error))
            await asyncio.sleep(self._settings.canary_interval_s)

    async def check(self) -> SpaceLevel:
        """Announce the level, make room if there is little and announce again. Returns the last level."""
        level = await self._look()
        if level is not SpaceLevel.ENOUGH:
            await self._make_room(level)
            await self._look()
        return self._level

    async def _look(self) -> SpaceLevel:
        streams = [await self._state(name) for name in (CHUNKS, EVENTS)]
        levels = [space.stream_level(used, limit, self._shares) for _, used, limit, _ in streams]
        disk = self._disk()
        levels.append(space.disk_level(disk, self._settings.log_disk_reserve_bytes))
        if self._canaries.without_room:
            # The broker reached its own limit, which it does not report, before the limits of the streams.
            levels.append(SpaceLevel.FULL)
        level = space.worst(levels)
        fills = {name: used / limit for name, used, limit, _ in streams if limit > 0}
        for name, fill in fills.items():
            metrics.log_fill.set(fill, {STREAM: name})
        if disk is not None:
            metrics.log_disk_free.set(disk.free)
        metrics.log_space.set(_LEVELS.index(level))
        self._announce(level, fills, disk)
        return level

    def _announce(self, level: SpaceLevel, fills: dict[str, float], disk: Disk | None) -> None:
        self._canaries.space = level
        numbers = {f"{name.lower()}_fill": round(fill, 3) for name, fill in fills.items()}
        if disk is not None:
            numbers["disk_free_bytes"] = disk.free
        self._detail = None
        if level is not SpaceLevel.ENOUGH:
            self._detail = ", ".join([level.value, *(f"{name} {value}" for name, value in numbers.items())])
        if level is not self._level:
            worse = _LEVELS.index(level) > _LEVELS.index(self._level)
            (log.warning if worse else log.info)("log space changed", space=level.value, **numbers)
            self._level = level

    def _disk(self) -> Disk | None:
        if self._settings.log_directory is None:
            return None
        try:
            usage = shutil.disk_usage(self._settings.log_directory)
        except OSError:
            # The folder does not exist yet, or this user may not read it: only the streams' limits count.
            return None
        return Disk(usage.free, usage.total)

    async def _state(self, stream: str) -> tuple[str, int, int, api.StreamState]:
        info = await self._bus.jetstream(3.0).stream_info(stream)
        return stream, info.state.bytes, max(0, info.config.max_bytes or 0), info.state

    async def _make_room(self, level: SpaceLevel) -> None:
        await self._drop_old_events()
        if await self._enough(self._shares.low):
            return
        try:
            await self._histories.trim()
        except TurboServeError as error:
            # The other steps need no owners.
            log.warning("chunk histories not trimmed", error=error.detail)
        if await self._remove_finished(level):
            return
        # Only live sessions are left.
        if level in (SpaceLevel.SCARCE, SpaceLevel.FULL):
            await self._shorten_live(level)

    async def _drop_old_events(self) -> None:
        """Remove the oldest events, whatever their subjects. Rows keep the state without them."""
        _, used, limit, state = await self._state(EVENTS)
        if space.stream_level(used, limit, self._shares) is SpaceLevel.ENOUGH:
            return
        remove = space.excess(used, limit, self._shares.low)
        keep_from = space.oldest_part(state.first_seq, state.last_seq, used, remove)
        await self._purge.events_before(keep_from)
        log.warning("old events removed for room", before=keep_from)

    async def _remove_finished(self, level: SpaceLevel) -> bool:
        """Remove finished sessions, longest ended first, until there is room. Returns whether there is."""
        if await self._enough(self._shares.low):
            return True
        removed = 0
        try:
            async with aclosing(self._finished()) as sessions:
                async for session in sessions:
                    await self._purge.sessions([session])
                    async with self._database.transaction() as db:
                        await db.progress.mark_purged([session], self._clock.wall())
                    removed += 1
                    if await self._enough(self._shares.low):
                        return True
        except TurboServeError as error:
            # Without rows it is unknown which sessions have ended. Shortening needs no rows.
            log.warning("finished sessions not listed", error=error.detail)
        finally:
            if removed:
                metrics.log_purged.add(removed)
                log.warning("finished sessions removed for room", sessions=removed, space=level.value)
        return False

    async def _finished(self) -> AsyncGenerator[str]:
        """Yield sessions whose chunks are not needed. The caller removes each before it takes the next."""
        while True:
            ended_before = self._clock.wall() - self._settings.log_guard_s
            async with self._database.transaction() as db:
                due = await db.progress.unpurged(ended_before, BATCH)
            if not due:
                break
            for session in due:
                yield session
        logged = await self._purge.sessions_in_log()
        async with self._database.transaction() as db:
            unknown = await db.progress.unknown(logged)
        if unknown:
            log.warning("sessions without a row are removed from the log", sessions=len(unknown))
        for session in unknown:
            yield session

    async def _shorten_live(self, level: SpaceLevel) -> None:
        """Halve the longest histories until there is room or all are at the floor."""
        shortened = 0
        for _ in range(ROUNDS):
            if await self._enough(self._shares.scarce):
                break
            sessions = await self._purge.chunk_counts()
            totals = {session: sum(subjects.values()) for session, subjects in sessions.items()}
            cuts = space.shortened(totals, self._settings.log_chunks_floor)
            if not cuts:
                break
            for session, keep in cuts.items():
                await self._histories.shorten(session, sessions[session], keep)
            shortened += len(cuts)
        if shortened:
            log.warning("old chunks of live sessions removed for room", cuts=shortened, space=level.value)

    async def _enough(self, begins: float) -> bool:
        """Return whether enough was removed, after removal began at the share `begins`."""
        if self._canaries.without_room:
            await self._canaries.append_all()
        _, used, limit, _ = await self._state(CHUNKS)
        disk = space.disk_level(self._disk(), self._settings.log_disk_reserve_bytes)
        full = bool(self._canaries.without_room)
        return space.excess(used, limit, begins) == 0 and disk is SpaceLevel.ENOUGH and not full
