"""Bursty traces of five generators beside those of Appendix A.

Stays are log-normal (σ 1) with a mean of `STAY_S`. Each trace begins with the sessions that its mean rate
implies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Protocol

from turboserve.autoscaler.control.events import SessionChange
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked

STAY_S = 90.0
LASTS_S = 1800.0
MEAN_SESSIONS = 30


class Generator(Protocol):
    """Draws a trace of `lasts_s` seconds."""

    def __call__(self, seed: int, lasts_s: float = LASTS_S) -> WorkloadTrace: ...


def modulated(seed: int, lasts_s: float = LASTS_S) -> WorkloadTrace:
    """Draw a Markov-modulated Poisson process: calm of 2 min on average, then a burst of 20 s at ten times
    the calm rate."""
    source = random.Random(f"modulated {seed}")
    calm_s, burst_s, factor = 120.0, 20.0, 10.0
    calm_rate = MEAN_SESSIONS / STAY_S * (calm_s + burst_s) / (calm_s + factor * burst_s)

    def instants() -> Iterator[float]:
        at, bursts = 0.0, False
        while at < lasts_s:
            ends_s = at + source.expovariate(1 / (burst_s if bursts else calm_s))
            yield from _poisson(source, at, ends_s, calm_rate * (factor if bursts else 1.0))
            at, bursts = ends_s, not bursts

    return _trace(f"modulated {seed}", instants(), source, lasts_s)


def clustered(seed: int, lasts_s: float = LASTS_S) -> WorkloadTrace:
    """Draw a Poisson cluster process: half of the sessions come one by one, half in clusters of 15 on
    average (geometric) within some 5 s."""
    source = random.Random(f"clustered {seed}")
    rate, size, spread_s = MEAN_SESSIONS / STAY_S, 15, 5.0

    def instants() -> Iterator[float]:
        yield from _poisson(source, 0.0, lasts_s, rate / 2)
        for head in _poisson(source, 0.0, lasts_s, rate / 2 / size):
            count = 1 + math.floor(math.log(1 - source.random()) / math.log(1 - 1 / size))
            yield from (head + source.expovariate(1 / spread_s) for _ in range(count))

    return _trace(f"clustered {seed}", instants(), source, lasts_s)


def renewal(seed: int, lasts_s: float = LASTS_S, cv: float = 4.0) -> WorkloadTrace:
    """Draw arrivals with Gamma-distributed intervals of coefficient of variation `cv` (NeuStream, 6)."""
    source = random.Random(f"renewal {seed} {cv:g}")
    shape = 1 / cv**2
    scale_s = STAY_S / MEAN_SESSIONS / shape

    def instants() -> Iterator[float]:
        at = 0.0
        while (at := at + source.gammavariate(shape, scale_s)) < lasts_s:
            yield at

    return _trace(f"renewal {seed}", instants(), source, lasts_s)


def self_exciting(seed: int, lasts_s: float = LASTS_S) -> WorkloadTrace:
    """Draw a Hawkes process: each arrival raises the rate for some 15 s and causes 0.8 further ones on
    average."""
    source = random.Random(f"self-exciting {seed}")
    caused, decay_s = 0.8, 15.0
    base = MEAN_SESSIONS / STAY_S * (1 - caused)

    def instants() -> Iterator[float]:
        parents = list(_poisson(source, 0.0, lasts_s, base))
        while parents:
            at = parents.pop()
            yield at
            parents.extend(at + source.expovariate(1 / decay_s) for _ in _poisson(source, 0.0, caused, 1.0))

    return _trace(f"self-exciting {seed}", instants(), source, lasts_s)


def flash_crowds(seed: int, lasts_s: float = LASTS_S) -> WorkloadTrace:
    """Draw arrivals whose rate swings by 60 % in 15 min, with a crowd of 20 to 40 within 10 s every 6 min on
    average."""
    source = random.Random(f"flash crowds {seed}")
    rate, period_s = MEAN_SESSIONS / STAY_S, 900.0

    def instants() -> Iterator[float]:
        for at in _poisson(source, 0.0, lasts_s, 1.6 * rate):
            if source.random() * 1.6 < 1 + 0.6 * math.sin(2 * math.pi * at / period_s):
                yield at
        for head in _poisson(source, 0.0, lasts_s, 1 / 360.0):
            yield from (head + source.uniform(0.0, 10.0) for _ in range(source.randint(20, 40)))

    return _trace(f"flash crowds {seed}", instants(), source, lasts_s)


GENERATORS: Mapping[str, Generator] = {
    "modulated": modulated,
    "clustered": clustered,
    "renewal": renewal,
    "self-exciting": self_exciting,
    "flash crowds": flash_crowds,
}


def _poisson(source: random.Random, begins_s: float, ends_s: float, rate: float) -> Iterator[float]:
    at = begins_s
    while (at := at + source.expovariate(rate)) < ends_s:
        yield at


def _trace(name: str, instants: Iterator[float], source: random.Random, lasts_s: float) -> WorkloadTrace:
    times = [0.0] * MEAN_SESSIONS + sorted(at for at in instants if at < lasts_s)
    steps: list[Step] = []
    for number, at in enumerate(times):
        session = f"s{number:05d}"
        steps.append(Step(at, session, SessionChange.ARRIVAL))
        leaves = at + STAY_S * source.lognormvariate(-0.5, 1.0)
        if leaves < lasts_s:
            steps.append(Step(leaves, session, SessionChange.DEPARTURE))
    steps.sort(key=lambda step: (step.at, step.session))
    return checked(name, steps, lasts_s)
