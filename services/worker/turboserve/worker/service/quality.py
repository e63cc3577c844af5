"""Playout slack and quality of a worker's sessions, as its reports and its chunks' headers carry them.

Slack is measured on the engine's thread and reported on the event loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from turboserve.contracts.fidelity import LARGEST_SLACK_S, ChunkFidelity, SessionSlack, Tier
from turboserve.contracts.workers import HeldSession
from turboserve.static_frozen import statically_frozen
from turboserve.telemetry_names import TIER
from turboserve.worker import metrics
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.engine.playout import Playout
from turboserve.worker.engine.playout import Tier as TierName

MEASURE_S = 0.5
"""Longest time between two measurements, seconds."""
WINDOW_S = 60.0
"""Time over which a worker reports the quality of its chunks, seconds."""
TIERS: Mapping[TierName, Tier] = {"urgent": Tier.URGENT, "normal": Tier.NORMAL, "relaxed": Tier.RELAXED}
"""Tiers as reports and headers carry them."""


def chunk_fidelity(fidelity: Fidelity | None, ladder: FidelityLadder) -> ChunkFidelity | None:
    """Return a chunk's configuration with its measured quality. None: the best configuration."""
    if fidelity is None:
        return None
    return ChunkFidelity(**asdict(fidelity), quality=ladder.quality(fidelity))


def fidelity_from(header: ChunkFidelity | None) -> Fidelity | None:
    """Return the configuration that a header names. None: the best."""
    if header is None:
        return None
    return Fidelity(header.steps, header.window_chunks, header.sparsity, header.fast_decoder)


def floor_seconds(seconds: Mapping[int, float], ladder: FidelityLadder) -> dict[int, float]:
    """Return L(b) at the fastest configuration above the ladder's floor. Empty: there is none below the best.

    `seconds`: L(b) at the best configuration.
    """
    lowest = ladder.lowest(None, pinned=False)
    share = ladder.rungs[lowest].forwards / ladder.best.forwards
    return {batch: share * value for batch, value in seconds.items()} if lowest else {}


class LatencySample(NamedTuple):
    """What the time of a chunk tells of L(b)."""

    share: float = 1.0
    """Its time relative to a chunk at the best configuration, as all chunks beside that one."""
    lowered: bool = False
    """Whether it, or a chunk beside it, was generated at a lower configuration. That may take as long."""
    device_s: float | None = None
    """Seconds from its first forward to the end of its last one. None: `PackagedChunk.compute_s` counts."""


def latency_sample(
    engine: Engine, ready: ChunkReady, others: Sequence[Fidelity | None]
) -> LatencySample | None:
    """Return what the time of a chunk tells of L(b). None: nothing, as with another worker's help.

    `others`: configurations of the chunks beside it.
    """
    if engine.forward.split_at_s > ready.timings.started_s:
        return None
    device_s = _device_seconds(engine, ready)
    if ready.fidelity is None and not any(others):
        return LatencySample(device_s=device_s)
    cleans, ladder = device_s is not None, engine.fidelity.ladder
    decodes = not (cleans and engine.options.overlap)
    share = ladder.chunk_share(ready.fidelity, others, cleans=cleans, decodes=decodes)
    return None if share is None else LatencySample(share, lowered=True, device_s=device_s)


def _device_seconds(engine: Engine, ready: ChunkReady) -> float | None:
    """See `LatencySample.device_s`. The last forward counts as long as those before it. With `overlap`, it
    runs during the decoding. Otherwise it follows the decoding of this chunk and of those ready with it."""
    timings, forwards = ready.timings, engine.config.chunk_forwards
    if forwards == 1:
        return None  # On some virtual devices, one forward stands for all of a chunk's.
    steps = forwards - 1 if ready.fidelity is None else ready.fidelity.steps
    last_s = (timings.denoised_s - timings.started_s) / steps
    if engine.options.overlap:
        ends_s = timings.denoised_s + last_s
        return ends_s - timings.started_s if ends_s >= timings.ready_s else None
    waiting = sum(bool(held.undecoded) for held in engine.sessions.values())
    return timings.ready_s + waiting * timings.decode_s + last_s - timings.started_s


@statically_frozen()
class _ChunkQuality:
    """What the last minute keeps of one chunk."""

    at_s: float
    quality: float | None
    lowered: bool


