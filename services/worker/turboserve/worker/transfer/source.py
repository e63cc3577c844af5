"""The source's role: send a session's state over a connection that its target opened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from turboserve import logs
from turboserve.telemetry_names import ERROR_TYPE, TRANSFER_ROLE
from turboserve.worker import metrics
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE, Page, changed, digest_of, fingerprints_of
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel, refuse
from turboserve.worker.transfer.deadline import Deadline, ended
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    LayoutMismatchError,
    MigrationNotOfferedError,
    TransferError,
    TransferProtocolError,
    TransferTooSlowError,
)
from turboserve.worker.transfer.frames import (
    Hello,
    Manifest,
    Open,
    PageSpec,
    Round,
    Verified,
)
from turboserve.worker.transfer.half_open_connections import HalfOpenConnections
from turboserve.worker.transfer.link import LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable
from turboserve.worker.transfer.pace import LATER_S, CopyLimits
from turboserve.worker.transfer.state_provider import StateProvider
from turboserve.worker.transfer.transfer_attempt import TransferAttempt

ADMIT_S = 3.0
"""Limit of the whole authentication, and of the first frame after it, seconds."""
CONNECTIONS_LIMIT = 64
"""Largest number of authenticated connections for states. `half_open_connections` limits the others."""
SIDE_TRANSFERS_LIMIT = 16
"""Largest number of authenticated connections for anything else. They take none from the states'."""
BULK_ROUNDS = 3
SMALL_BYTES = 4 << 20
"""Smallest delta that is worth another round while the session generates, bytes."""

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
        try:
            if not quiesced:
                await self._bulk_in_turn(attempt)
            await self._send_final_delta(attempt, None if quiesced else self._limits.still_s)
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

    async def _bulk_in_turn(self, attempt: TransferAttempt) -> None:
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            await attempt.meanwhile(asyncio.wait([turn]))
            await self._bulk(attempt)
        finally:
            if not turn.cancel():
                self._turns.release()

    async def _bulk(self, attempt: TransferAttempt) -> None:
        """While the session generates, send all pages, then the changed ones as long as they are many."""
        for _ in range(BULK_ROUNDS):
            pages = await self._left(attempt)
            if attempt.rounds and sum(page.size for page in pages) < SMALL_BYTES:
                return
            await self._round(attempt, pages)
        # If the session writes faster than the link transfers, rounds do not get smaller: the session stays
        # here.
        size = sum(page.size for page in await self._left(attempt))
        if attempt.bytes_per_s and size > attempt.bytes_per_s * self._limits.still_s:
            raise TransferTooSlowError(
                f"still: {size} bytes have changed again, {size / attempt.bytes_per_s:.1f} s at "
                f"{attempt.bytes_per_s:.3g} B/s, at most {self._limits.still_s:g} s"
            )

    async def _left(self, attempt: TransferAttempt) -> list[Page]:
        """The pages that have changed since they were sent."""
        return changed(await attempt.meanwhile(self._provider.pages(attempt.opened.session)), attempt.sent)

    async def _send_final_delta(self, attempt: TransferAttempt, still_s: float | None) -> None:
        """At the boundary: send the rest and the manifest, within `still_s`."""
        session, migration = attempt.opened.session, attempt.opened.migration
        header, pages = await attempt.meanwhile(self._provider.rest(session, migration))
        if still_s is None:
            await self._send_manifest(attempt, header, pages)
            return
        left_s = attempt.deadline.left()
        attempt.deadline = Deadline(min(left_s, still_s), self._now)
        try:
            await self._send_manifest(attempt, header, pages)
        except DeadlineExceededError as error:
            if left_s <= still_s or not attempt.deadline.passed:
                raise
            raise TransferTooSlowError(f"still: for more than {still_s:g} s: {error}") from error

    async def _send_manifest(
        self, attempt: TransferAttempt, header: Mapping[str, Any], pages: Sequence[Page]
    ) -> None:
        session, migration = attempt.opened.session, attempt.opened.migration
        await self._round(attempt, changed(pages, attempt.sent))
        await attempt.meanwhile(self._provider.acknowledged(session, migration, int(header["next_chunk"])))
        names = tuple(page.name for page in pages)
        digest = digest_of(header, {name: attempt.prints[name] for name in names})
        self._provider.sending_manifest(session, migration)
        manifest = Manifest(header=dict(header), pages=names, digest=digest)
        await attempt.channel.send(manifest, attempt.deadline.left())
        await attempt.receive_frame(Verified)

    async def _round(self, attempt: TransferAttempt, pages: Sequence[Page]) -> None:
        link, deadline, number = attempt.link, attempt.deadline, attempt.rounds
        memory, everything = LocalPages([page.parts for page in pages]), range(len(pages))
        begun = self._now()
        # Some links already copy everything here.
        offering = self._links.blocking(lambda: link.offer(memory, everything, deadline), deadline, link)
        offer = await attempt.meanwhile(offering)
        specs = tuple(
            PageSpec(name=page.name, size=page.size, dtype=page.dtype, shape=page.shape) for page in pages
        )
        await attempt.channel.send(Round(number=number, pages=specs, offer=offer), deadline.left())

        def send() -> dict[str, bytes]:
            link.transfer(attempt.opened.session, memory, RemotePages(), everything, deadline)
            return fingerprints_of({page.name: page.parts for page in pages}, deadline.left)

        prints = await attempt.until_taken(self._links.blocking(send, deadline, link))
        link.settle()
        attempt.prints |= prints
        attempt.sent |= {page.name: page.stamp for page in pages}
        size = memory.size(everything)
        attempt.rounds += 1
        attempt.bytes_copied += size
        if size:
            attempt.bytes_per_s = size / max(self._now() - begun, 1e-9)
