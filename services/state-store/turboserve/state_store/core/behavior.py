"""Behavior of sessions, learned while they live: how often prompts change, how long they generate and stay.

All estimates are means of conjugate priors. A prior counts as events in pseudo-seconds, so an estimate is
(events + prior × pseudo-seconds) / (seconds + pseudo-seconds):

- Prompt changes and departures per second: Gamma.
- The share of its age in which a session generates: Beta.

A tenant's prior shrinks to that of all sessions, and a session's estimate to its tenant's. Sessions that live
and those that have left within a window count, with the part of their age that lies in the window. So older
sessions are forgotten, and those that stay long do not count too much. No I/O, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

from turboserve.state_store.core.session_spans import SessionSpan

TENANT_PSEUDO_S = 300.0
"""Weight of the prior of all sessions in that of a tenant, seconds."""
SESSION_PSEUDO_S = 60.0
"""Weight of the tenant's prior in a session's estimate, seconds."""
PSEUDO_DEPARTURES = 5.0
"""Weight of the prior of all sessions in a tenant's departures."""
TABLE_PSEUDO_DEPARTURES = 2.0
"""Weight of the prior in each interval of a life table, departures."""
LEAST_RATE = 1.0 / 3_600.0
"""Rate of prompt changes that is added before a logarithm is taken, per second."""
DRAWN_CHANGES = 16
"""Maximum number of a session's changes whose times are drawn. Further ones are spread evenly."""
GENERATES_AFTER_S = 30.0
"""Sessions of at least this age say how many chunks a second a session makes that always generates."""
STARTS_S = (0.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1_920.0, 3_840.0)
"""Starts of the intervals of age in which a life table has constant rates, seconds."""

Features = tuple[float, float, float]
"""A point in the space of behaviors. A distance of 1 is twice the prompt rate, a fifth of active share, or
twice the stay that the session's tenant lets expect."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is expected of a session before anything is known of it."""

    change_rate: float
    """Prompt changes per second."""
    active_share: float
    departure_rate: float
    """Departures per second of age."""

    def features(self, age_s: float, changes: float, active_s: float) -> Features:
        """Return the features of a session of this prior, as of one age."""
        rate, share = self.change_rate_of(age_s, changes), self.active_share_of(age_s, active_s)
        return math.log2(rate + LEAST_RATE), 5.0 * share, -math.log2(self.departure_rate)

    def change_rate_of(self, age_s: float, changes: float) -> float:
        """Return the estimate of a session's prompt changes per second."""
        return shrunk(changes, age_s, self.change_rate, SESSION_PSEUDO_S)

    def active_share_of(self, age_s: float, active_s: float) -> float:
        """Return the estimate of the share of its age in which a session generates."""
        return shrunk(min(active_s, age_s), age_s, self.active_share, SESSION_PSEUDO_S)


def shrunk(events: float, seconds: float, prior: float, pseudo_s: float) -> float:
    """Return the posterior mean of a rate or a share, per second."""
    return (events + prior * pseudo_s) / (seconds + pseudo_s)


@dataclass(frozen=True, slots=True)
class Priors:
    """The priors of all sessions and of each tenant, and the unit of active time."""

    everyone: Prior
    tenants: Mapping[str, Prior]
    chunks_per_s: float
    """Chunks per second of a session that always generates; 0 if no session has made one."""

    def of(self, tenant: str) -> Prior:
        return self.tenants.get(tenant, self.everyone)

    def active_s(self, span: SessionSpan) -> float:
        """Return for how long the session has generated, seconds."""
        return min(span.chunks / self.chunks_per_s, span.age_s) if self.chunks_per_s else 0.0

    def features(self, span: SessionSpan, age_s: float | None = None) -> Features:
        """Return the session's features; with `age_s`, those that it may have had at an earlier age."""
        if age_s is None or age_s >= span.age_s:
            return self.of(span.tenant).features(span.age_s, span.changes, self.active_s(span))
        part = age_s / span.age_s
        changes = earlier_changes(span.session, span.changes, part)
        return self.of(span.tenant).features(age_s, changes, part * self.active_s(span))


def earlier_changes(session: str, changes: int, part: float) -> int:
    """Return how many changes a session may have had after a part of its age.

    Rows do not say when its prompts changed. Each change has a time that is drawn uniformly, always the same
    for one session. A proportional number would tell when the session leaves.
    """
    drawn, whole = crc32(session.encode()), changes - DRAWN_CHANGES
    found = int(whole * part) if whole > 0 else 0
    for _ in range(min(changes, DRAWN_CHANGES)):
        drawn = (1_664_525 * drawn + 1_013_904_223) & 0xFFFF_FFFF
        found += drawn < part * 0x1_0000_0000
    return found


