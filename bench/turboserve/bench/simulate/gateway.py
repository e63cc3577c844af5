"""The gateway: the real timeline, viewers who follow logs, and users' requests to the state store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turboserve import subjects
from turboserve.bench.simulate.kernel import Program, sleep
from turboserve.bench.simulate.log import Entry, Follower, Stream
from turboserve.bench.simulate.network import Network
from turboserve.contracts.errors import DeadlineError, TransitionError, TurboServeError
from turboserve.contracts.requests import SessionRef
from turboserve.contracts.sessions import Activity
from turboserve.gateway.timeline.timeline import Command, Publish, Timeline
from turboserve.subjects import CHUNK, EVENT

INTERVAL_S = 0.5
WAKE_RETRIES_S = (0.0, 0.5, 1.0, 2.0)
WAKE_AGAIN_S = 3.0


class Viewer:
    """One person's player: what it has received survives the gateway it came through."""

    def __init__(self, name: str, session: str, first: int = 0) -> None:
        self.name, self.session = name, session
        self.next = first
        """Index of the chunk that it has to receive next."""
        self.watching = True
        self.over = False
        """It was told that the session has ended."""


class Gateway:
    """The gateway's process: timeline and connections die with it, viewers come back."""

    def __init__(self, program: Program, network: Network, chunks: Stream, events: Stream) -> None:
        self.program, self.network = program, network
        self.on_delivered: Callable[[Viewer, Entry], None] = lambda _viewer, _entry: None
        self.on_playhead: Callable[[str, float, int], None] = lambda *_: None
        self._chunks, self._events = chunks, events
        self._timeline = Timeline(INTERVAL_S, 3.0)
        self._watches: dict[str, Watch] = {}

    def boot(self) -> None:
        self._timeline = Timeline(INTERVAL_S, 3.0)
        self._watches = {}
        self.program.every(INTERVAL_S, lambda: self._do(self._timeline.tick(self._now)))

    @property
    def _now(self) -> float:
        return self.program.kernel.now

    def connected(self, viewer: Viewer) -> bool:
        return self.program.up and viewer.name in self._watches

    # Viewers

    def join(self, viewer: Viewer) -> None:
        """The viewer connects and goes on behind what it has."""
        self.program.after(0.01, lambda: self._join(viewer))

    def leave(self, viewer: Viewer) -> None:
        self.program.after(0.01, lambda: self._leave(viewer))

    def _join(self, viewer: Viewer) -> None:
        if viewer.name in self._watches or not viewer.watching:
            return
        watch = Watch(self, viewer, self._chunks, self._events)
        self._watches[viewer.name] = watch
        self._do(
            self._timeline.joined(viewer.session, viewer.name, float(viewer.next), self._now, self_paced=True)
        )
        watch.start()

    def _leave(self, viewer: Viewer) -> None:
        watch = self._watches.pop(viewer.name, None)
        if watch is not None:
            watch.stop()
            self._do(self._timeline.left(viewer.session, viewer.name, self._now))

    def delivered(self, viewer: Viewer, entry: Entry) -> None:
        self.on_delivered(viewer, entry)
        header = entry.body.header
        self._do(self._timeline.delivered(viewer.session, viewer.name, header.end_s, 0.3, self._now))

    def playing(self, session: str, playing: bool) -> None:
        self._do(self._timeline.playing(session, playing, self._now))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Publish):
                self.on_playhead(command.session, command.playhead_s, command.viewers)

    # Requests

    def ask(self, endpoint: Any, request: Any, attempts: int = 3) -> None:
        """A user's request, repeated while its outcome is not known."""
        self.program.spawn(self._ask(endpoint, request, attempts))

    async def _ask(self, endpoint: Any, request: Any, attempts: int) -> None:
        for _ in range(attempts):
            try:
                await self.call(endpoint, request)
                return
            except DeadlineError:
                await sleep(0.2)
            except TurboServeError as error:
                if not error.retryable:
                    return
                await sleep(1.0)

    async def call(self, endpoint: Any, request: Any) -> Any:
        return await self.network.call(self.program, endpoint.server, endpoint.subject, request)


class Watch:
    """One connection: chunks and events of one session for one viewer. An idle session is woken."""

    def __init__(self, gateway: Gateway, viewer: Viewer, chunks: Stream, events: Stream) -> None:
        self._gateway, self._viewer = gateway, viewer
        self._version = 0
        self._activity = Activity.WATCHING
        self._waking = False
        self._stopped = False
        program, session = gateway.program, viewer.session
        subject = CHUNK.of(session)
        after = next(
            (
                e.sequence
                for e in chunks.by_subject.get(subject, ())
                if e.body.header.index == viewer.next - 1
            ),
            0,
        )
        self._chunks = Follower(chunks, program, subject, after, self._chunk)
        # From the newest event on: the one before tells how the session is now.
        last = events.last(EVENT.of(session))
        self._events = Follower(events, program, EVENT.of(session), last.before if last else 0, self._event)

    def start(self) -> None:
        self._chunks.start()
        self._events.start()

    def stop(self) -> None:
        self._stopped = True
        self._chunks.stop()
        self._events.stop()

    def _chunk(self, entry: Entry) -> None:
        if entry.body.header.index >= self._viewer.next:
            self._gateway.delivered(self._viewer, entry)

    def _event(self, entry: Entry) -> None:
        record = entry.body.record
        if record.version < self._version:
            return
        self._version, self._activity = record.version, record.activity
        self._gateway.playing(record.id, record.activity is Activity.WATCHING and not record.phase.ended)
        if record.phase.ended:
            self._viewer.over = True
        elif self._activity is Activity.IDLE and not self._waking:
            self._waking = True
            self._gateway.program.spawn(self._wake(record.id))

    async def _wake(self, session: str) -> None:
        attempt = 0
        while self._activity is Activity.IDLE and not self._stopped and not self._viewer.over:
            await sleep(WAKE_RETRIES_S[attempt] if attempt < len(WAKE_RETRIES_S) else WAKE_AGAIN_S)
            attempt += 1
            try:
                await self._gateway.call(subjects.RESUME_SESSION, SessionRef(session=session))
                break
            except TransitionError:
                break
            except TurboServeError:
                continue
        self._waking = False
