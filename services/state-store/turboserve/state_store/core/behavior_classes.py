"""Classes of behavior: k-means over what sessions do, and one life table for each class.

A class is known before a session has left: features are what can be observed of a live session. So the time
that a session spent at each age counts for the class that it had at that age, not for the one that its end
showed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turboserve.state_store.core.behavior import (
    STARTS_S,
    Features,
    LifeCounts,
    LifeTable,
    Priors,
    intervals,
    priors_of,
)
from turboserve.state_store.core.session_spans import SessionSpan

MOST_CLASSES = 3
LEAST_DEPARTURES = 30
"""With fewer departures in the window, there is one class."""
POINTS = 256
"""Maximum number of points of k-means. Of more sessions, every n-th is taken."""
ROUNDS = 12
"""Maximum number of rounds of k-means."""
HYSTERESIS = 0.5
"""A live session leaves its class if the squared distance to another is below this part of its own."""


@dataclass(frozen=True, slots=True)
class BehaviorClass:
    """A center of k-means, and how long sessions near it stay."""

    center: Features
    stays: LifeTable
    """How long sessions stay from an age on at which they have this class."""
    newcomers: LifeTable
    """How long sessions stay that have this class when they are created, whichever they have later."""


@dataclass(frozen=True, slots=True)
class SessionBehavior:
    """The estimates of one session."""

    change_rate: float
    """Prompt changes per second."""
    active_share: float
    remaining_s: float
    """Mean of the rest of its stay, seconds."""
    behavior_class: int
    """Index of its class."""


@dataclass(frozen=True)
class BehaviorModel:
    """What is known of all sessions of a model at one moment."""

    priors: Priors
    classes: tuple[BehaviorClass, ...]
    """Ordered by the expected stay, the shortest first. One class: behavior does not count."""
    live: Mapping[str, int]
    """Class of each live session."""

    def classify(self, span: SessionSpan, age_s: float | None = None) -> int:
        """Return the class nearest to a session's features, now or at an earlier age."""
        return nearest(self.priors.features(span, age_s), self.centers)

    @property
    def centers(self) -> list[Features]:
        return [one.center for one in self.classes]

    def behavior(self, span: SessionSpan) -> SessionBehavior:
        """Return the estimates of a live session."""
        place = self.live.get(span.session)
        place = self.classify(span) if place is None else place
        prior, active_s = self.priors.of(span.tenant), self.priors.active_s(span)
        return SessionBehavior(
            prior.change_rate_of(span.age_s, span.changes),
            prior.active_share_of(span.age_s, active_s),
            self.classes[place].stays.remaining_s(span.age_s),
            place,
        )


