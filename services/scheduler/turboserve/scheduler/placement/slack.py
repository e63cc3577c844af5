"""Playout slack of sessions as last reported, and what is left of it now (SlackServe, 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.fidelity import SessionSlack, Tier

EXTRAPOLATE_S = 2.0
"""Longest time for which a slack is extrapolated, seconds. A worker reports each second and at once when a
tier changes. A worker that is silent for longer becomes suspect, and suspect workers take no part."""


@dataclass(frozen=True, slots=True)
class ReportedSlack:
    """One session's slack by its worker's last report. Times are in seconds."""

    slack_s: float
    """P: video that the viewer has left, or time until the first chunk's deadline, at `at`."""
    credit_s: float
    """C = P − (R + T), at `at`."""
    at: float
    """Arrival of the report, on the scheduler's monotonic clock."""
    tier: Tier = Tier.NORMAL
    playing: bool = True
    """Whether the slack shrinks with time."""


def reported(slack: SessionSlack, at: float) -> ReportedSlack:
    return ReportedSlack(slack.slack_s, slack.credit_s, at, slack.tier, slack.playing)


def slack_at(known: ReportedSlack, now: float) -> float:
    """Return a session's slack at monotonic time `now`, in seconds.

    While a viewer plays, the slack falls by the time since the report, but for at most R + T: by then the
    worker has finished the chunk in work or the next one, which adds at least as much as a real-time worker
    takes for it. The fall is also at most `EXTRAPOLATE_S`. The slack of a viewer who does not play stays.
    """
    if not known.playing:
        return known.slack_s
    generating_s = max(0.0, known.slack_s - known.credit_s)
    return known.slack_s - min(max(0.0, now - known.at), generating_s, EXTRAPOLATE_S)
