"""Time of decisions by the number of streams: each worker orders its queue and chooses configurations."""

from __future__ import annotations

import random
import time
from typing import Any

from turboserve.bench.report import percentile
from turboserve.experiments.slack.profiles import FORWARDS, SlackProfile
from turboserve.worker.engine.fidelity_forecast import EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES
from turboserve.worker.engine.gather import GATHER_POLICIES, Candidate, LatencyProfile

STREAMS = (64, 128, 256, 512, 1024)
STREAMS_PER_WORKER = 16
CHUNK_S = 0.75


def decision_times(
    profile: SlackProfile, gather: str, fidelity: str, ticks: int, seed: int
) -> dict[str, Any]:
    """Return milliseconds of processor time by number of streams.

    `boundary`: one worker orders its queue and chooses the configuration of one chunk, as at each boundary.
    `all`: every worker does so for each of its streams, which is the work of one of SlackServe's ticks.
    """
    queue, chooser = GATHER_POLICIES.make(gather), FIDELITY_POLICIES.make(fidelity)
    forward, ladder = LatencyProfile(profile.device.forward_s), profile.device.ladder
    assert ladder is not None
    chance, found = random.Random(f"decisions {seed}"), {}
    for count in STREAMS:
        boundaries: list[float] = []
        whole: list[float] = []
        for _ in range(ticks):
            spent = 0.0
            for _ in range(count // STREAMS_PER_WORKER):
                slacks = [chance.uniform(-1.0, 12.0) for _ in range(STREAMS_PER_WORKER)]
                ready = [_candidate(str(n), slack, profile.chunk_s) for n, slack in enumerate(slacks)]
                streams = [
                    StreamLoad(each.session, each.slack_s, lowest=len(ladder.rungs) - 1) for each in ready
                ]
                load = EngineLoad(ladder, forward, 0.0, CHUNK_S, streams)
                for each in ready:
                    began = time.process_time()
                    queue.gather(ready, forward, STREAMS_PER_WORKER)
                    chooser.choose(each.session, load)
                    boundaries.append(time.process_time() - began)
                    spent += boundaries[-1]
            whole.append(spent)
        found[str(count)] = {"boundary": _milliseconds(boundaries), "all": _milliseconds(whole)}
    return found


def _candidate(session: str, slack_s: float, chunk_s: float) -> Candidate:
    return Candidate(session, 3, 0, FORWARDS, 0.0, slack_s, slack_s - chunk_s)


def _milliseconds(seconds: list[float]) -> dict[str, float | None]:
    return {f"p{round(100 * share)}_ms": 1000 * (percentile(seconds, share) or 0.0) for share in (0.5, 0.99)}