class QualityBoard:
    """The chunks of the last minute, and the newest one of each session. Belongs to the event loop."""

    def __init__(self) -> None:
        self._made: deque[_ChunkQuality] = deque()
        self._not_best = self._lowered = 0
        """Number of the chunks in `_made` whose quality is not 1, and of those that the load has lowered."""
        self._newest: dict[str, tuple[int, ChunkFidelity | None]] = {}

    def made(
        self, session: str, run: int, fidelity: ChunkFidelity | None, *, lowered: bool, now: float
    ) -> None:
        """Count a chunk that is packaged. `lowered`: see `ChunkReady.lowered`. `now`: monotonic seconds."""
        self._newest[session] = run, fidelity
        quality = 1.0 if fidelity is None else fidelity.quality
        self._made.append(_ChunkQuality(now, quality, lowered))
        self._not_best += quality != 1.0
        self._lowered += lowered
        self._drop(now)

    def forget(self, session: str) -> None:
        """Drop the newest chunk of a session that has left. Its chunks still count."""
        self._newest.pop(session, None)

    def mean(self, now: float) -> float | None:
        """Mean quality of the chunks of the last minute. None: no chunk, or one was not measured.

        Sets the gauge, to 1 without a chunk.
        """
        self._drop(now)
        if not self._not_best:
            metrics.quality.set(1.0)
            return 1.0 if self._made else None
        known = [each.quality for each in self._made if each.quality is not None]
        if len(known) < len(self._made):
            return None
        mean = sum(known) / len(known)
        metrics.quality.set(mean)
        return mean

    def debt(self, now: float) -> float:
        """Share of the chunks of the last minute that the load has lowered. Sets the gauge."""
        self._drop(now)
        debt = self._lowered / len(self._made) if self._made else 0.0
        metrics.quality_debt.set(debt)
        return debt

    def onto(self, held: Iterable[HeldSession], runs: Mapping[str, int]) -> tuple[HeldSession, ...]:
        """Return the sessions with the configurations of their newest chunks, of these runs."""
        return tuple(self._with_fidelity(one, runs.get(one.session)) for one in held)

    def _with_fidelity(self, held: HeldSession, run: int | None) -> HeldSession:
        newest = self._newest.get(held.session)
        if newest is None or newest[0] != run or newest[1] is None:
            return held
        return held.model_copy(update={"fidelity": newest[1]})

    def _drop(self, now: float) -> None:
        while self._made and self._made[0].at_s <= now - WINDOW_S:
            old = self._made.popleft()
            self._not_best -= old.quality != 1.0
            self._lowered -= old.lowered


@statically_frozen()
class SlackMeasured:
    """The engine has measured the playout slack of its sessions."""

    at_s: float
    """When, monotonic seconds on the engine's clock."""
    sessions: Mapping[str, tuple[int, Playout]]
    """By session: its run, and the measurement."""
    tiers_changed: bool
    """Whether a session has another tier than in the measurement before, or is new."""
    late: int = 0
    """Number of chunks within the horizon that will be late even at their lowest configurations."""


class SlackMonitor:
    """Measures at intervals, and when a session has changed its tier. Belongs to the engine's thread."""

    def __init__(self, engine: Engine, tier_report_s: float) -> None:
        """`tier_report_s`: smallest time between two measurements, seconds."""
        self._engine, self._tier_report_s = engine, tier_report_s
        self._measured_at = self._looked_at = -math.inf
        self._tiers: Mapping[str, TierName] = {}

    def may_measure(self, now: float) -> bool:
        """Whether the smallest time since the last look at the sessions is over."""
        return now - self._looked_at >= self._tier_report_s

    def measure(self, now: float, runs: Mapping[str, int]) -> SlackMeasured | None:
        """Return a measurement if one is due. `runs`: run of each session to report."""
        if not self.may_measure(now) or not (runs or self._tiers):
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
        return SlackMeasured(now, {name: (runs[name], one) for name, one in found.items()}, changed, late)


class SlackBoard:
    """The newest measurement. Belongs to the event loop."""

    def __init__(self) -> None:
        self._newest = SlackMeasured(0.0, {}, False)

    @property
    def deficit(self) -> int:
        """Number of chunks that are expected to be late."""
        return self._newest.late

    def all_have(self, least_s: Callable[[str], float], now: float) -> bool:
        """Whether every session whose slack shrinks has its least credit at `now`. `least_s`: session → its
        least credit, seconds."""
        return all(
            one.after(now - self._newest.at_s).credit_s >= least_s(session)
            for session, (_, one) in self._newest.sessions.items()
            if one.playing
        )

    def measured(self, message: SlackMeasured) -> None:
        """Keep the measurement."""
        before = {one.tier for _, one in self._newest.sessions.values()}
        self._newest = message
        metrics.deficit.set(message.late)
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
        slack_s=bounded(playout.slack_s),
        credit_s=bounded(playout.credit_s),
        tier=TIERS[playout.tier],
        lateness_s=max(0.0, bounded(playout.lateness_s)),
        playing=playout.playing,
    )


def bounded(seconds: float) -> float:
    """Return the slack or credit as reports and headers carry it: within `LARGEST_SLACK_S`."""
    return max(-LARGEST_SLACK_S, min(LARGEST_SLACK_S, seconds))


def beyond_slabs(seconds: Mapping[int, float], slabs: int, places: int) -> dict[int, float]:
    """L(n) for more active sessions than slabs: n / slabs · L(slabs), since a batch has at most `slabs` rows.

    `places`: number of sessions that slabs and host memory hold. The copies of states overlap computing and
    do not count. Returns `seconds` as it is if no session is beyond the slabs, or nothing is measured.
    """
    if places <= slabs or not seconds:
        return dict(seconds)
    full_s = LatencyProfile(seconds)(slabs)
    within = {batch: value for batch, value in seconds.items() if batch < slabs}
    # Profiles are linear between two sizes, and are extrapolated in the same direction.
    return within | {slabs: full_s, places: full_s * places / slabs}
