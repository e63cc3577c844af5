"""Traces of production demand: drawn to Table 12 of TurboServe (T1–T3), and one hour of real arrivals."""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.report import BenchError
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked, since

WINDOW_S = 300.0
"""Length of a window. Means in the table are multiples of 0.2: five samples, one a minute (inferred)."""
TOLERANCE = 0.03
PERIOD_S = 60.0
"""Mean of an active period, log-normal (σ 1)."""
PULL_S = 30.0
"""Time within which the gap between the active sessions and the line through the means is closed."""
DRAWS = 40


@dataclass(frozen=True)
class Window:
    """One column of the table."""

    arrivals: int
    departures: int
    active: float
    """Mean active sessions."""


TRACES: dict[str, tuple[Window, ...]] = {
    "T1": (
        Window(122, 44, 28.0),
        Window(130, 86, 56.2),
        Window(66, 88, 57.4),
        Window(22, 64, 37.4),
        Window(18, 38, 23.2),
    ),
    "T2": (
        Window(218, 60, 61.0),
        Window(214, 124, 118.6),
        Window(248, 204, 147.6),
        Window(192, 196, 154.2),
        Window(204, 204, 149.4),
    ),
    "T3": (
        Window(74, 10, 13.2),
        Window(148, 64, 49.4),
        Window(156, 126, 112.8),
        Window(264, 148, 121.4),
        Window(156, 214, 148.4),
    ),
}


def production(name: str, seed: int = 0) -> WorkloadTrace:
    """Draw a trace with the table's arrivals and departures, and its mean active sessions within 3 %.

    Arrivals and departures come at uniform instants of their windows. The session that departs is the one
    that arrived last in 45 % of the cases, otherwise any: lifetimes are heavy-tailed. Sessions idle after
    log-normal active periods. Idle sessions return at a rate that pulls the number of active sessions toward
    a line through the windows' means, loosely, so that noise stays. The first draw whose means fit is
    returned. Until then, the line is shifted by half of each draw's error.
    """
    windows = TRACES[name]
    shifted = [window.active for window in windows]
    for draw in range(DRAWS):
        trace = _draw(name, windows, _nodes(shifted), f"{name} {seed} {draw}")
        means = active_means(trace)
        if all(abs(m / w.active - 1) <= TOLERANCE for m, w in zip(means, windows, strict=True)):
            return trace
        off = [mean - window.active for mean, window in zip(means, windows, strict=True)]
        shifted = [max(mean - by / 2, 0.0) for mean, by in zip(shifted, off, strict=True)]
    raise BenchError(f"{name}: none of {DRAWS} draws is within {TOLERANCE:.0%} of the table's means")


def active_means(trace: WorkloadTrace) -> list[float]:
    """Return the mean active sessions by window, sampled every second."""
    counts, size = trace.active(), int(WINDOW_S)
    return [sum(counts[i : i + size]) / size for i in range(0, len(counts), size)]


