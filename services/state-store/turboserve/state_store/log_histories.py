"""Trims the log of a session whose chunks are on the subjects of several identities.

The broker keeps the newest chunks of each subject. A session that migrates between identities has a history
on the subject of each. An identity may also append chunks of sessions that it never owned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import nats

from turboserve import logs
from turboserve.bus import Bus, Owners
from turboserve.contracts.errors import TurboServeError
from turboserve.state_store import metrics
from turboserve.state_store.log_purge import LogPurge
from turboserve.state_store.settings import Settings
from turboserve.subjects import CHUNK

log = logs.get("log-histories")


class LogHistories:
    """Trims histories. Several instances may run this, since each removal can be repeated."""

    def __init__(self, bus: Bus, owners: Owners, settings: Settings) -> None:
        self._purge, self._owners, self._settings = LogPurge(bus), owners, settings

    async def run(self) -> None:
        """Trim all histories every `purge_s`; never returns."""
        while True:
            try:
                await self.trim()
            except TurboServeError as error:
                log.warning("chunk histories not trimmed", error=error.detail)
            except (TimeoutError, OSError, nats.errors.Error) as error:
                log.warning("chunk histories not trimmed", error=repr(error))
            await asyncio.sleep(self._settings.purge_s)

    async def trim(self) -> None:
        """Remove chunks that no owner appended, and each session's stints before its newest `chunks_kept`.

        A stint is removed only as a whole, so that fewer than `chunks_kept` further chunks may stay.
        """
        for session, counts in (await self._purge.chunk_counts()).items():
            kept = await self._without_strangers(session, counts)
            if len(kept) > 1 and sum(counts[subject] for subject in kept) > self._settings.chunks_kept:
                await self._shorten(session)

    async def shorten(self, session: str, subjects: Collection[str], keep: int) -> None:
        """Keep the newest `keep` chunks of a session, whose chunks are on `subjects`.

        The oldest chunks over all subjects are removed. To shorten each subject by itself would leave gaps.
        """
        newest = await self._owners.newest(session) if len(subjects) > 1 else None
        if newest is None:
            for subject in subjects:
                await self._purge.shorten(subject, keep)
            return
        wanted = newest[0].index - keep + 1
        low, high = 1, newest[1].sequence
        while low < high:
            middle = (low + high) // 2
            found = await self._owners.first(session, middle)
            if found is None or found[0].index >= wanted:
                high = middle
            else:
                low = found[1].sequence + 1
        await self._purge.chunks_before(session, low)

    async def _without_strangers(self, session: str, subjects: Iterable[str]) -> list[str]:
        """Remove the chunks of identities that never owned `session`. Returns the other subjects."""
        identities = {subject: CHUNK.identity(subject) for subject in subjects}
        named = {identity for identity in identities.values() if identity is not None}
        strangers = await self._owners.strangers(session, named)
        for subject, identity in identities.items():
            if identity in strangers:
                await self._purge.chunks_on(subject)
                metrics.foreign_histories.add(1)
                log.warning("chunks of no owner removed", session=session, identity=identity)
        return [subject for subject, identity in identities.items() if identity not in strangers]

    async def _shorten(self, session: str) -> None:
        newest = await self._owners.newest(session)
        if newest is None:
            return
        needed = newest[0].index - self._settings.chunks_kept + 1
        cut = 0
        async for header, entry in self._owners.stints(session):
            cut = entry.sequence
            if header.index <= needed:
                break
        if cut:
            await self._purge.chunks_before(session, cut)
