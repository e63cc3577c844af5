"""Aggregates the playheads of one session's viewers over all gateways. Pure: callers pass the time in."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.workers import Playhead

SILENT_S = 5.0
"""A gateway reports several times a second about the sessions watched through it. A gateway that has been
silent for this long counts as gone, with its viewers."""


@dataclass(frozen=True)
class AggregatedPlayhead:
    """The reports of all gateways about one session, combined."""

    playhead_s: float
    """Playhead of the viewer who is furthest ahead: that viewer needs the next chunk first. Gateways whose
    viewers are all silent count only if there is no other. With no viewer left, the last reported
    playhead."""
    viewers: int
    heard_at: float
    """When `playhead_s` was reported, in the time of `update`."""


@dataclass(frozen=True)
class _GatewayReport:
    """The newest report of one gateway."""

    playhead_s: float
    viewers: int
    live: bool
    heard_at: float


class Audience:
    """The viewers of one session, by each gateway's newest report. Gateways that send no id count as one."""

    def __init__(self) -> None:
        self._gateways: dict[str | None, _GatewayReport] = {}
        self.aggregate: AggregatedPlayhead | None = None
        """As of the newest report. None: no report yet."""

    def update(self, report: Playhead, now: float) -> AggregatedPlayhead:
        """Take a gateway's report, received at monotonic time `now` (seconds). Returns the new aggregate."""
        latest = _GatewayReport(report.playhead_s, report.viewers, report.live, now)
        self._gateways[report.gateway] = latest
        self._gateways = {
            gateway: last
            for gateway, last in self._gateways.items()
            if last.viewers and now - last.heard_at <= SILENT_S
        }
        furthest = max(self._gateways.values(), key=lambda last: (last.live, last.playhead_s), default=latest)
        viewers = sum(last.viewers for last in self._gateways.values())
        self.aggregate = AggregatedPlayhead(furthest.playhead_s, viewers, furthest.heard_at)
        return self.aggregate