class _Sums:
    def __init__(self) -> None:
        self.seconds = self.in_window_s = self.active_s = 0.0
        self.changes = self.departures = 0

    def add(self, span: SessionSpan, active_s: float) -> None:
        self.seconds += span.age_s
        self.in_window_s += span.age_s - span.since_s
        self.changes += span.changes
        self.active_s += active_s
        self.departures += span.left_ago_s is not None


def priors_of(spans: Sequence[SessionSpan]) -> Priors:
    """Estimate the priors from sessions that have left and from those that live."""
    rates = sorted(span.chunks / span.age_s for span in spans if span.age_s >= GENERATES_AFTER_S)
    unit = Priors(Prior(0.0, 0.0, 1.0), {}, rates[(9 * (len(rates) - 1)) // 10] if rates else 0.0)
    total, tenants = _Sums(), dict[str, _Sums]()
    for span in spans:
        active_s = unit.active_s(span)
        total.add(span, active_s)
        tenants.setdefault(span.tenant, _Sums()).add(span, active_s)
    seconds = max(total.seconds, 1.0)
    # Half a departure, so that no rate is 0.
    everyone = Prior(
        total.changes / seconds,
        total.active_s / seconds,
        (total.departures + 0.5) / (total.in_window_s + 1.0),
    )
    return Priors(
        everyone, {name: _shrunk(sums, everyone) for name, sums in tenants.items()}, unit.chunks_per_s
    )


def _shrunk(sums: _Sums, everyone: Prior) -> Prior:
    departs = everyone.departure_rate
    return Prior(
        shrunk(sums.changes, sums.seconds, everyone.change_rate, TENANT_PSEUDO_S),
        shrunk(sums.active_s, sums.seconds, everyone.active_share, TENANT_PSEUDO_S),
        shrunk(sums.departures, sums.in_window_s, departs, PSEUDO_DEPARTURES / departs),
    )


@dataclass(frozen=True)
class LifeTable:
    """Departures per second by age: a constant rate in each interval of `STARTS_S`, the last one open."""

    rates: tuple[float, ...]

    @cached_property
    def _sums(self) -> tuple[float, ...]:
        """The integral of the rate up to the start of each interval."""
        found = [0.0]
        for start, end, rate in zip(STARTS_S, STARTS_S[1:], self.rates, strict=False):
            found.append(found[-1] + rate * (end - start))
        return tuple(found)

    def cumulative(self, age_s: float) -> float:
        """Return the integral of the rate from age 0."""
        place = bisect_right(STARTS_S, age_s) - 1
        return self._sums[place] + self.rates[place] * (age_s - STARTS_S[place])

    def leaves(self, age_s: float, within_s: float) -> float:
        """Return the probability that a session of this age leaves within a time."""
        return -math.expm1(self.cumulative(age_s) - self.cumulative(age_s + within_s))

    def remaining_s(self, age_s: float) -> float:
        """Return the mean of the rest of its stay, seconds."""
        before, mean_s = self.cumulative(age_s), 0.0
        ends = (*STARTS_S[1:], math.inf)
        for place in range(bisect_right(STARTS_S, age_s) - 1, len(STARTS_S)):
            start, rate = max(STARTS_S[place], age_s), self.rates[place]
            stays = math.exp(before - self.cumulative(start))
            mean_s += stays * -math.expm1(-rate * (ends[place] - start)) / rate
        return mean_s


class LifeCounts:
    """Seconds and departures by interval of age, from which a life table is estimated."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(STARTS_S)
        self.departures = [0] * len(STARTS_S)

    def add(self, place: int, span: SessionSpan) -> None:
        """Add the part of a session's age that lies in one interval and in the window."""
        end_s = STARTS_S[place + 1] if place + 1 < len(STARTS_S) else math.inf
        self.seconds[place] += min(span.age_s, end_s) - max(STARTS_S[place], span.since_s)
        self.departures[place] += span.left_ago_s is not None and span.age_s < end_s

    def table(self, prior: Sequence[float]) -> LifeTable:
        """Return the rates, shrunk to those of `prior`."""
        pseudo = TABLE_PSEUDO_DEPARTURES
        return LifeTable(
            tuple(
                (departures + pseudo) / (seconds + pseudo / rate)
                for seconds, departures, rate in zip(self.seconds, self.departures, prior, strict=True)
            )
        )

    def likelihood(self, table: LifeTable) -> float:
        """Return the logarithm of the likelihood of these counts."""
        return math.fsum(
            departures * math.log(rate) - rate * seconds
            for seconds, departures, rate in zip(self.seconds, self.departures, table.rates, strict=True)
        )


def intervals(span: SessionSpan) -> range:
    """Return the places of the intervals that the session's age had in the window."""
    return range(bisect_right(STARTS_S, span.since_s) - 1, bisect_right(STARTS_S, span.age_s))
