"""Runs the timeline: passes the time to it, and publishes its playheads and metrics."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

import nats.errors

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock, until_multiple
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.workers import DELIVERED_LIMIT, MEDIA_LIMIT_S, Playhead
from turboserve.gateway import metrics
from turboserve.gateway.timeline.playback import Command, Publish, Recovered, Stalled, View
from turboserve.gateway.timeline.timeline import Timeline
from turboserve.subjects import PLAYHEAD

REMEMBERED = 20_000
"""Chunks whose first delivery is remembered."""

log = logs.get("timeline")


class TimelineService:
    """The timeline of the process. Its methods are those of `Timeline`, without the time."""

    def __init__(self, bus: Bus, clock: Clock, gateway: str, interval_s: float, timeout_s: float) -> None:
        """`gateway` is the id of this gateway."""
        self._bus = bus
        self._clock = clock
        self._gateway = gateway
        self._interval_s = interval_s
        self._timeline = Timeline(interval_s, timeout_s)
        self._first_sent: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._first_shown: OrderedDict[tuple[str, int], float] = OrderedDict()
        """(session, chunk) → when a viewer here was first sent, and first showed, the chunk, Unix seconds."""
        self._watched: dict[str, tuple[float, int]] = {}
        """Session → when it was last published, monotonic, and the number of its viewers then."""
        self._delivered: dict[str, int] = {}
        """Watched session → bytes that its viewers were sent and that are not published."""
        metrics.slack_min.add(self, TimelineService.smallest_slack)

    async def joined(
        self,
        session: str,
        viewer: str,
        start_s: float,
        *,
        self_paced: bool,
        made_s: float = 0.0,
        reached_s: float = 0.0,
    ) -> None:
        metrics.viewers.add(1)
        await self._do(
            self._timeline.joined(
                session,
                viewer,
                start_s,
                self._clock.monotonic(),
                self_paced=self_paced,
                made_s=made_s,
                reached_s=reached_s,
            )
        )

    async def left(self, session: str, viewer: str) -> None:
        metrics.viewers.add(-1)
        await self._do(self._timeline.left(session, viewer, self._clock.monotonic()))

    async def delivered(self, viewer: str, header: ChunkHeader, size: int) -> None:
        """Note that a viewer was sent a chunk, `size` bytes."""
        self._delivered[header.session] = self._delivered.get(header.session, 0) + size
        _remember(self._first_sent, header.session, header.index, self._clock.wall())
        commands = self._timeline.delivered(
            header.session,
            viewer,
            header.end_s,
            header.compute_s,
            self._clock.monotonic(),
            (header.credit_s, header.tier),
        )
        if commands:
            await self._do(commands)

    async def skipped(self, session: str, viewer: str, start_s: float) -> None:
        await self._do(self._timeline.skipped(session, viewer, start_s, self._clock.monotonic()))

    async def reported(self, session: str, viewer: str, playhead_s: float, buffered_s: float) -> None:
        await self._do(
            self._timeline.reported(session, viewer, playhead_s, buffered_s, self._clock.monotonic())
        )

    def shown(self, session: str, index: int) -> None:
        """Note that a viewer shows the first frame of its first chunk, `index`."""
        _remember(self._first_shown, session, index, self._clock.wall())

    def first_viewer(self, session: str, index: int) -> tuple[float | None, float | None]:
        """Return when a viewer here was first sent a chunk, and first showed it, Unix seconds, or None."""
        return self._first_sent.get((session, index)), self._first_shown.get((session, index))

    async def playing(self, session: str, playing: bool) -> None:
        await self._do(self._timeline.playing(session, playing, self._clock.monotonic()))

    def oldest_viewer(self, session: str) -> str | None:
        """Return the viewer that came first, of those that watch here."""
        return self._timeline.oldest_viewer(session)

    def view(self, session: str) -> View | None:
        return self._timeline.view(session)

    async def run(self) -> None:
        """Publish the playhead of every session every `interval_s`; never returns."""
        while True:
            await asyncio.sleep(until_multiple(self._interval_s, self._clock.monotonic()))
            await self._do(self._timeline.tick(self._clock.monotonic()))

    def smallest_slack(self) -> float | None:
        """Return the smallest playout slack of all sessions watched here, seconds; None if there are none."""
        views = [self._timeline.view(session) for session in self._timeline.sessions()]
        return min((view.slack_s for view in views if view is not None), default=None)

    def _viewer_time(self, session: str, viewers: int) -> float:
        """Return the seconds of all viewers since the last call for the session. `viewers`: from now on."""
        now = self._clock.monotonic()
        since, before = self._watched.pop(session, (now, 0))
        if viewers:
            self._watched[session] = now, viewers
        return min((now - since) * before, MEDIA_LIMIT_S)

    async def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Publish(session, playhead_s, viewers, live, age_s):
                    fields: dict[str, object] = {
                        "session": session,
                        "gateway": self._gateway,
                        "playhead_s": playhead_s,
                        "age_s": age_s,
                        "viewers": viewers,
                        "viewer_s": self._viewer_time(session, viewers),
                        # Whatever becomes of the message: better too little than the same bytes twice.
                        "delivered_bytes": min(self._delivered.pop(session, 0), DELIVERED_LIMIT),
                        "live": live,
                        "at": self._clock.wall(),
                    }
                    message = Playhead.of_fields(fields)
                    # A playhead is lost while the broker is away: the next one follows in a moment.
                    with suppress(nats.errors.Error, OSError):
                        await self._bus.publish(PLAYHEAD, session, message)
                case Stalled(session):
                    metrics.stalls.add(1)
                    log.info("viewer stalled", session=session)
                case Recovered(_, seconds):
                    metrics.stall_duration.record(seconds)


def _remember(times: OrderedDict[tuple[str, int], float], session: str, index: int, at: float) -> None:
    """Keep the first time of a chunk, of the newest `REMEMBERED` chunks."""
    times.setdefault((session, index), at)
    if len(times) > REMEMBERED:
        times.popitem(last=False)
