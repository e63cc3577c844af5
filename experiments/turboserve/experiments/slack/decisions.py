"""Time of decisions by the number of streams: a worker orders its queue and chooses configurations."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from turboserve.bench.report import percentile
from turboserve.experiments.slack.profiles import FORWARDS, SlackProfile
from turboserve.experiments.slack.reference.exchange import ReferenceInTime
from turboserve.worker.engine.fidelity_forecast import EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES, FidelityPolicy
from turboserve.worker.engine.gather import GATHER_POLICIES, Candidate, LatencyProfile

STREAMS = (64, 128, 256, 512, 1024)
STREAMS_PER_WORKER = 16
CHUNK_S = 0.75
LEAD_S = 3.0
LOADS = (0.7, 0.9, 1.1, 1.3, 1.6, 2.0)
"""Work of a worker's streams at the best configuration, as a multiple of what it computes in that time."""
DECISIONS_PER_STATE = 12
"""Number of streams that decide in each state of a lone worker with all streams."""
POLICIES: Mapping[str, tuple[str, Callable[[], FidelityPolicy]]] = {
    "tiers, bmpr": ("tiers", lambda: FIDELITY_POLICIES.make("bmpr")),
    "step, in-time": ("step", lambda: FIDELITY_POLICIES.make("in-time")),
    "step, in-time without shortcuts": ("step", ReferenceInTime),
}
"""Gather and fidelity policies of the rows."""


def decision_times(profile: SlackProfile, name: str, ticks: int, seed: int) -> dict[str, Any]:
    """Return milliseconds of processor time by number of streams.

    `one_worker`: one worker with all streams orders its queue and chooses the configuration of one chunk, as
    at each boundary. `workers_of_16`: one of the workers with 16 streams each does so. `all_of_16`: every one
    of these workers does so for each of its streams, which is the work of one of SlackServe's ticks.
    """
    found = {}
    for count in STREAMS:
        chance = random.Random(f"decisions {seed} {count}")
        whole = [
            seconds
            for _ in range(ticks)
            for seconds in _decide(profile, name, _state(chance, profile, count), chance, DECISIONS_PER_STATE)
        ]
        each: list[float] = []
        all_s: list[float] = []
        for _ in range(ticks):
            size = STREAMS_PER_WORKER
            workers = [_state(chance, profile, size) for _ in range(count // size)]
            spent = [seconds for load in workers for seconds in _decide(profile, name, load, chance, size)]
            each += spent
            all_s.append(sum(spent))
        timed = {"one_worker": whole, "workers_of_16": each, "all_of_16": all_s}
        found[str(count)] = {key: _milliseconds(seconds) for key, seconds in timed.items()}
    return found


def _state(chance: random.Random, profile: SlackProfile, count: int) -> EngineLoad:
    """One worker whose streams are anywhere between a stall and the largest lead."""
    ladder = profile.device.ladder
    assert ladder is not None
    lowest = ladder.lowest(None, False)
    forward_s = chance.choice(LOADS) * CHUNK_S / count / FORWARDS
    streams = [
        StreamLoad(
            str(number),
            chance.uniform(-0.5, LEAD_S),
            forwards_left=chance.choice([0.0, chance.uniform(0.5, FORWARDS)]),
            lead_s=LEAD_S,
            place=chance.randint(0, lowest),
            lowest=lowest,
            raised_s=chance.uniform(0.0, 20.0),
        )
        for number in range(count)
    ]
    return EngineLoad(ladder, LatencyProfile({1: forward_s, 16: 16 * forward_s}), 0.0, CHUNK_S, streams)


def _decide(
    profile: SlackProfile, name: str, load: EngineLoad, chance: random.Random, decisions: int
) -> list[float]:
    """Return the seconds of each of so many decisions."""
    gather, fidelity = POLICIES[name]
    queue, chooser = GATHER_POLICIES.make(gather), fidelity()
    ready = [
        Candidate(each.session, 3, 0, FORWARDS, 0.0, each.slack_s, each.slack_s - profile.chunk_s)
        for each in load.streams
    ]
    spent = []
    for stream in chance.sample(load.streams, decisions):
        began = time.process_time()
        queue.gather(ready, load.forward, load.max_batch)
        chooser.choose(stream.session, load)
        spent.append(time.process_time() - began)
    return spent


def _milliseconds(seconds: list[float]) -> dict[str, float | int]:
    p50, p99 = (1000 * (percentile(seconds, share) or 0.0) for share in (0.5, 0.99))
    return {"p50_ms": p50, "p99_ms": p99, "samples": len(seconds)}
