"""The playout slack of the worker's sessions: measured on the engine's thread, reported on the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from turboserve.contracts.fidelity import LARGEST_SLACK_S, SessionSlack, Tier
from turboserve.contracts.workers import HeldSession
from turboserve.telemetry_names import TIER
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.playout import Playout
from turboserve.worker.engine.playout import Tier as TierName
from turboserve.worker.service import events

MEASURE_S = 0.5
"""Longest time between two measurements, seconds."""


class SlackMonitor:
    """Measures at intervals, and when a session has changed its tier. Belongs to the engine's thread."""

    def __init__(self, engine: Engine, tier_report_s: float) -> None:
        """`tier_report_s`: smallest time between two measurements, seconds."""
        self._engine, self._tier_report_s = engine, tier_report_s
        self._measured_at = self._looked_at = -math.inf
        self._tiers: Mapping[str, TierName] = {}

    def measure(self, now: float, runs: Mapping[str, int]) -> events.SlackMeasured | None:
        """Return a measurement if one is due. `runs`: run of each session to report."""
        if now - self._looked_at < self._tier_report_s or not (runs or self._tiers):
            return None
        self._looked_at = now
        due = now - self._measured_at >= MEASURE_S
        if not due and self._engine.tiers(now) == self._tiers:
            return None
        self._measured_at = now
        found = {name: one for name, one in self._engine.playouts(now).items() if name in runs}
        before, self._tiers = self._tiers, {name: one.tier for name, one in found.items()}
        late = self._engine.expected_late(now) if found else 0
        changed = any(before.get(name) != tier for name, tier in self._tiers.items())
        return events.SlackMeasured(
            now, {name: (runs[name], one) for name, one in found.items()}, changed, late
        )


class SlackBoard:
    """The newest measurement. Belongs to the event loop."""

    def __init__(self) -> None:
        self._newest = events.SlackMeasured(0.0, {}, False)

    @property
    def deficit(self) -> int:
        """Number of chunks that are expected to be late."""
        return self._newest.late

    def measured(self, message: events.SlackMeasured) -> None:
        """Keep the measurement."""
        before = {one.tier for _, one in self._newest.sessions.values()}
        self._newest = message
        counts = dict.fromkeys([*before, *(one.tier for _, one in message.sessions.values())], 0)
        for _, one in message.sessions.values():
            counts[one.tier] += 1
        for tier, count in counts.items():
            metrics.sessions_tier.set(count, {TIER: tier})

    def onto(
        self, held: Iterable[HeldSession], runs: Mapping[str, int], now: float
    ) -> tuple[HeldSession, ...]:
        """Return the sessions with their slack as of `now`, where the measurement is of the same run."""
        return tuple(self._with_slack(one, runs.get(one.session), now) for one in held)

    def _with_slack(self, held: HeldSession, run: int | None, now: float) -> HeldSession:
        found = self._newest.sessions.get(held.session) if held.resident else None
        if found is None or found[0] != run:
            return held
        slack = session_slack(found[1].after(now - self._newest.at_s))
        return held.model_copy(update={"slack": slack})


def count(playout: Playout) -> None:
    """Count what the viewer had left when a chunk was published."""
    # OpenTelemetry's histograms refuse values below 0.
    metrics.slack.record(max(0.0, playout.slack_s))
    metrics.credit.record(max(0.0, playout.credit_s))
    if playout.slack_s < 0:
        metrics.lateness.record(-playout.slack_s)


def session_slack(playout: Playout) -> SessionSlack:
    """Return the measurement as reports carry it."""
    return SessionSlack(
        slack_s=_bounded(playout.slack_s),
        credit_s=_bounded(playout.credit_s),
        tier=Tier(playout.tier),
        lateness_s=max(0.0, _bounded(playout.lateness_s)),
        playing=playout.playing,
    )


def _bounded(seconds: float) -> float:
    return max(-LARGEST_SLACK_S, min(LARGEST_SLACK_S, seconds))
