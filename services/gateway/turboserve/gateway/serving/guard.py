"""The state that the HTTP and the WebSocket protocol of one connection share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from turboserve.connections import ConnectionTable
from turboserve.gateway.serving.connection import Deadlines, Overdue, Progress, Stage

READ_BYTES = 16_384
"""Bytes read at once. With more, the frames of one client would block the event loop for longer."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request or one WebSocket."""

    header_bytes: int
    header_count: int
    frames_per_s: float
    deadlines: Deadlines


class Guard:
    """One accepted connection. It remains the same when the protocol changes from HTTP to WebSocket."""

    def __init__(
        self, key: int, table: ConnectionTable, limits: RequestLimits, closed: Callable[[int], None]
    ) -> None:
        """`closed` is called with `key` once the connection is gone."""
        self.limits = limits
        self.transport: asyncio.Transport | None = None
        self.timed_out: Callable[[Overdue], None] | None = None
        """Informs the client that it was too slow. None: the protocol has no message for that."""
        self._key, self._table, self._closed = key, table, closed
        self._loop = asyncio.get_running_loop()
        self._progress = Progress(self._loop.time())

    @property
    def stage(self) -> Stage:
        return self._progress.stage

    def enter(self, stage: Stage) -> None:
        """Note that the connection waits for `stage`."""
        if not self._progress.enter(stage, self._loop.time()):
            return
        if stage is Stage.ANSWER:
            self._table.serve(self._key)
        else:
            self._table.wait(self._key)

    def write_blocked(self) -> None:
        self._progress.blocked(self._loop.time())

    def write_resumed(self) -> None:
        self._progress.drained()

    def lost(self) -> None:
        """Note that the connection is gone."""
        self._table.close(self._key)
        self._closed(self._key)

    def evict(self) -> None:
        """Close the connection at once, to make room for another one."""
        if self.transport is not None:
            self.transport.abort()

    def sweep(self) -> Overdue | None:
        """Close the connection if it is overdue. Returns the reason, or None."""
        if self.transport is None:
            return None
        now = self._loop.time()
        if self.transport.is_closing():
            self._progress.closing(now)
        reason = self._progress.overdue(self.limits.deadlines, now)
        if reason in (Overdue.HEAD, Overdue.BODY) and self.timed_out is not None:
            self.timed_out(reason)
            self.transport.close()
        elif reason is not None:
            # Bytes that the client has not read would keep a closed connection open.
            self.transport.abort()
        return reason


class GuardedProtocol(asyncio.BufferedProtocol):
    """Mixin for uvicorn's protocols. Reads through a small buffer, and reports to the guard."""

    guard: Guard
    _buffer = bytearray(READ_BYTES)  # Shared: its bytes are copied before the next read.

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.guard.transport = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.guard.lost()

    def pause_writing(self) -> None:
        self.guard.write_blocked()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.guard.write_resumed()
        super().resume_writing()
