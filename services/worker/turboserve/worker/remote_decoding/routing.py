"""Which decode worker decodes a chunk, without I/O: events in, commands out.

    ChunkWaits       → AskWorker (the one that has the session's cache, else the one with the most room)
    CacheMissed      → AskWorker (the same one, with the latents from which it rebuilds the cache)
    RoomRefused      → AskWorker (another one)
    AskFailed        → AskWorker (another one)
    none is left     → DecodeHere

A chunk asks at most `WORKERS_PER_CHUNK` workers, each within a deadline. A decode worker owns nothing: any of
them, and the worker of the session itself, decodes any chunk from the latents before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never
from zlib import crc32

WORKERS_PER_CHUNK = 2
"""A chunk whose second worker fails as well is decoded here: its viewer has waited for two deadlines."""
FULL_S = 5.0
"""Time for which a worker without room gets no further session, seconds."""
SESSION_S = 30.0
"""Time after which a session without a chunk counts no more as one of its decode worker, seconds."""
AFFINITY_S = 3_600.0
"""Time after which a session without a chunk may go to another decode worker, seconds. A paused session
returns to the one that may still have its cache."""

RECONNECT_S = 1.0
"""Shortest pause between two attempts to connect, seconds."""
LATE_RECONNECT_S = 30.0
"""Longest pause after a worker was late, seconds. Each late chunk costs a deadline, for which the chunks of
other sessions wait as well."""
SETTLED_S = 60.0
"""Time for which a connection must last so that the next pause is the shortest again, seconds."""


# Events


@dataclass(frozen=True)
class DecoderConnected:
    """The connection to a decode worker is ready."""

    worker: str


@dataclass(frozen=True)
class DecoderDisconnected:
    """The connection to a decode worker is closed."""

    worker: str


@dataclass(frozen=True)
class AllotmentKnown:
    """A decode worker has said for how many sessions of this worker it has time."""

    worker: str
    sessions: int
    carried: int = 0
    """Sessions that it carries, over all workers. 0: it does not say that."""
    used: int = 0
    """Sessions that it has, over all workers."""


@dataclass(frozen=True)
class ChunkWaits:
    """A chunk waits for its decoding."""

    job: int
    session: str


@dataclass(frozen=True)
class CacheMissed:
    """The worker lacks the session's cache."""

    job: int


@dataclass(frozen=True)
class RoomRefused:
    """The worker has no room for the session's cache."""

    job: int


@dataclass(frozen=True)
class AskFailed:
    """The worker has not answered in time, or its connection is closed."""

    job: int


@dataclass(frozen=True)
class ChunkDecoded:
    """The frames are here."""

    job: int


@dataclass(frozen=True)
class ChunkAbandoned:
    """The chunk is no longer waited for."""

    job: int


RoutingEvent = (
    DecoderConnected
    | DecoderDisconnected
    | AllotmentKnown
    | ChunkWaits
    | CacheMissed
    | RoomRefused
    | AskFailed
    | ChunkDecoded
    | ChunkAbandoned
)


# Commands


@dataclass(frozen=True)
class AskWorker:
    """Send the chunk to a decode worker."""

    job: int
    worker: str
    with_context: bool = False
    """Whether the latents of the chunks before go along."""


@dataclass(frozen=True)
class DecodeHere:
    """Decode the chunk on this worker."""

    job: int


RoutingCommand = AskWorker | DecodeHere


@dataclass(frozen=True)
class _Asked:
    session: str
    worker: str
    """The one that is asked now."""
    tried: frozenset[str]
    """The ones that have failed or refused."""
    with_context: bool = False


