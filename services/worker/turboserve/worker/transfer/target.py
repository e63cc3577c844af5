"""The target's role: fetch a session's state from its source, and trust nothing before it is verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from turboserve import logs
from turboserve.telemetry import tracer
from turboserve.telemetry_names import (
    ERROR_TYPE,
    MIGRATION_BYTES,
    MIGRATION_ROUND,
    TRANSFER_BACKEND,
    TRANSFER_ROLE,
)
from turboserve.worker import metrics
from turboserve.worker.engine.errors import SnapshotRejectedError
from turboserve.worker.engine.page_hashing import PageHasher
from turboserve.worker.engine.state_pages import digest_of
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.channel import ByteReader, ByteWriter, Channel, explained, refuse, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    LayoutMismatchError,
    PeerLostError,
    TransferBackendError,
    TransferError,
    TransferProtocolError,
)
from turboserve.worker.transfer.fetched_state import FetchedState, ReceiveMemory
from turboserve.worker.transfer.frames import Manifest, Open, Round, Taken, Verified, Wait, Welcome
from turboserve.worker.transfer.link import Link, LocalPages, RemotePages
from turboserve.worker.transfer.network import LinkTable

Connect = Callable[[str, int], Awaitable[tuple[ByteReader, ByteWriter]]]
"""Connects to a host's port. Raises `OSError`."""

CONNECT_S = 2.0
SILENCE_S = 3.0
"""Longest silence of a source, seconds. A waiting source sends a frame more often."""
REASON_S = 0.5
"""Time for the reason of a source that has closed its link to arrive, seconds."""
RETRY_S = 0.1
MISMATCHES_LIMIT = 2
"""Number of mismatches after which the state is wrong at its source."""

log = logs.get("transfer")
_trace = tracer("worker")


@dataclass(eq=False)
class _AttemptBudget:
    """The attempts at one state, and whether another may help."""

    patience_s: float
    now: Callable[[], float]
    waits_from: float
    """Time since which no page has arrived or been announced, monotonic seconds."""
    count: int = 0
    """Number of failed attempts."""
    heard: bool = False
    """Whether the current attempt has received or announced a page of the state."""
    mismatches: int = 0
    unusable: set[str] = field(default_factory=set)
    """Backends that failed, or with which no link could be created. Further attempts prefer the others."""
    last: TransferError | None = None

    def failed(self, error: TransferError) -> TransferError:
        """Record a failed attempt. Returns the error that explains it best; raises if no retry will help."""
        self.count += 1
        self.mismatches += isinstance(error, DigestMismatchError)
        if not error.retryable or self.mismatches >= MISMATCHES_LIMIT:
            raise error
        # What the other side reported explains more than its later timeout.
        if self.last is None or not isinstance(error, DeadlineExceededError):
            self.last = error
        if self.heard:
            self.heard, self.waits_from = False, self.now()
        elif self.now() - self.waits_from >= self.patience_s:
            raise self.last from None
        return self.last


