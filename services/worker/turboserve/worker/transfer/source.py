"""The source's role: send a session's state over a connection that its target opened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from turboserve import logs
from turboserve.telemetry_names import ERROR_TYPE, TRANSFER_ROLE
from turboserve.worker import metrics
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel, refuse
from turboserve.worker.transfer.deadline import Deadline, ended
from turboserve.worker.transfer.errors import (
    LayoutMismatchError,
    MigrationNotOfferedError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.frames import Hello, Open
from turboserve.worker.transfer.half_open_connections import HalfOpenConnections
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.transfer.pace import LATER_S, CopyLimits
from turboserve.worker.transfer.sender import StateSender
from turboserve.worker.transfer.state_provider import StateProvider
from turboserve.worker.transfer.transfer_attempt import TransferAttempt

ADMIT_S = 3.0
"""Limit of the whole authentication, and of the first frame after it, seconds."""
CONNECTIONS_LIMIT = 64
"""Largest number of authenticated connections for states. `half_open_connections` limits the others."""
SIDE_TRANSFERS_LIMIT = 16
"""Largest number of authenticated connections for anything else. They take none from the states'."""

log = logs.get("transfer")


class SideTransfers(Protocol):
    """What else targets may fetch over the address at which states are served, such as weights."""

    def key(self, grant: str) -> bytes | None:
        """The key of this name; `None`: there is none. A connection names it in place of a session."""
        ...

    async def serve(self, channel: Channel, opened: Open, keys: handshake.Keys) -> None:
        """Serve an authenticated connection until its end. Raises `TransferError`."""
        ...