def _draw(name: str, windows: Sequence[Window], aims: Sequence[float], seed: str) -> WorkloadTrace:
    source = random.Random(seed)
    crowd = _ActiveSessions(source)
    due = sorted(
        [(at, 0) for at in _instants(source, [window.arrivals for window in windows])]
        + [(at, 1) for at in _instants(source, [window.departures for window in windows])],
        reverse=True,
    )
    size, missing = int(WINDOW_S), 0.0
    for second in range(size * len(windows)):
        if second % size == 0:
            missing = 0.0
        missing += _aim(aims, second) - crowd.active
        while due and due[-1][0] < second + 1:
            at, departs = due.pop()
            crowd.depart(at) if departs else crowd.arrive(at)
        window = windows[second // size]
        crowd.pull(second + 1.0, _aim(aims, second) + missing / PULL_S, window)
    return checked(name, [step for step in crowd.steps if step.at < size * len(windows)], size * len(windows))


def _instants(source: random.Random, counts: Sequence[int]) -> list[float]:
    return [
        at
        for window, count in enumerate(counts)
        for at in sorted((window + source.random()) * WINDOW_S for _ in range(count))
    ]


def _nodes(means: Sequence[float]) -> list[float]:
    """Return points of the line at the middles of the windows such that its own means are `means`."""
    nodes = list(means)
    size = int(WINDOW_S)
    for _ in range(50):
        for index, wanted in enumerate(means):
            mean = sum(_aim(nodes, index * size + second) for second in range(0, size, 5)) / (size / 5)
            nodes[index] = max(nodes[index] + wanted - mean, 0.0)
    return nodes


def _aim(aims: Sequence[float], second: float) -> float:
    """Return the line through the points at the middles of the windows; it begins at 0."""
    at = second / WINDOW_S - 0.5
    if at < 0:
        return aims[0] * 2 * (at + 0.5)
    low = min(int(at), len(aims) - 1)
    high = min(low + 1, len(aims) - 1)
    return aims[low] + (aims[high] - aims[low]) * (at - low)


class _ActiveSessions:
    """The sessions while a trace is drawn."""

    def __init__(self, source: random.Random) -> None:
        self.steps: list[Step] = []
        self._source = source
        self._active: dict[str, float] = {}
        """Session → the end of its active period."""
        self._idle: list[str] = []
        self._all: list[str] = []
        self._born = 0

    def arrive(self, at: float) -> None:
        session = f"s{self._born:05d}"
        self._born += 1
        self._all.append(session)
        self._active[session] = at + self._period()
        self.steps.append(Step(at, session, SessionChange.ARRIVAL))

    def depart(self, at: float) -> None:
        if not self._all:
            # There is no session yet, so the next one departs as soon as it arrives.
            self.arrive(at)
        last = self._source.random() < 0.45
        session = self._all.pop(-1 if last else self._source.randrange(len(self._all)))
        self._active.pop(session, None)
        if session in self._idle:
            self._idle.remove(session)
        self.steps.append(Step(at, session, SessionChange.DEPARTURE))

    @property
    def active(self) -> int:
        return len(self._active)

    def pull(self, at: float, aim: float, window: Window) -> None:
        """End active periods and close a part of the gap to `aim`. Called once a second."""
        for session, ends_s in list(self._active.items()):
            if ends_s <= at:
                self._idles(session, at)
        # Beside the gap, as many sessions return as become idle or depart, minus the arrivals.
        leave = window.departures / WINDOW_S * self.active / max(len(self._all), 1)
        steady = self.active / PERIOD_S + leave - window.arrivals / WINDOW_S
        rate = (aim - self.active) / PULL_S + steady
        for _ in range(int(abs(rate)) + (self._source.random() < abs(rate) % 1)):
            if rate > 0 and self._idle:
                session = self._idle.pop(self._source.randrange(len(self._idle)))
                self._active[session] = at + self._period()
                self.steps.append(Step(at, session, SessionChange.ACTIVATION))
            elif rate < 0 and self._active:
                self._idles(min(self._active, key=lambda s: (self._active[s], s)), at)

    def _idles(self, session: str, at: float) -> None:
        del self._active[session]
        self._idle.append(session)
        self.steps.append(Step(at, session, SessionChange.IDLING))

    def _period(self) -> float:
        return PERIOD_S * self._source.lognormvariate(-0.5, 1.0)


FILE = "data/azure_llm_conv_2023.csv.gz"
"""Azure Public Dataset, AzureLLMInferenceTrace_conv, CC BY 4.0."""
STAY_S = 150.0
"""Mean stay: Little's law on the paper's traces gives 2 to 4 minutes."""
KEPT_PER_STRETCH = 16
"""Stretch × thinning. It gives every time scale about the same number of concurrent sessions (50)."""
SCALES = (1, 4, 16)


def arrivals() -> list[tuple[float, int]]:
    """Return (seconds since the first request, generated tokens) of every request."""
    packed = resources.files("turboserve.experiments.autoscale").joinpath(FILE).read_bytes()
    rows = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    return [(float(row["time_s"]), int(row["generated_tokens"])) for row in rows]


def azure(stretch: int, lasts_s: float = 3600.0) -> WorkloadTrace:
    """Return the first `lasts_s` of the arrivals, `stretch` times slower, every (16 / stretch)-th kept.

    A session stays in proportion to the request's generated tokens, times a log-normal factor (σ 1), which is
    heavy tailed. A session that stays longer than a minute idles once, for a fifth of its stay. The first two
    mean stays are left out, so that the system is not empty at 0.
    """
    every = KEPT_PER_STRETCH // stretch
    return sessions_of(arrivals(), f"azure x{stretch}", every, lasts_s, stretch, f"azure {stretch}")


def sessions_of(
    rows: Sequence[tuple[float, int]], name_: str, every: int, lasts_s: float, stretch: int, seed: str
) -> WorkloadTrace:
    """Build a trace from (seconds, generated tokens) of requests; see `azure`. `every`: n-th that is kept."""
    source = random.Random(seed)
    mean = sum(tokens for _, tokens in rows) / len(rows)
    steps: list[Step] = []
    for number, (at, tokens) in enumerate(rows[::every]):
        begins_s = at * stretch - 2 * STAY_S
        stay_s = STAY_S * tokens / mean * source.lognormvariate(-0.5, 1.0)
        name = f"s{number:05d}"
        steps.append(Step(begins_s, name, SessionChange.ARRIVAL))
        if stay_s > 60.0:
            steps.append(Step(begins_s + 0.4 * stay_s, name, SessionChange.IDLING))
            steps.append(Step(begins_s + 0.6 * stay_s, name, SessionChange.ACTIVATION))
        steps.append(Step(begins_s + stay_s, name, SessionChange.DEPARTURE))
    steps.sort(key=lambda step: (step.at, step.session))
    return checked(name_, since(steps, 0.0, lasts_s), lasts_s)