@dataclass(eq=False)
class _CopyAttempt:
    """One attempt."""

    channel: Channel
    link: Link
    room: ReceiveMemory
    session: str
    deadline: Deadline
    tries: _AttemptBudget
    prints: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    rounds: int = 0


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port?…`. Raises `TransferProtocolError`."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError as error:
        raise TransferProtocolError(f"address: {address[:200]!r}: {error}") from None
    raise TransferProtocolError(f"address: {address[:200]!r} is not tcp://host:port")


def host_of(sources: Sequence[str]) -> str:
    """Host of a source, by its first address; empty if there is none that can be parsed."""
    try:
        return (urlsplit(sources[0]).hostname or "") if sources else ""
    except ValueError:
        return ""


class Target:
    """Fetches states for one worker."""

    def __init__(
        self,
        worker: str,
        links: LinkTable,
        patience_s: float,
        connect: Connect = asyncio.open_connection,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """A source that sends nothing is retried for `patience_s`, however long a copy may take."""
        self._worker, self._links, self._patience_s = worker, links, patience_s
        self._connect, self._now = connect, now
        self.model_of: Callable[[str], str] | None = None
        """Session → the fingerprint of its model, where the worker serves several."""

    async def fetch(
        self,
        session: str,
        migration: int,
        key: bytes,
        sources: Sequence[str],
        room: ReceiveMemory,
        limit_s: float,
    ) -> FetchedState:
        """Copy the state into `room`, within `limit_s` for all attempts. Retries while that may help.

        `key` is the migration's key, 32 bytes, which the source has too.

        Raises `TransferError`. After that, and after a cancellation, nothing is written to `room` any more.
        """
        started, deadline = self._now(), Deadline(limit_s, self._now)
        tries = _AttemptBudget(self._patience_s, self._now, waits_from=started)
        if not sources:
            raise PeerLostError(f"session {session}: its source has no address")
        while True:
            address = sources[tries.count % len(sources)]
            try:
                room.begin()
                fetched = await self._attempt(session, migration, key, address, room, deadline, tries)
            except SnapshotRejectedError as error:
                mismatch = LayoutMismatchError(str(error))
                metrics.transfers_broken.add(1, {TRANSFER_ROLE: "target", ERROR_TYPE: mismatch.code})
                raise mismatch from error
            except TransferError as error:
                log.info("transfer broke", session=session, code=error.code, error=str(error))
                metrics.transfers_broken.add(1, {TRANSFER_ROLE: "target", ERROR_TYPE: error.code})
                best = tries.failed(error)
                try:
                    await asyncio.sleep(deadline.left(RETRY_S))
                    deadline.left()
                except DeadlineExceededError:
                    raise best from None
                continue
            metrics.transfer_received.add(fetched.bytes_copied, {TRANSFER_BACKEND: fetched.backend})
            return replace(fetched, seconds=self._now() - started)

    async def _attempt(
        self,
        session: str,
        migration: int,
        key: bytes,
        address: str,
        room: ReceiveMemory,
        deadline: Deadline,
        tries: _AttemptBudget,
    ) -> FetchedState:
        host, port = parse_address(address)
        try:
            async with asyncio.timeout(deadline.left(CONNECT_S)):
                reader, writer = await self._connect(host, port)
        except TimeoutError:
            raise DeadlineExceededError(f"{address}: no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise PeerLostError(f"{address}: {error}") from error
        channel = Channel(reader, writer)
        opened = Open(session=session, migration=migration, worker=self._worker, nonce=handshake.new_nonce())
        try:
            keys = await handshake.authenticate(channel, opened, key, deadline.left(SILENCE_S))
        except BaseException:
            # A source that is not authenticated gets no explanation.
            channel.abort()
            raise
        try:
            hello = self._links.hello(address, deadline.left(), tries.unusable)
            if self.model_of is not None:
                hello = hello.model_copy(update={"model": self.model_of(session)})
            await channel.send(hello, deadline.left(SILENCE_S))
            welcome = await channel.receive(deadline.left(SILENCE_S))
            if not isinstance(welcome, Welcome):
                raise unexpected(welcome)
            try:
                link = await self._links.take(channel, welcome, address, keys.link, deadline)
            except TransferError:
                tries.unusable.add(welcome.backend)
                raise
            try:
                fetched = await self._copy(_CopyAttempt(channel, link, room, session, deadline, tries))
            except BaseException as error:
                link.close()
                if isinstance(error, TransferBackendError):
                    tries.unusable.add(link.kind)
                if isinstance(error, PeerLostError | TransferBackendError):
                    raise await explained(channel, error, REASON_S) from error
                raise
            self._links.put_back(address, link, giving=False)
            return fetched
        except (TransferError, SnapshotRejectedError) as error:
            code = LayoutMismatchError.code if isinstance(error, SnapshotRejectedError) else error.code
            await refuse(channel, code, str(error))
            raise
        finally:
            await channel.close()

    async def _copy(self, copy: _CopyAttempt) -> FetchedState:
        copied = 0
        while True:
            match await copy.channel.receive(copy.deadline.left(SILENCE_S)):
                case Wait():
                    continue
                case Round() as frame:
                    copy.tries.heard = True
                    copied += await self._round(copy, frame)
                case Manifest() as manifest:
                    return await self._verify(copy, manifest, copied)
                case other:
                    raise unexpected(other)

    async def _round(self, copy: _CopyAttempt, frame: Round) -> int:
        if frame.number != copy.rounds:
            raise TransferProtocolError(f"round: {frame.number}, {copy.rounds} was expected")
        room = copy.room
        places = {page.name: room.place(page.name, page.size, page.dtype, page.shape) for page in frame.pages}
        if len(places) != len(frame.pages):
            raise TransferProtocolError(f"round: {frame.number} names a page twice")

        def receive() -> tuple[int, dict[str, bytes]]:
            begun, source = self._now(), RemotePages(frame.offer)
            with PageHasher(places, copy.deadline.left) as hasher:
                memory = LocalPages(list(places.values()), hasher.arrived)
                size = copy.link.transfer(copy.session, source, memory, range(len(places)), copy.deadline)
                metrics.transfer_time.add(self._now() - begun, {TRANSFER_BACKEND: copy.link.kind})
                return size, hasher.prints()

        with _trace.child("copy round") as span:
            size, prints = await self._links.blocking(receive, copy.deadline, copy.link)
            span.set_attribute(MIGRATION_ROUND, frame.number)
            span.set_attribute(MIGRATION_BYTES, size)
        copy.prints |= prints
        copy.sizes |= {page.name: page.size for page in frame.pages}
        copy.rounds += 1
        await copy.channel.send(Taken(number=frame.number, size=size), copy.deadline.left())
        return size

    async def _verify(self, copy: _CopyAttempt, manifest: Manifest, copied: int) -> FetchedState:
        missing = [name for name in manifest.pages if name not in copy.prints]
        if missing:
            raise TransferProtocolError(f"seal: page {missing[0]} was not received")
        digest = digest_of(manifest.header, {name: copy.prints[name] for name in manifest.pages})
        if digest != manifest.digest:
            raise DigestMismatchError(digest, manifest.digest)
        if manifest.header.get("session") != copy.session:
            raise LayoutMismatchError(f"session: {manifest.header.get('session')!r}, need {copy.session!r}")
        copy.room.check(manifest.header, manifest.pages)
        await copy.channel.send(Verified(digest=digest), copy.deadline.left())
        return FetchedState(
            header=manifest.header,
            pages=manifest.pages,
            digest=digest,
            bytes_copied=copied,
            state_bytes=sum(copy.sizes[name] for name in manifest.pages),
            rounds=copy.rounds,
            seconds=0.0,
            backend=copy.link.kind,
        )
