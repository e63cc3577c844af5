"""An advisory lock that belongs to a Postgres session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.state_store.database_errors import DRIVER_ERRORS
from turboserve.state_store.ports.database import LOCK_ANSWER_SHARE, unavailable

_TRY_LOCK = text(
    "select pg_try_advisory_lock(:key) from set_config('idle_session_timeout', :limit_ms, false)"
)


class PostgresSessionLock:
    """`ports.database.SessionLock` on its own connection."""

    def __init__(
        self,
        connection: AsyncConnection,
        key: int,
        silence_s: float,
        failed: Callable[[BaseException], Exception],
        ended: Callable[[], bool],
    ) -> None:
        """`ended`: whether the connection must be closed."""
        self._connection, self._failed, self._ended = connection, failed, ended
        self._answer_s = LOCK_ANSWER_SHARE * silence_s
        limit_ms = str(int(silence_s * 1000))
        self._try_lock = _TRY_LOCK.bindparams(key=key, limit_ms=limit_ms)

    async def acquire(self) -> bool:
        return await self._ask(self._try_lock)

    async def confirm(self) -> None:
        await self._ask(text("select true"))

    async def _ask(self, question: TextClause) -> bool:
        if self._ended():
            raise unavailable()
        try:
            async with asyncio.timeout(self._answer_s):
                return bool((await self._connection.execute(question)).scalar())
        except DRIVER_ERRORS as error:
            raise self._failed(error) from error
