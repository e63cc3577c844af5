"""The objective of all migrations: first fewer expected late chunks, then a lower L′ + η Σ κ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.lateness import lasting_late_chunks
from turboserve.scheduler.placement.plan import Step
from turboserve.scheduler.placement.pool import CHUNK_S, PoolEntry
from turboserve.scheduler.placement.types import Weights
from turboserve.static_frozen import statically_frozen

NOISE = 0.1
"""Relative error of the expected late chunks: that of the latencies from which they are counted. A migration
that saves a smaller share of them saves nothing."""
SHARE = 0.5
"""Part of one session's mean late chunks that a migration must save at most. It moves one session. So with
many sessions, it cannot save `NOISE` of all late chunks."""
NO_SESSIONS: Mapping[str, float] = {}


@statically_frozen()
class LateChunks:
    """Expected late chunks of some workers within the horizon."""

    soon: int
    """From the present slacks on."""
    lasting: int
    """In each horizon once all slack is used up. See `lasting_late_chunks`."""
    sessions: int
    """Number of sessions whose viewers need chunks."""

    def __add__(self, other: LateChunks) -> LateChunks:
        return LateChunks(
            self.soon + other.soon, self.lasting + other.lasting, self.sessions + other.sessions
        )


class Objective:
    """Decides whether migrations lower the objective (SlackServe, 4.3; TurboServe, 5.2.1).

    The objective is lexicographic: the expected late chunks come first, L′ + η Σ κ decides between equals.
    A migration must improve one of the two by more than the estimates are wrong:

    1. It *saves* late chunks: at least `NOISE` of them, or `SHARE` of one session's mean where that is less,
       and more than are played during its transfer. Or
    2. it *keeps* them: none becomes late, and Γ exceeds `Weights.least_gain` of L.

    Late chunks are counted twice, from the present slacks and with all slack used up. The first number
    changes by itself: a worker with few sessions fills their buffers, and a further session drains them. The
    second depends on the numbers of sessions alone. So no migration for balance raises it. And where workers
    are overloaded, a migration saves chunks only if it lowers the second number, too. Otherwise an overloaded
    pool would migrate sessions to where buffers are full, and others back when they are used up. Where no
    worker is overloaded, none becomes so to save chunks once.
    """

    def __init__(self, cluster: Cluster, weights: Weights, now: float) -> None:
        self._cluster = cluster
        self._weights = weights
        self._now = now
        self._lasting: dict[tuple[str, int], int] = {}

    def saves(self, before: LateChunks, after: LateChunks, transfer_s: float) -> bool:
        """Whether a migration that takes `transfer_s` is worth it for the late chunks that it saves."""
        saved = before.soon - after.soon
        least = min(NOISE, SHARE / max(1, before.sessions)) * before.soon
        return (
            saved >= max(self._weights.least_saved, least)
            and saved > transfer_s / CHUNK_S
            # This number depends on the sessions' number and the curve alone, so any decrease lasts.
            and (after.lasting == 0 or after.lasting < before.lasting)
        )

    def keeps(self, steps: Sequence[Step], instead: Sequence[Step] = (), given: Sequence[Step] = ()) -> bool:
        """Whether no more chunks are late with `steps` than with `instead`, both on top of `given`."""
        ends = {entry.id: entry for step in (*steps, *instead) for entry in (step.source, step.target)}
        known = [entry for entry in ends.values() if self._cluster.urgency.known(entry)]
        before, after = self.late(known, [*given, *instead]), self.late(known, [*given, *steps])
        return after.soon <= before.soon and after.lasting <= before.lasting

    def late(self, workers: Sequence[PoolEntry], steps: Sequence[Step] = ()) -> LateChunks:
        """Return the expected late chunks of `workers` with the migrations of `steps`."""
        late = LateChunks(0, 0, 0)
        for entry in workers:
            without = [step.session.id for step in steps if step.source is entry]
            coming = {step.session.id: step.cost_s for step in steps if step.target is entry}
            late += self.late_on(entry, without, coming)
        return late

    def late_on(
        self, entry: PoolEntry, without: Sequence[str] = (), coming: Mapping[str, float] = NO_SESSIONS
    ) -> LateChunks:
        """Return the expected late chunks of one worker. See `Urgency.late`."""
        urgency, horizon_s = self._cluster.urgency, self._weights.rescue_horizon_s
        soon = urgency.late(entry, self._now, horizon_s, without, coming)
        sessions = urgency.playing(entry, without, coming)
        lasting = self._lasting.get((entry.id, sessions))
        if lasting is None:
            lasting = lasting_late_chunks(entry.floor_curve, sessions, horizon_s)
            self._lasting[entry.id, sessions] = lasting
        return LateChunks(soon, lasting, sessions)
