"""The viewers of sessions over all gateways: their playheads combined, and followed on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from contextlib import suppress

import nats
from nats.aio.subscription import Subscription

from turboserve.bus import Bus
from turboserve.contracts.workers import Playhead
from turboserve.static_frozen import statically_frozen
from turboserve.subjects import PLAYHEAD
from turboserve.tasks import BackgroundTasks

SILENT_S = 5.0
"""A gateway reports several times a second about the sessions watched through it. A gateway that has been
silent for this long counts as gone, with its viewers."""

LONGEST_INTERVAL_S = SILENT_S / 4
"""Longest interval at which a gateway may report."""


@statically_frozen()
class AggregatedPlayhead:
    """The reports of all gateways about one session, combined."""

    playhead_s: float
    """Playhead of the viewer who is furthest ahead: that viewer needs the next chunk first. Gateways whose
    viewers are all silent count only if there is no other. With no viewer left, the last reported
    playhead."""
    viewers: int
    observed_at: float
    """When the viewer was at `playhead_s`, in the time of `update`."""


@statically_frozen()
class _GatewayReport:
    """The newest report of one gateway."""

    playhead_s: float
    observed_at: float
    viewers: int
    live: bool
    heard_at: float

    def position_s(self, now: float) -> float:
        """Where the viewer is now, if it has played on until the next report was due."""
        return self.playhead_s + min(now, self.heard_at + LONGEST_INTERVAL_S) - self.observed_at


class Audience:
    """The viewers of one session, by each gateway's newest report. Gateways that send no id count as one.

    It reads no clock: callers pass the time in.
    """

    def __init__(self) -> None:
        self._gateways: dict[str | None, _GatewayReport] = {}
        self.aggregate: AggregatedPlayhead | None = None
        """As of the newest report. None: no report yet."""

    def update(self, report: Playhead, now: float) -> AggregatedPlayhead:
        """Take a gateway's report, received at monotonic time `now` (seconds). Returns the new aggregate."""
        observed_at = now - report.age_s
        latest = _GatewayReport(report.playhead_s, observed_at, report.viewers, report.live, now)
        self._gateways[report.gateway] = latest
        if latest.viewers and len(self._gateways) == 1:
            # As nearly always: the session's viewers are at one gateway.
            self.aggregate = AggregatedPlayhead(latest.playhead_s, latest.viewers, observed_at)
            return self.aggregate
        self._gateways = {
            gateway: last
            for gateway, last in self._gateways.items()
            if last.viewers and now - last.heard_at <= SILENT_S
        }
        reports = self._gateways.values()
        furthest = max(reports, key=lambda last: (last.live, last.position_s(now)), default=latest)
        viewers = sum(last.viewers for last in self._gateways.values())
        self.aggregate = AggregatedPlayhead(furthest.playhead_s, viewers, furthest.observed_at)
        return self.aggregate


class AudienceFollower:
    """Follows the playheads of a set of sessions. Belongs to the event loop."""

    def __init__(
        self, bus: Bus, monotonic: Callable[[], float], on_change: Callable[[str, AggregatedPlayhead], None]
    ) -> None:
        """`on_change` is called with a session and its aggregate whenever the aggregate has changed."""
        self._bus, self._monotonic, self._on_change = bus, monotonic, on_change
        self._subscribing: dict[str, asyncio.Task[Subscription]] = {}
        self._audiences: dict[str, Audience] = {}
        self._tasks = BackgroundTasks()

    def follow(self, sessions: Set[str]) -> None:
        """Follow exactly these sessions from now on."""
        # Sorted, so that a simulation repeats exactly.
        for session in sorted(sessions - self._subscribing.keys()):
            self._audiences[session] = Audience()
            self._subscribing[session] = asyncio.create_task(
                self._bus.subscribe(PLAYHEAD, session, self._on_playhead)
            )
        for session in sorted(self._subscribing.keys() - sessions):
            del self._audiences[session]
            self._tasks.create(_unsubscribe(self._subscribing.pop(session)))

    def close(self) -> None:
        """End the tasks under way."""
        self._tasks.cancel()

    async def _on_playhead(self, message: Playhead, _: bytes) -> None:
        audience = self._audiences.get(message.session)
        if audience is None:
            return
        before = audience.aggregate
        together = audience.update(message, self._monotonic())
        # A gateway whose viewers are behind another gateway's changes nothing.
        if together != before:
            self._on_change(message.session, together)


async def _unsubscribe(subscribing: asyncio.Task[Subscription]) -> None:
    with suppress(nats.errors.Error, OSError):
        await (await subscribing).unsubscribe()
