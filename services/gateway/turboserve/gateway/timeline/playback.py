"""What the timeline publishes and shows."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.fidelity import Tier
from turboserve.static_frozen import statically_frozen


@statically_frozen()
class Publish:
    """Publish a session's playhead to its worker and the state store. `viewers` 0: the last viewer left."""

    session: str
    playhead_s: float
    viewers: int
    live: bool = True
    """Whether a viewer has reported lately. If not, `playhead_s` is the last one known."""
    age_s: float = 0.0
    """See `Playhead.age_s`."""


@dataclass(frozen=True)
class Stalled:
    """A viewer of `session` ran out of video while it should play."""

    session: str


@dataclass(frozen=True)
class Recovered:
    """A viewer of `session` plays again, `seconds` after it stalled."""

    session: str
    seconds: float


Command = Publish | Stalled | Recovered


@dataclass(frozen=True)
class View:
    """The current playback of a session."""

    playhead_s: float
    viewers: int
    slack_s: float
    """Playout slack: media delivered ahead of the playhead (SlackServe, 3.1: P)."""
    credit_s: float
    """Service credit: slack less the time that the next chunk takes (SlackServe, eq. 1, with R = 0)."""
    stalls: int
    worker_credit_s: float | None = None
    """Service credit as the worker measured it for the newest chunk that was sent. None: not known."""
    tier: Tier | None = None
    """Tier as the worker measured it for that chunk. None: not known."""