class DecodeRouter:
    """The routes of one worker's chunks. Pure: time is an argument."""

    def __init__(self) -> None:
        self._full_until: dict[str, float] = {}
        """Connected workers, and the time until which each takes no further session."""
        self._room: dict[str, int] = {}
        """Connected worker → sessions of this worker for which it has time, if it has said so: those that it
        carries less those of other workers, or else those that it allots."""
        self._sessions: dict[str, tuple[str, float]] = {}
        """The worker that decoded each session's last chunk, and when it was asked."""
        self._jobs: dict[int, _Asked] = {}

    @property
    def workers(self) -> int:
        """Number of connected workers."""
        return len(self._full_until)

    @property
    def jobs(self) -> int:
        """Number of chunks that a worker is asked for."""
        return len(self._jobs)

    @property
    def sessions(self) -> int:
        """Number of sessions whose decode worker is known."""
        return len(self._sessions)

    def handle(self, event: RoutingEvent, now: float) -> RoutingCommand | None:
        """Take one event. Returns the command that follows from it."""
        match event:
            case DecoderConnected(worker=worker):
                self._full_until[worker] = now
            case DecoderDisconnected(worker=worker):
                self._full_until.pop(worker, None)
                self._room.pop(worker, None)
            case AllotmentKnown(worker=worker):
                if worker in self._full_until:
                    others = max(event.used - self._load(worker, now), 0)
                    self._room[worker] = event.carried - others if event.carried else event.sessions
            case ChunkWaits(job=job, session=session):
                self._forget_idle(now)
                return self._route(job, session, frozenset(), now)
            case CacheMissed(job=job):
                asked = self._jobs[job]
                if asked.with_context:
                    # It has what it needs: such a worker is no use.
                    return self._elsewhere(job, now)
                self._jobs[job] = replace(asked, with_context=True)
                return AskWorker(job, asked.worker, with_context=True)
            case RoomRefused(job=job):
                worker = self._jobs[job].worker
                if worker in self._full_until:
                    self._full_until[worker] = now + FULL_S
                return self._elsewhere(job, now)
            case AskFailed(job=job):
                return self._elsewhere(job, now)
            case ChunkDecoded(job=job):
                asked = self._jobs.pop(job)
                self._sessions[asked.session] = asked.worker, now
            case ChunkAbandoned(job=job):
                self._jobs.pop(job, None)
            case _:
                assert_never(event)
        return None

    def _elsewhere(self, job: int, now: float) -> RoutingCommand:
        asked = self._jobs.pop(job)
        self._sessions.pop(asked.session, None)
        return self._route(job, asked.session, asked.tried | {asked.worker}, now)

    def _route(self, job: int, session: str, tried: frozenset[str], now: float) -> RoutingCommand:
        worker = self._worker_for(session, tried, now) if len(tried) < WORKERS_PER_CHUNK else None
        if worker is None:
            return DecodeHere(job)
        self._sessions[session] = worker, now
        self._jobs[job] = _Asked(session, worker, tried)
        return AskWorker(job, worker)

    def _worker_for(self, session: str, tried: frozenset[str], now: float) -> str | None:
        before, _ = self._sessions.get(session, (None, 0.0))
        if before is not None and before in self._full_until and before not in tried:
            return before
        usable = [each for each, until in self._full_until.items() if until <= now and each not in tried]
        # The most room. The choice among equal ones depends on the session, or else the first sessions of all
        # workers would have the same decode worker.
        return min(
            usable,
            key=lambda each: (self._load(each, now) - self._room.get(each, 0), _lot(session, each), each),
            default=None,
        )

    def _load(self, worker: str, now: float) -> int:
        recent = (each for each, asked_s in self._sessions.values() if now - asked_s <= SESSION_S)
        return sum(each == worker for each in recent)

    def _forget_idle(self, now: float) -> None:
        idle = [name for name, (_, asked_s) in self._sessions.items() if now - asked_s > AFFINITY_S]
        for name in idle:
            del self._sessions[name]


def _lot(session: str, worker: str) -> int:
    return crc32(f"{session} {worker}".encode())


def next_pause_s(pause_s: float, lasted_s: float, *, late: bool) -> float:
    """The pause before the next attempt to connect, seconds. `pause_s`: the last one.

    `lasted_s`: time since the attempt began. `late`: whether a late answer has ended the connection. The
    pause doubles each time then: a worker whose device is too slow, or hangs, still accepts connections.
    """
    if not late or lasted_s >= SETTLED_S:
        return RECONNECT_S
    return min(2 * pause_s, LATE_RECONNECT_S)
