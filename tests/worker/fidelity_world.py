"""Loads for tests of the choice of configurations, and one device that serves sessions by a policy."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from turboserve.experiments.slack.reference.forecast import PlannedChunk, next_chunks
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_exchange import QualityExchange
from turboserve.worker.engine.fidelity_forecast import HORIZON, ChunkQueue, EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.fidelity_policy import FidelityPolicy
from turboserve.worker.engine.gather import LatencyProfile

CHUNK_S = 0.75
BEST = Rung(Fidelity(4, 7), 5.0, 1.0)
LADDER = FidelityLadder(
    (BEST, Rung(Fidelity(3, 7), 4.0, 0.98), Rung(Fidelity(2, 7), 3.0, 0.95), Rung(Fidelity(2, 1), 2.0, 0.8)),
    floor=0.9,
)


loads = st.builds(
    lambda seed, most: random_load(random.Random(seed), most), st.integers(0, 10**6), st.integers(1, 8)
)
"""Small loads."""


def ladder_of(costs: Sequence[tuple[float, float]], floor: float = 0.0) -> FidelityLadder:
    """A ladder with the best configuration above these (forwards, quality)."""
    lower = [Rung(Fidelity(1, 1, 0.01 * i), *cost) for i, cost in enumerate(costs)]
    return FidelityLadder((BEST, *lower), floor)


def random_load(rng: random.Random, most: int = 3) -> EngineLoad:
    """A small load: up to `most` sessions, up to four configurations, batches that pay and that do not."""
    lower = rng.randint(1, 3)
    costs = sorted((rng.uniform(1, 4.8) for _ in range(lower)), reverse=True)
    qualities = sorted((rng.uniform(0.6, 1) for _ in range(lower)), reverse=True)
    alone = rng.choice([0.05, 0.1, 0.2])
    profile = rng.choice([{1: alone, 4: 4 * alone}, {1: alone, 4: 2 * alone}, {1: alone, 2: 1.5 * alone}])
    streams = [
        StreamLoad(
            f"s{number}",
            rng.uniform(0, 3),
            undecoded=rng.choice([0, 0, 1]),
            forwards_left=rng.choice([0.0, 0.0, rng.uniform(0.5, 5)]),
            lead_s=rng.choice([0.75, 3.0, 3.0]),
            lowest=rng.choice([0, lower, lower]),
        )
        for number in range(rng.randint(1, most))
    ]
    ladder = ladder_of(list(zip(costs, qualities, strict=True)))
    return EngineLoad(ladder, LatencyProfile(profile), rng.choice([0.0, 0.1]), CHUNK_S, streams)


def wide_load(rng: random.Random) -> EngineLoad:
    """A load of 1 to 64 sessions in any state, from idle to hopeless."""
    lower, count = rng.randint(1, 5), rng.choice([1, 2, 3, 5, 8, 16, 33, 64])
    costs = sorted((rng.uniform(0.5, 4.9) for _ in range(lower)), reverse=True)
    qualities = sorted((rng.uniform(0.3, 1) for _ in range(lower)), reverse=True)
    share = rng.choice([0.3, 0.8, 1.0, 1.2, 1.5, 2.0, 5.0, 30.0])
    alone = share * CHUNK_S / count / BEST.forwards * rng.uniform(0.8, 1.2)
    forward = {1: alone, 4: rng.choice([2.0, 3.0, 4.0]) * alone, 16: rng.choice([4.0, 10.0, 16.0]) * alone}
    width_s = rng.choice([0.5, 2.0, 6.0, 12.0])
    streams = [
        StreamLoad(
            f"s{number}",
            rng.choice([rng.uniform(-0.5, width_s)] * 9 + [math.inf]),
            undecoded=rng.choice([0, 0, 1, 2]),
            forwards_left=rng.choice([0.0, 0.0, rng.uniform(0.1, 5)]),
            context_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(0, 0.4)]),
            lead_s=rng.choice([0.75, 3.0, 3.0, 12.0, math.inf]),
            chunks_left=rng.choice([None, None, 0, 1, 2, 9]),
            place=rng.randint(0, lower),
            lowest=rng.choice([lower, lower, rng.randint(0, lower)]),
            held_place=rng.choice([None, None, rng.randint(0, lower)]),
            raised_s=rng.choice([0.0, 5.0, 20.0, math.inf]),
            starts=rng.random() < 0.03,
            returns_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, 0.5)]),
        )
        for number in range(count)
    ]
    ladder = ladder_of(list(zip(costs, qualities, strict=True)))
    return EngineLoad(
        ladder,
        LatencyProfile(forward),
        rng.choice([0.0, 0.1]),
        CHUNK_S,
        streams,
        max_batch=rng.choice([1, 4, 16]),
        encoding_s=rng.choice([0.0, 0.0, 0.05]),
    )


def plan(
    load: EngineLoad, caps: Mapping[str, int], margin: float = 0.0, horizon: int = HORIZON
) -> tuple[ChunkQueue, QualityExchange]:
    """The next chunks of all sessions, and their configurations.

    `caps`: highest place of each session's next chunk. `margin`: see `MARGIN`.
    """
    queue = ChunkQueue(load, horizon)
    highest = np.array([caps[each.session] for each in load.streams], dtype=np.int64)
    exchange = QualityExchange(queue, highest, margin)
    exchange.run()
    return queue, exchange


def planned(
    load: EngineLoad, caps: Mapping[str, int], margin: float = 0.0, horizon: int = HORIZON
) -> list[PlannedChunk]:
    """The next chunks of all sessions with the configurations that the product plans."""
    chunks = next_chunks(load, horizon)
    queue, exchange = plan(load, caps, margin, horizon)
    assert [chunk.due_s for chunk in chunks] == queue.due_s.tolist()
    for chunk, place in zip(chunks, exchange.place.tolist(), strict=True):
        if chunk.highest < chunk.lowest:
            chunk.place, chunk.forwards = place, load.ladder.rungs[place].forwards
        assert chunk.place == place
    return chunks


def overloaded(count: int, load: float, lowest: int = 2) -> EngineLoad:
    """So many sessions, which together need `load` times what the device computes at the best."""
    alone = load * CHUNK_S / (count * BEST.forwards)
    streams = [StreamLoad(f"s{i}", 1.0 + 0.25 * i, lead_s=3.0, lowest=lowest) for i in range(count)]
    return EngineLoad(LADDER, LatencyProfile({1: alone}), 0.0, CHUNK_S, streams)


@dataclass
class ServedSession:
    """One session of `serve`."""

    name: str
    due_s: float
    """When its next chunk is due."""
    lowest: int
    place: int = 0
    raised_at: float = -1e9
    places: list[tuple[float, int]] = field(default_factory=list)
    """When each of its chunks began, and at which place of the ladder."""
    late: int = 0


def serve(
    policy: FidelityPolicy,
    load: EngineLoad,
    seconds: float,
    slowdown: list[tuple[float, float]] | None = None,
) -> list[ServedSession]:
    """Serve the streams of `load`, one chunk at a time, earliest deadline first, for `seconds`.

    A late chunk stalls its viewer: all later deadlines shift. `slowdown`: (time, factor) pairs; the device
    is slower by the factor from that time on, which the policy sees.
    """
    sessions = [ServedSession(each.session, each.slack_s, each.lowest, each.place) for each in load.streams]
    leads = {each.session: each.lead_s for each in load.streams}
    alone, now = load.forward(1), 0.0
    while now < seconds:
        factor = next((f for at, f in reversed(slowdown or []) if at <= now), 1.0)
        forward = LatencyProfile({1: alone * factor})
        ready = [each for each in sessions if each.due_s - leads[each.name] <= now + 1e-9]
        if not ready:
            now = min(each.due_s - leads[each.name] for each in sessions)
            continue
        session = min(ready, key=lambda each: each.due_s)
        streams = [
            StreamLoad(
                each.name,
                each.due_s - now,
                lead_s=leads[each.name],
                place=each.place,
                lowest=each.lowest,
                raised_s=now - each.raised_at,
            )
            for each in sessions
        ]
        place = policy.choose(session.name, replace(load, forward=forward, streams=streams))
        if place < session.place:
            session.raised_at = now
        session.place = place
        session.places.append((now, place))
        now += load.ladder.rungs[place].forwards * forward(1)
        late_s = max(0.0, now + load.after_s - session.due_s)
        session.late += late_s > 1e-9
        session.due_s += late_s + load.chunk_s
    return sessions


def quality_of(sessions: Sequence[ServedSession], ladder: FidelityLadder) -> float:
    """Mean quality of all chunks."""
    found = [ladder.rungs[place].quality for each in sessions for _, place in each.places]
    return sum(found) / len(found)
