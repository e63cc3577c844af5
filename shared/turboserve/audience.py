"""Where a session's viewers are, over all gateways that have some. Pure: told what was heard, and when."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.workers import Playhead

SILENT_S = 5.0
"""A gateway speaks several times a second of what is watched through it; after so long without a word it is
gone, and so are its viewers."""


@dataclass(frozen=True)
class AggregatedPlayhead:
    """What all gateways say of one session, taken together."""

    playhead_s: float
    """Of the viewer who is furthest: nobody needs the next chunk earlier. Who has been silent for long counts
    only where all are. With no viewer left, where the last one was."""
    viewers: int
    heard_at: float
    """When `playhead_s` was heard, in the time that was given."""


@dataclass(frozen=True)
class _GatewayReport:
    """What one gateway said last."""

    playhead_s: float
    viewers: int
    live: bool
    heard_at: float


class Audience:
    """One session's viewers, as each gateway last said. Gateways that send no id count as one."""

    def __init__(self) -> None:
        self._gateways: dict[str | None, _GatewayReport] = {}
        self.aggregate: AggregatedPlayhead | None = None
        """As of the last word; None: there was none yet."""

    def update(self, report: Playhead, now: float) -> AggregatedPlayhead:
        """A gateway spoke, at monotonic time `now` (seconds)."""
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
