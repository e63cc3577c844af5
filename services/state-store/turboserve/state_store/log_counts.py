"""How many chunks of a session the log has. Rows count them later, and not while no instance counts."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from turboserve.bus import Owners
from turboserve.contracts.errors import TurboServeError


class LogCounts:
    """Reads the newest chunks of sessions."""

    def __init__(self, owners: Owners, limit_s: float) -> None:
        """`limit_s`: time of one call at most, seconds."""
        self._owners, self._limit_s = owners, limit_s

    async def of(self, sessions: Collection[str]) -> dict[str, int]:
        """Return the index after the newest chunk that an owner of each session wrote.

        Sessions without a chunk are left out, and so is what the broker does not answer in time.
        """
        found: dict[str, int] = {}
        with suppress(TurboServeError, TimeoutError):
            async with asyncio.timeout(self._limit_s):
                for session in sessions:
                    newest = await self._owners.newest(session)
                    if newest is not None:
                        found[session] = newest[0].index + 1
        return found