class Source:
    """Serves all targets of one worker."""

    def __init__(
        self,
        provider: StateProvider,
        links: LinkTable,
        limits: CopyLimits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the provider and the links. An attempt may take as long as its target announces, at most
        `limits.most_s`, and `LATER_S` more."""
        self._provider, self._links, self._limits = provider, links, limits
        self._open: dict[str, tuple[asyncio.Task[None], int]] = {}
        """By session: the task that sends its state, and for which migration. A newer connection replaces
        it."""
        self._turns = asyncio.Semaphore(SOURCES_AT_ONCE)
        """Turns of the transfers that send while their session generates."""
        self._connections = 0
        self._now = now
        self._half_open = HalfOpenConnections(now=now)
        self.side_transfers: SideTransfers | None = None
        self.further_models: tuple[str, ...] = ()  # Fingerprints, where the worker serves several models.
        self._side_tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: ByteReader, writer: ByteWriter) -> None:
        """Serve one connection until its end. Refuses and counts failures; raises only a cancellation."""
        channel = Channel(reader, writer)
        try:
            with self._half_open.held(channel.peer, channel.abort):
                async with asyncio.timeout(ADMIT_S):
                    opened, keys = await handshake.admit(channel, self._key, ADMIT_S)
        except (TransferError, TimeoutError) as error:
            # Any peer can cause this, at any rate: it is counted and not answered.
            self._half_open.refused(channel.peer, error)
            await channel.close()
            return
        side = self.side_transfers
        beside = side is not None and side.key(opened.session) is not None
        self._connections += not beside
        try:
            if side is not None and beside:
                await self._serve_side(side, channel, opened, keys)
            elif self._connections > CONNECTIONS_LIMIT:
                raise TransferProtocolError(f"connections: more than {CONNECTIONS_LIMIT}")
            else:
                await self._negotiate(channel, opened, keys)
        except TransferError as error:
            log.info("transfer refused or broken", code=error.code, error=str(error))
            metrics.transfers_broken.add(1, {TRANSFER_ROLE: "source", ERROR_TYPE: error.code})
            await refuse(channel, error.code, str(error))
        except Exception as error:
            log.exception("transfer failed")
            metrics.transfers_broken.add(1, {TRANSFER_ROLE: "source", ERROR_TYPE: TransferError.code})
            await refuse(channel, TransferError.code, repr(error))
        finally:
            self._connections -= not beside
            await channel.close()

    def _key(self, session: str, migration: int) -> bytes | None:
        key = None if self.side_transfers is None else self.side_transfers.key(session)
        return self._provider.key(session, migration) if key is None else key

    def abort(self, session: str) -> None:
        """End the session's transfer: its row does not say (any more) that it migrates."""
        if session in self._open:
            self._open[session][0].cancel()

    def close(self) -> None:
        """End all transfers."""
        for task in [*(task for task, _ in self._open.values()), *self._side_tasks]:
            task.cancel()

    async def _serve_side(
        self, side: SideTransfers, channel: Channel, opened: Open, keys: handshake.Keys
    ) -> None:
        if len(self._side_tasks) >= SIDE_TRANSFERS_LIMIT:
            raise TransferProtocolError(f"side transfers: more than {SIDE_TRANSFERS_LIMIT}")
        serving = asyncio.create_task(side.serve(channel, opened, keys))
        self._side_tasks.add(serving)
        try:
            await asyncio.wait([serving])
        except asyncio.CancelledError:
            serving.cancel()
            await ended(serving)
            raise
        finally:
            self._side_tasks.discard(serving)
        # `close` has canceled it: the connection ends without an answer.
        if not serving.cancelled():
            serving.result()

    async def _negotiate(self, channel: Channel, opened: Open, keys: handshake.Keys) -> None:
        hello = await channel.receive(ADMIT_S)
        if not isinstance(hello, Hello):
            raise TransferProtocolError(f"{hello.type}: the first frame must be hello")
        if hello.model not in (self._links.model, *self.further_models):
            raise LayoutMismatchError(f"model: {hello.model}, {self._links.model} is served here")
        # An unknown peer is refused before the current transfer is interrupted.
        self._provider.check(opened.session, opened.migration, opened.worker)
        # The older transfer stays registered until it has ended: each of several new ones waits for its turn.
        while (served := self._open.get(opened.session)) is not None:
            older, migration = served
            older.cancel()
            try:
                await ended(older)
            finally:
                if self._open.get(opened.session) == served:
                    del self._open[opened.session]
                    self._provider.over(opened.session, migration)
        quiesced = self._provider.offer(opened.session, opened.migration, opened.worker)
        giving = asyncio.create_task(self._send_state(channel, opened, keys, hello, quiesced))
        self._open[opened.session] = giving, opened.migration
        try:
            await asyncio.wait([giving])
        except asyncio.CancelledError:
            giving.cancel()
            await ended(giving)
            raise
        finally:
            if self._open.get(opened.session, (None, 0))[0] is giving:
                del self._open[opened.session]
                self._provider.over(opened.session, opened.migration)
        if giving.cancelled():
            raise MigrationNotOfferedError(
                f"session {opened.session}: migration {opened.migration} has ended on this worker"
            )
        if (error := giving.exception()) is not None:
            raise error

    async def _send_state(
        self, channel: Channel, opened: Open, keys: handshake.Keys, hello: Hello, quiesced: bool
    ) -> None:
        deadline = Deadline(min(hello.limit_s, self._limits.most_s) + LATER_S, self._now)
        link = await self._links.give(channel, hello, opened.worker, keys.link, quiesced, deadline)
        attempt = TransferAttempt(opened, channel, link, deadline)
        sender = StateSender(attempt, self._provider, self._links, self._limits, self._now)
        try:
            if not quiesced:
                await self._send_rounds_in_turn(attempt, sender)
            await sender.send_rest(None if quiesced else self._limits.still_s)
        except BaseException:
            link.close()
            raise
        self._links.put_back(opened.worker, link, giving=True)
        log.info(
            "state transferred",
            session=opened.session,
            target=opened.worker,
            backend=link.kind,
            rounds=attempt.rounds,
            bytes=attempt.bytes_copied,
        )

    async def _send_rounds_in_turn(self, attempt: TransferAttempt, sender: StateSender) -> None:
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            await attempt.meanwhile(asyncio.wait([turn]))
            await sender.send_rounds()
        finally:
            if not turn.cancel():
                self._turns.release()
