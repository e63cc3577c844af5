"""The database port of one process, on a server in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType

from turboserve.contracts.errors import UnavailableError
from turboserve.simulation.runtime.process import current
from turboserve.simulation.runtime.rows.admission import ADMISSION_LOCK
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.unit import MemoryUnitOfWork
from turboserve.state_store.ports.database import ADMISSIONS, LOCK_ANSWER_SHARE, TURN_SHARE, unavailable


class MemoryDatabase:
    """`ports.database.Database`. It belongs to the process in which it was created."""

    def __init__(self, server: MemoryPostgres, *, deadline_s: float = 2.5, connections: int = 12) -> None:
        self._server, self._deadline_s = server, deadline_s
        self._process = current()
        self._free, self._admissions = asyncio.Semaphore(connections), asyncio.Semaphore(ADMISSIONS)
        self._cut_off_until = 0.0
        self.reachable = False

    def cut_off(self, seconds: float) -> None:
        """Keep new transactions of this process from reaching the server for `seconds`."""
        self._cut_off_until = self._server.loop.time() + seconds

    def transaction(self, *, durable: bool = True, admits: bool = False) -> _Transaction:
        return _Transaction(self, durable=durable, autocommit=False, admits=admits)

    def statement(self) -> _Transaction:
        return _Transaction(self, durable=True, autocommit=True, admits=False)

    @asynccontextmanager
    async def exclusive(self, key: int) -> AsyncIterator[MemoryUnitOfWork]:
        name = ("advisory", key)
        async with self.statement() as unit:
            session = unit.session

            def lock() -> None:
                session.take(name)
                session.kept.add(name)

            await session.execute(lock)
            yield unit
            await session.execute(lambda: session.kept.discard(name))

    @asynccontextmanager
    async def session_lock(self, key: int, silence_s: float) -> AsyncIterator[MemorySessionLock]:
        session = await self._connect(
            durable=True, autocommit=True, deadline=math.inf, idle_limit_s=silence_s
        )
        try:
            yield MemorySessionLock(session, key, LOCK_ANSWER_SHARE * silence_s)
        finally:
            self._disconnect(session)

    async def migrate(self) -> None:
        async with self.transaction() as unit:
            await unit.session.execute(lambda: None)

    async def ping(self) -> bool:
        try:
            async with self.transaction() as unit:
                await unit.session.execute(lambda: self._server.check_disk(inserts=True))
                await unit.progress.position("write-probe")
            self.reachable = True
        except UnavailableError:
            self.reachable = False
        return self.reachable

    async def close(self) -> None:
        """Do nothing: connections end with their transactions."""

    async def _connect(
        self, *, durable: bool, autocommit: bool, deadline: float, idle_limit_s: float
    ) -> Session:
        """Open a session.

        Raises UnavailableError if no connection is free in time, or the server cannot be reached.
        """
        if self._process is not None:
            self._process.check_alive()
        await self._take(self._free, deadline - self._server.loop.time())
        if self._cut_off_until > self._server.loop.time():
            self._free.release()
            raise unavailable()
        return Session(
            self._server,
            self._process,
            deadline=deadline,
            idle_limit_s=idle_limit_s,
            lock_limit_s=self._deadline_s,
            autocommit=autocommit,
            durable=durable,
        )

    async def _take(self, places: asyncio.Semaphore, limit_s: float) -> None:
        if not places.locked():
            await places.acquire()
            return
        try:
            async with asyncio.timeout(limit_s):
                await places.acquire()
        except TimeoutError:
            raise unavailable() from None

    def _disconnect(self, session: Session) -> None:
        session.abandon()
        self._free.release()


class _Transaction:
    """One block. It is a class, because a generator costs more than the rest of the block."""

    __slots__ = ("_admits", "_autocommit", "_database", "_durable", "_session")

    def __init__(self, database: MemoryDatabase, *, durable: bool, autocommit: bool, admits: bool) -> None:
        self._database, self._durable, self._autocommit = database, durable, autocommit
        self._admits = admits
        self._session: Session | None = None

    async def __aenter__(self) -> MemoryUnitOfWork:
        database = self._database
        deadline = database._server.loop.time() + database._deadline_s
        if not self._admits:
            self._session = await self._connect(deadline)
            return MemoryUnitOfWork(self._session)
        await database._take(database._admissions, TURN_SHARE * database._deadline_s)
        try:
            session = self._session = await self._connect(deadline)
            try:
                await session.execute(lambda: session.take(ADMISSION_LOCK))
            except BaseException:
                database._disconnect(session)
                raise
        except BaseException:
            database._admissions.release()
            raise
        return MemoryUnitOfWork(session)

    async def _connect(self, deadline: float) -> Session:
        return await self._database._connect(
            durable=self._durable,
            autocommit=self._autocommit,
            deadline=deadline,
            idle_limit_s=self._database._deadline_s,
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session = self._session
        assert session is not None
        try:
            if kind is None and not self._autocommit:
                await session.commit()
        finally:
            self._database._disconnect(session)
            if self._admits:
                self._database._admissions.release()


class MemorySessionLock:
    """`ports.database.SessionLock` on a session of its own."""

    def __init__(self, session: Session, key: int, answer_s: float) -> None:
        self._session, self._name, self._answer_s = session, ("advisory", key), answer_s

    async def acquire(self) -> bool:
        session, name = self._session, self._name

        def run() -> bool:
            taken = session.server.locks.take(session, name, LockMode.UPDATE)
            if taken:
                session.kept.add(name)
            return taken

        return await self._ask(run)

    async def confirm(self) -> None:
        await self._ask(lambda: True)

    async def _ask(self, run: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._session.execute(run)
        except TimeoutError:
            raise unavailable() from None
