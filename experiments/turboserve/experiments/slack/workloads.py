"""SlackServe's workloads, scaled to a number of workers. Each is a function of its seed.

Source: SlackServe, 5.1. Its enterprise trace is not public; `trace` takes its arrivals from the Azure Public
Dataset instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from turboserve.experiments.autoscale.production import arrivals
from turboserve.simulation.player import ViewerPause
from turboserve.simulation.streams import StreamPlan

WORKERS = 16
"""Number of workers for which the paper's rate is."""
FRAMES = (81, 129, 161, 241)
"""Lengths of the streams in frames, equally likely."""
FPS = 16
CHUNK_FRAMES = 12
ACTIONS = dict(zip(FRAMES, (1, 2, 2, 3), strict=True))
"""Number of a stream's pauses or prompt switches by its length."""
PAUSE_SHARE = 0.2
"""Length of one pause, as a share of the stream's."""
BURSTS_AT = (0.2, 0.5, 0.8)
"""Places of the bursts in the sequence of arrivals."""
BURST_SHARE = 0.1
"""Share of all streams that comes in one burst."""
TRACE_RATE = 19_366 / 3_600
"""Mean arrivals per second of the Azure trace, before it is thinned."""


def chunks_of(frames: int) -> int:
    """Return the number of chunks of a stream: its first chunk has fewer frames, its last one is whole."""
    return -(-(frames + 3) // CHUNK_FRAMES)


def steady(seed: int, streams: int, rate: float, workers: int) -> list[StreamPlan]:
    """Return Poisson arrivals of `rate` × `workers` / 16 streams per second."""
    chance = random.Random(f"steady {seed}")
    return _plans(_poisson(chance, streams, rate * workers / WORKERS), chance)


def burst(seed: int, streams: int, rate: float, workers: int) -> list[StreamPlan]:
    """Return `steady` with three bursts of 10 % of all streams each, which come at one instant."""
    chance = random.Random(f"burst {seed}")
    times = _poisson(chance, streams, rate * workers / WORKERS)
    for place in BURSTS_AT:
        first = int(place * streams)
        last = min(streams, first + round(BURST_SHARE * streams))
        times[first:last] = [times[first]] * (last - first)
    return _plans(times, chance)


def pause(seed: int, streams: int, rate: float, workers: int) -> list[StreamPlan]:
    """Return `steady` whose viewers pause at uniform places for a fifth of the stream's length each time."""
    chance = random.Random(f"pause {seed}")
    times = _poisson(chance, streams, rate * workers / WORKERS)
    plans = []
    for at in times:
        frames = chance.choice(FRAMES)
        length_s = frames / FPS
        places = sorted(chance.uniform(0.0, length_s) for _ in range(ACTIONS[frames]))
        pauses = tuple(ViewerPause(place, PAUSE_SHARE * length_s) for place in places)
        plans.append(StreamPlan(at, chunks_of(frames), pauses))
    return plans


def switch(seed: int, streams: int, rate: float, workers: int) -> list[StreamPlan]:
    """Return `steady` whose viewers set another prompt at uniform places and discard what they have not seen.

    In the paper only the slack is set back, and the prompt stays.
    """
    chance = random.Random(f"switch {seed}")
    times = _poisson(chance, streams, rate * workers / WORKERS)
    plans = []
    for at in times:
        frames = chance.choice(FRAMES)
        places = sorted(chance.uniform(0.0, frames / FPS) for _ in range(ACTIONS[frames]))
        plans.append(StreamPlan(at, chunks_of(frames), switches=tuple(places)))
    return plans


def trace(seed: int, streams: int, rate: float, workers: int) -> list[StreamPlan]:
    """Return arrivals of the Azure conversations, thinned to the rate, from a place that the seed draws."""
    chance = random.Random(f"trace {seed}")
    kept = min(1.0, rate * workers / WORKERS / TRACE_RATE)
    thinned = [at for at, _ in arrivals() if chance.random() < kept]
    first = chance.randrange(max(1, len(thinned) - streams))
    times = thinned[first : first + streams]
    return _plans([at - times[0] for at in times], chance)


WORKLOADS: dict[str, Callable[[int, int, float, int], list[StreamPlan]]] = {
    "steady": steady,
    "burst": burst,
    "switch": switch,
    "pause": pause,
    "trace": trace,
}
"""Workloads by name. Arguments: seed, number of streams, rate for 16 workers, number of workers."""


def _poisson(chance: random.Random, streams: int, rate: float) -> list[float]:
    times, at = [], 0.0
    for _ in range(streams):
        at += chance.expovariate(rate)
        times.append(at)
    return times


def _plans(times: list[float], chance: random.Random) -> list[StreamPlan]:
    return [StreamPlan(at, chunks_of(chance.choice(FRAMES))) for at in times]
