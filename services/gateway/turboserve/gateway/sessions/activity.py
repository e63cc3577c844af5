"""What the user wants of a session, as clients see it."""

from __future__ import annotations

from enum import StrEnum

from turboserve.contracts.sessions import Activity, SessionRecord


class PublicActivity(StrEnum):
    """What the user wants of the session, independent of its current phase."""

    WATCHING = "watching"
    PAUSED = "paused"
    IDLE = "idle"
    """No viewer has watched for `TURBOSERVE_IDLE_AFTER_S`."""
    ENDED = "ended"
    """The session has ended: it generates no video any more."""


def activity_of(record: SessionRecord) -> PublicActivity:
    """Return the activity of the row, which keeps its last value when the session ends."""
    if record.phase.ended:
        return PublicActivity.ENDED
    match record.activity:
        case Activity.WATCHING:
            return PublicActivity.WATCHING
        case Activity.PAUSED:
            return PublicActivity.PAUSED
        case Activity.IDLE:
            return PublicActivity.IDLE
