"""The engine's gather code on a virtual clock: chunks become due, and a profile has the time of a forward.

Definitions:

- Sessions become due for a chunk by a Poisson process. At most `slots` of them are in the engine at a time,
  as its slabs allow; the others wait outside in order.
- *Capacity* of a profile is the largest b / (forwards · L(b)) for b up to the batch limit, in chunks a
  second.
- *Load* is the rate at which chunks become due, divided by capacity.
- *Latency* of a chunk is the time from becoming due to the end of its last forward, including any wait
  outside.
- A chunk *stalls* its viewer if its latency exceeds the playout slack with which it became due.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from turboserve.worker.engine.gather import Candidate, GatherPolicy, LatencyProfile

FRAMES = 3
"""Latent frames of every forward: all rows have the same number."""


@dataclass(frozen=True)
class BatchingScenario:
    """The input of every policy that is compared."""

    due_s: tuple[float, ...]
    """Time at which each chunk becomes due, rising."""
    forwards: int = 5
    """Forwards of a chunk."""
    slack_s: float = 1.0
    """Seconds of video that a viewer has left when the chunk becomes due."""
    slots: int = 16
    """Sessions in the engine at once, and the maximum number of rows of a forward."""


@dataclass
class _Chunk:
    name: str
    due_s: float
    step: int = 0


def poisson(chunks: int, rate: float, seed: int) -> tuple[float, ...]:
    """Draw the times of `chunks` events at `rate` per second."""
    source = random.Random(seed)
    now, times = 0.0, []
    for _ in range(chunks):
        now += source.expovariate(rate)
        times.append(now)
    return tuple(times)


def capacity(profile: LatencyProfile, forwards: int, limit: int) -> float:
    """Return the chunks per second at the best batch size up to `limit`."""
    return max(size / (forwards * profile(size)) for size in range(1, limit + 1))


def simulate(scene: BatchingScenario, policy: GatherPolicy, profile: LatencyProfile) -> list[float]:
    """Run a policy over a scene until every chunk is done. Returns latencies in order of completion."""
    latencies: list[float] = []
    inside: dict[str, _Chunk] = {}
    now, entered, count = 0.0, 0, len(scene.due_s)
    while len(latencies) < count:
        while entered < count and scene.due_s[entered] <= now and len(inside) < scene.slots:
            inside[str(entered)] = _Chunk(str(entered), scene.due_s[entered])
            entered += 1
        if not inside:
            now = scene.due_s[entered]
            continue
        ready = [_candidate(chunk, scene, now, profile(1)) for chunk in inside.values()]
        batch = policy.gather(ready, profile, scene.slots)
        now += profile(len(batch))
        for row in batch:
            chunk = inside[row.session]
            chunk.step += 1
            if chunk.step == scene.forwards:
                latencies.append(now - chunk.due_s)
                del inside[row.session]
    return latencies


def _candidate(chunk: _Chunk, scene: BatchingScenario, now: float, alone: float) -> Candidate:
    """Build a candidate as the engine's pacing does.

    Credit is the slack, minus the rest of a chunk that has begun, minus one more chunk.
    """
    left = scene.forwards - chunk.step
    waited = now - chunk.due_s
    slack = scene.slack_s - waited
    rest = left * alone if chunk.step else 0.0
    return Candidate(
        chunk.name, FRAMES, chunk.step, left, waited, slack, slack - rest - scene.forwards * alone
    )
