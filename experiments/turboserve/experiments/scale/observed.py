"""What the event log shows: how long commands of the scheduler take, and how many migrations there are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class CommandTimes:
    """Seconds from the event that asks for a worker to the commit of the scheduler's command.

    Both times are the state store's, so the time of the command's own transaction is included.
    """

    seconds: list[tuple[float, float]] = field(default_factory=list)
    """(Time of the event, Unix seconds, and seconds to the command)."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of events by type."""
    _asked: dict[str, float] = field(default_factory=dict)

    async def follow(self, bus: Bus) -> None:
        """Observe the events of all sessions from now on."""
        await bus.client.subscribe(subjects.EVENT.live("*"), cb=self._on_message)

    async def _on_message(self, message: Msg) -> None:
        try:
            event = event_from_bytes(message.data)
        except UNREADABLE:
            return
        self.add(event)

    def add(self, event: Event) -> None:
        """Count one event."""
        self.kinds[event.type] += 1
        if isinstance(event, SessionCreated | SessionResumeRequested):
            self._asked[event.record.id] = event.at
        elif isinstance(event, SessionPlaced):
            asked_at = self._asked.pop(event.record.id, None)
            if asked_at is not None:
                self.seconds.append((asked_at, max(event.at - asked_at, 0.0)))

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
