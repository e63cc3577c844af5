"""Workers of roles in virtual time: the share of chunks in time, and the most sessions at a given share.

The gather policy of a home's forwards and the routes of its chunks are the worker's own (`LeastCreditFirst`,
`DecodeRouter`). Latencies are declared:

- A forward of b sessions takes L(b). A chunk has several, one after the other.
- A decode takes a constant time, one at a time. On a worker with both roles it comes before forwards, and
  runs in turn with them: on a GPU that either of them fills, running both at once gains nothing.
- Sessions play without a pause, begin within one chunk, and stay on their workers. A viewer begins with the
  first chunk, and stands still while the next one is late.

*In time* is a chunk that is there before its viewer has played the one before (CPR, SlackServe).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from turboserve.worker.engine.gather import GATHER_POLICIES, Candidate, LatencyProfile
from turboserve.worker.remote_decoding.routing import (
    AllotmentKnown,
    AskWorker,
    ChunkDecoded,
    ChunkWaits,
    DecoderConnected,
    DecodeRouter,
)

FRAMES = 3
LEAD_S = 3.0
"""Video that a session generates ahead of its viewer, seconds: as shipped."""
SHARE = 0.99
"""Least share of chunks in time."""
SKIPPED = 2
"""First chunks of a session that do not count."""


@dataclass(frozen=True)
class Plant:
    """Declared latencies of one model on one kind of device."""

    forward_s: LatencyProfile
    forwards: int
    """Forwards of a chunk."""
    decode_s: float
    chunk_s: float
    """Playing time of a chunk, seconds."""


@dataclass
class _Session:
    name: str
    home: _Device
    begins_s: float
    step: int = 0
    undelivered: int = 0
    """Chunks that are denoised and not decoded."""
    ends_s: float | None = None
    """When the viewer has played what is delivered. None: nothing is."""
    due_s: float = 0.0
    chunks: int = 0
    late: int = 0


@dataclass
class _Device:
    router: DecodeRouter = field(default_factory=DecodeRouter)
    sessions: list[_Session] = field(default_factory=list)
    queue: deque[tuple[int, _Session]] = field(default_factory=deque)
    """Chunks that wait for their decode here, with their jobs."""
    clients: set[str] = field(default_factory=set)
    """Sessions whose chunks are decoded here."""
    forwarding: list[_Session] = field(default_factory=list)
    busy: bool = False


def share_in_time(plant: Plant, homes: int, decoders: int, sessions: int, seconds: float = 120.0) -> float:
    """Return the share of chunks in time. `decoders` 0: the homes decode."""
    devices = [_Device() for _ in range(homes)]
    pool = {f"decode-{number}": _Device() for number in range(decoders)}
    for device in devices:
        for name in pool:
            device.router.handle(DecoderConnected(name), 0.0)
    carried = max(int(plant.chunk_s / plant.decode_s), 1)
    everyone = [
        _Session(f"s{number}", devices[number % homes], number * plant.chunk_s / sessions)
        for number in range(sessions)
    ]
    for one in everyone:
        one.home.sessions.append(one)
    _Run(plant, [*devices, *pool.values()], pool, carried).run(everyone, seconds)
    counted = sum(one.chunks for one in everyone)
    return 1.0 - sum(one.late for one in everyone) / counted if counted else 0.0


def most_sessions(plant: Plant, homes: int, decoders: int, memory: int, share: float = SHARE) -> int:
    """Return the most sessions whose chunks are in time with at least this share, within `memory` sessions.

    More sessions are never easier, so the search ends with the first number that is too large.
    """
    found = 0
    while found < memory and share_in_time(plant, homes, decoders, found + 1) >= share:
        found += 1
    return found


class _Run:
    def __init__(self, plant: Plant, devices: list[_Device], pool: dict[str, _Device], carried: int) -> None:
        self._plant, self._devices, self._pool = plant, devices, pool
        self._carried = carried
        self._policy = GATHER_POLICIES.make("step")
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, _Device | None]] = []

    def run(self, sessions: list[_Session], seconds: float) -> None:
        for one in sessions:
            self._at(one.begins_s, None)
        while self._events:
            now, _, device = heapq.heappop(self._events)
            if now > seconds:
                return
            if device is not None:
                self._done(device, now)
            for each in self._devices:
                if not each.busy:
                    self._begin(each, now)

    def _at(self, at_s: float, device: _Device | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), device))

    def _begin(self, device: _Device, now: float) -> None:
        if device.queue:
            device.busy = True
            self._at(now + self._plant.decode_s, device)
            return
        ready = [self._candidate(one, now) for one in device.sessions if self._is_due(one, now)]
        if not ready:
            return
        batch = self._policy.gather(ready, self._plant.forward_s, len(ready))
        named = {each.session for each in batch}
        device.forwarding = [one for one in device.sessions if one.name in named]
        device.busy = True
        self._at(now + self._plant.forward_s(len(batch)), device)

    def _done(self, device: _Device, now: float) -> None:
        device.busy = False
        if not device.forwarding:
            job, one = device.queue.popleft()
            if self._pool:
                one.home.router.handle(ChunkDecoded(job), now)
            self._delivered(one, now)
            return
        for one in device.forwarding:
            one.step += 1
            if one.step == self._plant.forwards:
                one.step, one.undelivered = 0, one.undelivered + 1
                self._decode(one, now)
                self._at(self._next_due_s(one, now), None)
        device.forwarding = []

    def _decode(self, one: _Session, now: float) -> None:
        job, device = next(self._numbers), one.home
        if self._pool:
            for name, each in self._pool.items():
                # A decode worker says it every two seconds. At the beginning, a home knows it at once.
                said = AllotmentKnown(name, 0, self._carried, len(each.clients))
                device.router.handle(said, now)
            command = device.router.handle(ChunkWaits(job, one.name), now)
            assert isinstance(command, AskWorker)
            device = self._pool[command.worker]
            device.clients.add(one.name)
        device.queue.append((job, one))

    def _delivered(self, one: _Session, now: float) -> None:
        one.undelivered -= 1
        one.chunks += 1
        if one.ends_s is not None and one.chunks > SKIPPED:
            one.late += now > one.ends_s
        one.ends_s = max(one.ends_s or now, now) + self._plant.chunk_s
        self._at(self._next_due_s(one, now), None)

    def _next_due_s(self, one: _Session, now: float) -> float:
        """When the lead has room for one more chunk."""
        ends_s = now if one.ends_s is None else max(one.ends_s, now)
        one.due_s = max(now, ends_s + (one.undelivered + 1) * self._plant.chunk_s - LEAD_S)
        return one.due_s

    def _is_due(self, one: _Session, now: float) -> bool:
        return one.step > 0 or (now >= one.begins_s and now >= one.due_s - 1e-9)

    def _candidate(self, one: _Session, now: float) -> Candidate:
        """As the engine's pacing builds it."""
        alone, left = self._plant.forward_s(1), self._plant.forwards - one.step
        slack_s = 0.0 if one.ends_s is None else one.ends_s - now
        rest_s = left * alone if one.step else 0.0
        credit_s = slack_s - rest_s - self._plant.forwards * alone
        return Candidate(one.name, FRAMES, one.step, left, max(now - one.due_s, 0.0), slack_s, credit_s)


def compared(plant: Plant, workers: int, memory: Mapping[str, int]) -> dict[str, Any]:
    """Return the sessions at a share of 0.99 in time: of workers with both roles, and of each split.

    `memory`: sessions whose states a worker holds, by role: `both`, `denoise`, `decode`.
    """
    both = most_sessions(plant, workers, 0, workers * memory["both"])
    splits = []
    for decoders in range(1, workers):
        room = min((workers - decoders) * memory["denoise"], decoders * memory["decode"])
        sessions = most_sessions(plant, workers - decoders, decoders, room)
        splits.append({"denoise": workers - decoders, "decode": decoders, "sessions": sessions})
    best = max(splits, key=lambda split: split["sessions"])
    return {
        "denoise_s": plant.forward_s(1) * plant.forwards,
        "decode_s": plant.decode_s,
        "share_in_time": SHARE,
        "workers": workers,
        "both": both,
        "splits": splits,
        "sessions_per_worker": {"both": both / workers, "split": best["sessions"] / workers},
    }