def learn(spans: Sequence[SessionSpan], former: Mapping[str, int] | None = None) -> BehaviorModel:
    """Estimate priors, classes and life tables, and classify the live sessions.

    `former`: classes of live sessions by the model before, from which they leave with hysteresis. A number of
    classes above 1 counts only if it explains the departures better than its parameters cost (BIC).
    """
    spans = sorted(spans, key=lambda span: span.session)
    priors = priors_of(spans)
    points = [priors.features(span) for span in spans]
    best = _one_class(spans, priors, points)
    pooled, score = best.classes[0].stays, 0.0
    departures = sum(span.left_ago_s is not None for span in spans)
    if departures >= LEAST_DEPARTURES:
        step = -(-len(points) // POINTS)
        aged = _by_interval(spans, priors)
        for count in range(2, MOST_CLASSES + 1):
            centers = k_means(points[::step], count)
            if len(centers) < count:
                break
            classes, gain = _with_tables(aged, centers, pooled)
            paid = gain - 0.5 * math.log(departures) * (count - 1) * _parameters(spans)
            if paid > score:
                best, score = BehaviorModel(priors, classes, {}), paid
    former = former or {}
    live = {
        span.session: reclassified(point, best.centers, former.get(span.session))
        for span, point in zip(spans, points, strict=True)
        if span.left_ago_s is None
    }
    return BehaviorModel(priors, best.classes, live)


def nearest(point: Features, centers: Sequence[Features]) -> int:
    """Return the index of the nearest center, the first one of several."""
    x, y, z = point
    found, least = 0, math.inf
    for place, (a, b, c) in enumerate(centers):
        distance = (x - a) * (x - a) + (y - b) * (y - b) + (z - c) * (z - c)
        if distance < least:
            found, least = place, distance
    return found


def k_means(points: Sequence[Features], count: int) -> list[Features]:
    """Return the centers of up to `count` clusters that are not empty. The same points give the same centers.

    The first centers are the means of equal parts of the points, sorted by the feature of the largest range.
    """
    if not points:
        return []
    ranges = [max(axis) - min(axis) for axis in zip(*points, strict=True)]
    widest = ranges.index(max(ranges))
    ordered = sorted(points, key=lambda point: (point[widest], point))
    parts = [ordered[len(ordered) * at // count : len(ordered) * (at + 1) // count] for at in range(count)]
    centers = list(dict.fromkeys(_mean(part) for part in parts if part))
    for _ in range(ROUNDS):
        groups: list[list[Features]] = [[] for _ in centers]
        for point in ordered:
            groups[nearest(point, centers)].append(point)
        after = [_mean(group) for group in groups if group]
        if after == centers:
            break
        centers = list(dict.fromkeys(after))
    return centers


def _mean(points: Sequence[Features]) -> Features:
    x, y, z = (math.fsum(axis) / len(points) for axis in zip(*points, strict=True))
    return x, y, z


def _one_class(spans: Sequence[SessionSpan], priors: Priors, points: Sequence[Features]) -> BehaviorModel:
    counts = LifeCounts()
    for span in spans:
        for place in intervals(span):
            counts.add(place, span)
    constant = [priors.everyone.departure_rate] * len(STARTS_S)
    center = _mean(points) if points else priors.everyone.features(0.0, 0.0, 0.0)
    table = counts.table(constant)
    return BehaviorModel(priors, (BehaviorClass(center, table, table),), {})


_Interval = tuple[int, SessionSpan, Features, Features]
"""Place of an interval, the session, and its features when the interval and when the session began."""


def _by_interval(spans: Sequence[SessionSpan], priors: Priors) -> list[_Interval]:
    """Return each interval of each session's age."""
    births = {tenant: prior.features(0.0, 0.0, 0.0) for tenant, prior in priors.tenants.items()}
    found = []
    for span in spans:
        for place in intervals(span):
            age_s, birth = max(STARTS_S[place], span.since_s), births[span.tenant]
            found.append((place, span, priors.features(span, age_s) if age_s else birth, birth))
    return found


def _with_tables(
    aged: Sequence[_Interval], centers: Sequence[Features], pooled: LifeTable
) -> tuple[tuple[BehaviorClass, ...], float]:
    """Return the classes, and by how much they explain the departures better than one class (log-likelihood).

    A class without a session has the life table of all.
    """
    counts, newcomers = [LifeCounts() for _ in centers], [LifeCounts() for _ in centers]
    at_birth = {birth: nearest(birth, centers) for *_, birth in aged}
    for place, span, features, birth in aged:
        counts[nearest(features, centers)].add(place, span)
        newcomers[at_birth[birth]].add(place, span)
    tables = [one.table(pooled.rates) for one in counts]
    gain = math.fsum(
        one.likelihood(table) - one.likelihood(pooled) for one, table in zip(counts, tables, strict=True)
    )
    found = [
        BehaviorClass(center, table, new.table(pooled.rates))
        for center, table, new in zip(centers, tables, newcomers, strict=True)
    ]
    found.sort(key=lambda one: (one.stays.remaining_s(0.0), one.center))
    return tuple(found), gain


def _parameters(spans: Sequence[SessionSpan]) -> int:
    """Return how many intervals have departures: each class has as many rates."""
    return len({intervals(span)[-1] for span in spans if span.left_ago_s is not None})


def reclassified(point: Features, centers: Sequence[Features], former: int | None) -> int:
    """Return the class of a live session that had the class `former`. None: it had none."""
    place = nearest(point, centers)
    if former is None or former == place or former >= len(centers):
        return place
    own, other = math.dist(point, centers[former]) ** 2, math.dist(point, centers[place]) ** 2
    return place if other < HYSTERESIS * own else former
