"""Tracks what an accepted connection waits for, and since when. No I/O: the protocol reports changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CLOSE_S = 2.0
"""Time in seconds that a closed connection may take to send its remaining bytes."""


class Stage(StrEnum):
    """What the server waits for."""

    HEAD = "head"
    """The first or next request's head, or the end of a WebSocket handshake."""
    BODY = "body"
    """The rest of the request's body."""
    ANSWER = "answer"
    """The answer of the application, or an open WebSocket."""


class Overdue(StrEnum):
    """Why a connection is closed before its normal end."""

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
