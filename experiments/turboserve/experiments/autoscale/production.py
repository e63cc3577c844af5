"""Traces of production demand: drawn to the statistics that TurboServe published, and real arrivals."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Sequence
from importlib import resources

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.report import BenchError
from turboserve.experiments.autoscale.published import (
    PUBLISHED,
    TOLERANCE,
    TraceStatistics,
    Window,
    active_means,
    differences,
    published,
)
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked, since

PERIOD_S = 60.0
"""Mean of an active period, log-normal (σ 1); at most a fifth of a window."""
PULL_S = 30.0
"""Time within which the gap between the active sessions and the line through the means is closed; at most a
tenth of a window."""
DRAWS = 40


def production(name: str, seed: int = 0, window_s: float | None = None) -> WorkloadTrace:
    """Draw a trace with the published arrivals, departures and mean active sessions within 3 % by window.

    Arrivals and departures come at uniform instants of their windows. The session that departs is the one
    that arrived last in 45 % of the cases, otherwise any: lifetimes are heavy-tailed. Sessions idle after
    log-normal active periods. Idle sessions return at a rate that pulls the number of active sessions toward
    a line through the windows' means, loosely, so that noise stays. The first draw that fits is returned.
    Until then, the line is shifted by half of each draw's error.

    `window_s`: length of the windows, which the paper's copy lacks. None: the inferred one.
    """
    statistics = published(name, window_s)
    own = "" if window_s in (None, PUBLISHED[name].window_s) else f" {window_s:g} s"
    shifted = [window.active for window in statistics.windows]
    for draw in range(DRAWS):
        trace = _draw(f"{name}{own}", statistics, shifted, f"{name}{own} {seed} {draw}")
        if all(difference.within for difference in differences(trace, statistics)):
            return trace
        means = active_means(trace, statistics)
        off = [mean - window.active for mean, window in zip(means, statistics.windows, strict=True)]
        shifted = [max(mean - by / 2, 0.0) for mean, by in zip(shifted, off, strict=True)]
    raise BenchError(f"{name}: none of {DRAWS} draws is within {TOLERANCE:.0%} of the published statistics")


def _draw(name: str, statistics: TraceStatistics, means: Sequence[float], seed: str) -> WorkloadTrace:
    source = random.Random(seed)
    length_s, windows = statistics.window_s, statistics.windows
    pull_s, period_s = min(length_s / 10, PULL_S), min(length_s / 5, PERIOD_S)
    crowd = _ActiveSessions(source, length_s, pull_s, period_s)
    line = _Line(means, length_s, statistics.present)
    for _ in range(statistics.present):
        crowd.arrive(0.0)
    due = sorted(
        [(at, 0) for at in _instants(source, [window.arrivals for window in windows], length_s)]
        + [(at, 1) for at in _instants(source, [window.departures for window in windows], length_s)],
        reverse=True,
    )
    ends_s, missing, last = statistics.ends_s, 0.0, -1
    for second in range(math.ceil(ends_s)):
        index = min(int(second / length_s), len(windows) - 1)
        if index != last:
            missing, last = 0.0, index
        missing += line.at(second) - crowd.active
        while due and due[-1][0] < second + 1:
            at, departs = due.pop()
            crowd.depart(at) if departs else crowd.arrive(at)
        crowd.pull(second + 1.0, line.at(second) + missing / pull_s, windows[index])
    return checked(name, [step for step in crowd.steps if step.at < ends_s], ends_s)


def _instants(source: random.Random, counts: Sequence[int], length_s: float) -> list[float]:
    return [
        at
        for window, count in enumerate(counts)
        for at in sorted((window + source.random()) * length_s for _ in range(count))
    ]


class _Line:
    """A line through points at the middles of the windows, such that its means by window are `means`.

    It begins at `begin`.
    """

    def __init__(self, means: Sequence[float], length_s: float, begin: float) -> None:
        self._length_s, self._begin = length_s, begin
        self._points = list(means)
        size = math.ceil(length_s)
        for _ in range(50):
            for index, wanted in enumerate(means):
                samples = range(0, size, 5)
                mean = sum(self.at(index * length_s + second) for second in samples) / len(samples)
                self._points[index] = max(self._points[index] + wanted - mean, 0.0)

    def at(self, second: float) -> float:
        points = self._points
        at = second / self._length_s - 0.5
        if at < 0:
            return self._begin + (points[0] - self._begin) * 2 * (at + 0.5)
        low = min(int(at), len(points) - 1)
        high = min(low + 1, len(points) - 1)
        return points[low] + (points[high] - points[low]) * (at - low)


class _ActiveSessions:
    """The sessions while a trace is drawn."""

    def __init__(self, source: random.Random, window_s: float, pull_s: float, period_s: float) -> None:
        self._window_s, self._pull_s, self._period_s = window_s, pull_s, period_s
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
        leave = window.departures / self._window_s * self.active / max(len(self._all), 1)
        steady = self.active / self._period_s + leave - window.arrivals / self._window_s
        rate = (aim - self.active) / self._pull_s + steady
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
        return self._period_s * self._source.lognormvariate(-0.5, 1.0)


FILE = "data/azure_llm_conv_2023.csv.gz"
"""Azure Public Dataset, AzureLLMInferenceTrace_conv, CC BY 4.0."""
STAY_S = 150.0
"""Mean stay: Little's law on the paper's traces gives 2 to 4 minutes."""
KEPT_PER_STRETCH = 16
"""Stretch × thinning. It gives every time scale about the same number of concurrent sessions (50)."""
SCALES = (1, 4, 16)


def requests() -> list[tuple[float, int, int]]:
    """Return (seconds since the first request, generated tokens, context tokens) of every request."""
    packed = resources.files("turboserve.experiments.autoscale").joinpath(FILE).read_bytes()
    rows = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    return [(float(row["time_s"]), int(row["generated_tokens"]), int(row["context_tokens"])) for row in rows]


def arrivals() -> list[tuple[float, int]]:
    """Return (seconds since the first request, generated tokens) of every request."""
    return [(at, generated) for at, generated, _ in requests()]


def azure(stretch: int, lasts_s: float = 3600.0, seed: int = 0) -> WorkloadTrace:
    """Return the first `lasts_s` of the arrivals, `stretch` times slower, every (16 / stretch)-th kept.

    A session stays in proportion to the request's generated tokens, times a log-normal factor (σ 1), which is
    heavy tailed. A session that stays longer than a minute idles once, for a fifth of its stay. The first two
    mean stays are left out, so that the system is not empty at 0. `seed`: of the factors; beside 0, other
    requests are kept as well.
    """
    every = KEPT_PER_STRETCH // stretch
    name = f"azure x{stretch}" + (f" seed {seed}" if seed else "")
    drawn = f"azure {stretch}" + (f" {seed}" if seed else "")
    return sessions_of(arrivals()[seed % every :], name, every, lasts_s, stretch, drawn)


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
