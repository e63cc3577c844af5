"""What rows tell of the behavior of sessions: their ages, prompts and chunks. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 3_600.0
"""Sessions that have left within this time count, seconds."""
ENDED_LIMIT = 600
"""Maximum number of sessions that have ended and count, the last ones."""
LIVE_LIMIT = 500
"""With more live sessions of a model, nothing is learned: that would take too much processor time."""


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """What a session's row says of its behavior. Times are Unix seconds."""

    session: str
    tenant: str
    created_at: float
    left_at: float | None
    """When it ended, or was suspended without a viewer. None: it has done neither."""
    changes: int
    """Accepted prompts and controls after the first prompt."""
    chunks: int
    holds_slot: bool
    ended: bool


@dataclass(frozen=True, slots=True)
class SessionSpan:
    """What is known of one session's behavior at one moment."""

    session: str
    tenant: str
    age_s: float
    """Seconds since its creation, or until it has left its slot."""
    changes: int
    """As in `SessionTimes`."""
    chunks: int
    left_ago_s: float | None = None
    """Seconds since it has ended or was suspended without a viewer. None: it has done neither."""
    holds_slot: bool = False
    since_s: float = 0.0
    """Its age when the window began; 0 if it was created later."""

    @property
    def created_ago_s(self) -> float:
        return self.age_s + (self.left_ago_s or 0.0)


def spans_of(rows: Iterable[SessionTimes], since: float, now: float) -> tuple[list[SessionSpan], float]:
    """Return what the rows tell at `now` of the sessions of the window, and when it began (Unix seconds).

    The window begins at `since`. If as many have ended as are read, it begins when the first of them ended.
    """
    rows = list(rows)
    ended = sorted(row.left_at for row in rows if row.ended and row.left_at is not None)
    if len(ended) >= ENDED_LIMIT:
        since = max(since, ended[-ENDED_LIMIT])
    found = []
    for row in rows:
        end = now if row.left_at is None else min(row.left_at, now)
        # A wall clock may step back.
        age_s = max(end - row.created_at, 0.0)
        if row.left_at is None or end > since:
            before_s = min(max(since - row.created_at, 0.0), age_s)
            left_ago_s = None if row.left_at is None else now - end
            found.append(
                SessionSpan(
                    row.session,
                    row.tenant,
                    age_s,
                    row.changes,
                    row.chunks,
                    left_ago_s,
                    row.holds_slot,
                    before_s,
                )
            )
    return found, since
