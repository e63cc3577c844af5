"""What the event log and the bus show: how long commands of the scheduler take, and where the time goes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from nats.aio.msg import Msg

from turboserve import subjects
from turboserve.bus import UNREADABLE, Bus
from turboserve.contracts.events import (
    Event,
    SessionCreated,
    SessionPlaced,
    SessionResumeRequested,
    event_from_bytes,
)
from turboserve.contracts.requests import PlaceSession

HOPS = ("log", "decision", "placement")
SLOWEST = 10


@dataclass(frozen=True)
class Command:
    """A command of the scheduler that answered an event. Times are Unix seconds."""

    kind: str
    """Type of the event."""
    asked_at: float
    """When the state store decided the event, before its transaction or in it."""
    logged_at: float
    """When the broker stored the event."""
    sent_at: float
    """When the scheduler sent its request."""
    placed_at: float
    """When the state store decided the placement, before its commit."""

    @property
    def seconds(self) -> float:
        """Time from the event to the command."""
        return max(self.placed_at - self.asked_at, 0.0)

    @property
    def hops(self) -> dict[str, float]:
        """Seconds of each part of that time."""
        times = self.asked_at, self.logged_at, self.sent_at, self.placed_at
        return {hop: max(end - begin, 0.0) for hop, begin, end in zip(HOPS, times, times[1:], strict=False)}


@dataclass(frozen=True)
class _Asked:
    kind: str
    at: float
    logged_at: float


@dataclass
class CommandTimes:
    """Times from the event that asks for a worker to the commit of the scheduler's command.

    The first and the last time are the state store's, so the time of the command's own transaction is
    included, up to its commit.
    """

    commands: list[Command] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of events by type."""
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _sent: dict[tuple[str, int], float] = field(default_factory=dict)
    """Session and version of its row → when the scheduler first sent a request to place it."""

    async def follow(self, bus: Bus) -> None:
        """Observe the events of all sessions, and the scheduler's requests, from now on."""
        await bus.client.subscribe(subjects.EVENT.live("*"), cb=self._on_event)
        # A copy of each request, which nobody answers.
        await bus.client.subscribe(subjects.PLACE_SESSION.every, cb=self._on_request)

    async def _on_event(self, message: Msg) -> None:
        try:
            event = event_from_bytes(message.data)
        except UNREADABLE:
            return
        stored = (message.headers or {}).get("Nats-Time-Stamp")
        self.add(event, time.time() if stored is None else datetime.fromisoformat(stored).timestamp())

    async def _on_request(self, message: Msg) -> None:
        try:
            self.sent(PlaceSession.from_bytes(message.data))
        except UNREADABLE:
            return

    def sent(self, request: PlaceSession) -> None:
        """Note a request to place a session."""
        self._sent.setdefault((request.session, request.expected_version), request.decision.at)

    def add(self, event: Event, logged_at: float) -> None:
        """Count one event, which the broker stored at `logged_at`, Unix seconds."""
        self.kinds[event.type] += 1
        if isinstance(event, SessionCreated | SessionResumeRequested):
            self._asked[event.record.id] = _Asked(event.type, event.at, logged_at)
        elif isinstance(event, SessionPlaced):
            sent_at = self._sent.pop((event.record.id, event.record.version - 1), event.at)
            asked = self._asked.pop(event.record.id, None)
            if asked is not None:
                self.commands.append(Command(asked.kind, asked.at, asked.logged_at, sent_at, event.at))

    @property
    def unanswered(self) -> int:
        """Number of sessions that asked and got no worker."""
        return len(self._asked)


def percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return p50, p99, the maximum and the number of values; None where there are none."""
    ordered = sorted(values)

    def at(share: float) -> float | None:
        return round(ordered[max(math.ceil(share * len(ordered)) - 1, 0)], 6) if ordered else None

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0), "count": len(ordered)}
