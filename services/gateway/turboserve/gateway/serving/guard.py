"""An accepted connection: what it waits for and since when, shared by its HTTP and its WebSocket protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from turboserve.connections import ConnectionTable

CLOSE_S = 2.0
"""Time in seconds that a closed connection may take to send its remaining bytes."""
READ_BYTES = 16_384
"""Bytes read at once. With more, the frames of one client would block the event loop for longer."""


class Stage(StrEnum):
    """What the server waits for."""

    IDLE = "idle"
    """The first byte of the next request."""
    HEAD = "head"
    """The rest of a request's head, the whole head of the first one, or the end of a WebSocket handshake."""
    BODY = "body"
    """The rest of the request's body."""
    ANSWER = "answer"
    """The answer of the application, or an open WebSocket."""


class Overdue(StrEnum):
    """Why a connection is closed before its normal end."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    UNREAD = "unread"
    """The client does not read what was sent."""
    CLOSING = "closing"
    """The connection was closed, and the client does not read the remaining bytes."""


@dataclass(frozen=True)
class Deadlines:
    """Time limits of a connection, seconds."""

    head_s: float
    body_s: float
    write_s: float
    idle_s: float
    close_s: float = CLOSE_S


class Progress:
    """The progress of one connection. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.stage = Stage.HEAD
        self._since = now
        self._unread_since: float | None = None
        self._closing_since: float | None = None

    def enter(self, stage: Stage, now: float) -> bool:
        """Note that the connection waits for `stage`. Returns whether the stage has changed."""
        if stage is self.stage:
            return False
        self.stage, self._since = stage, now
        return True

    def blocked(self, now: float) -> None:
        """Note that the client has not read what was sent, so that sending pauses."""
        if self._unread_since is None:
            self._unread_since = now

    def drained(self) -> None:
        """Note that the client has read nearly all that was sent."""
        self._unread_since = None

    def closing(self, now: float) -> None:
        """Note that the connection was closed. Bytes written before are still being sent."""
        if self._closing_since is None:
            self._closing_since = now

    def overdue(self, deadlines: Deadlines, now: float) -> Overdue | None:
        """Return why the connection has to be closed now; None if it has not."""
        if self._closing_since is not None:
            return Overdue.CLOSING if now - self._closing_since > deadlines.close_s else None
        if self._unread_since is not None and now - self._unread_since > deadlines.write_s:
            return Overdue.UNREAD
        if self.stage is Stage.IDLE and now - self._since > deadlines.idle_s:
            return Overdue.IDLE
        if self.stage is Stage.HEAD and now - self._since > deadlines.head_s:
            return Overdue.HEAD
        if self.stage is Stage.BODY and now - self._since > deadlines.body_s:
            return Overdue.BODY
        return None


class FrameBudget:
    """A token bucket: `rate` frames per second, `burst` at once."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def spend(self, frames: int, now: float) -> float:
        """Charge `frames` that were read. Returns for how many seconds no more frames should be read."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - frames
        self._at = now
        return max(0.0, -self._left / self._rate)


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
            self._table.wait(self._key, idle=stage is Stage.IDLE)

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
        elif reason is Overdue.IDLE:
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
