"""Aggregates the playheads of one session's viewers over all gateways. Pure: callers pass the time in."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.workers import Playhead

SILENT_S = 5.0
"""A gateway reports several times a second about the sessions watched through it. A gateway that has been
silent for this long counts as gone, with its viewers."""

LONGEST_INTERVAL_S = SILENT_S / 4
"""Longest interval at which a gateway may report."""


@dataclass(frozen=True)
class AggregatedPlayhead:
    """The reports of all gateways about one session, combined."""

    playhead_s: float
    """Playhead of the viewer who is furthest ahead: that viewer needs the next chunk first. Gateways whose
    viewers are all silent count only if there is no other. With no viewer left, the last reported
    playhead."""
    viewers: int
    observed_at: float
    """When the viewer was at `playhead_s`, in the time of `update`."""


@dataclass(frozen=True)
class _GatewayReport:
    """The newest report of one gateway."""

    playhead_s: float
    observed_at: float
    viewers: int
    live: bool
    heard_at: float

    def position_s(self, now: float) -> float:
        """Where the viewer is now, if it has played on until the next report was due."""
        return self.playhead_s + min(now, self.heard_at + LONGEST_INTERVAL_S) - self.observed_at


class Audience:
    """The viewers of one session, by each gateway's newest report. Gateways that send no id count as one."""

    def __init__(self) -> None:
        self._gateways: dict[str | None, _GatewayReport] = {}
        self.aggregate: AggregatedPlayhead | None = None
        """As of the newest report. None: no report yet."""

    def update(self, report: Playhead, now: float) -> AggregatedPlayhead:
        """Take a gateway's report, received at monotonic time `now` (seconds). Returns the new aggregate."""
        observed_at = now - report.age_s
        latest = _GatewayReport(report.playhead_s, observed_at, report.viewers, report.live, now)
        self._gateways[report.gateway] = latest
        self._gateways = {
            gateway: last
            for gateway, last in self._gateways.items()
            if last.viewers and now - last.heard_at <= SILENT_S
        }
        reports = self._gateways.values()
        furthest = max(reports, key=lambda last: (last.live, last.position_s(now)), default=latest)
        viewers = sum(last.viewers for last in self._gateways.values())
        self.aggregate = AggregatedPlayhead(furthest.playhead_s, viewers, furthest.observed_at)
        return self.aggregate
