"""Events and decisions of the controller: plain values that can be logged and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.pool import LoadFeedback
from turboserve.static_frozen import statically_frozen

# Events


@dataclass(frozen=True)
class ControlTick:
    """Time has passed. Send it about every second: it detects silence and triggers delayed actions."""


@statically_frozen()
class FeedbackReceived:
    """The scheduler's feedback about the pool's model. It may be lost, late, repeated or wrong."""

    feedback: LoadFeedback


class SessionChange(StrEnum):
    """Changes of sessions that the detector counts (TurboServe, 4)."""

    ARRIVAL = "arrival"
    """Event session.created; the session is newly active."""
    DEPARTURE = "departure"
    """Event session.ended."""
    ACTIVATION = "activation"
    """Event session.resume_requested; the session is newly active."""
    IDLING = "idling"
    """Event session.suspended."""


@statically_frozen()
class SessionChanged:
    """Sessions of the pool's model were created or ended, or changed between active and idle."""

    kind: SessionChange
    sessions: int = 1


@statically_frozen()
class PoolObserved:
    """The pool's present state. Starting workers count towards the target and do not serve yet."""

    ready: int
    starting: int = 0
    suspended: int = 0
    """Sessions whose state is in a worker's host memory. They keep the pool from shrinking to zero."""


@dataclass(frozen=True)
class SizeOverridden:
    """An order for this many workers, whatever the load. None: the controller decides again."""

    size: int | None
    who: str = "operator"


@dataclass(frozen=True)
class TableReplaced:
    """A new table of profiled parameters, in force from the next decision on."""

    table: ProfileTable


@dataclass(frozen=True)
class DryRunSet:
    """Switch the dry run: only explain (True), or act (False)."""

    on: bool


Event = (
    ControlTick
    | FeedbackReceived
    | SessionChanged
    | PoolObserved
    | SizeOverridden
    | TableReplaced
    | DryRunSet
)


class ScalingAction(StrEnum):
    """What a decision does to the target."""

    OUT = "out"
    IN = "in"
    HOLD = "hold"
    OVERRIDE = "override"
    SWITCH = "switch"
    WAKE = "wake"
    LIMITS = "limits"
    TABLE = "table"


Explain = Callable[[], str]
"""Makes a text on demand."""


@statically_frozen(eq=False)
class Advice:
    """An advised action and size. `cause` is one word for `reason`."""

    action: ScalingAction
    size: int
    cause: str
    explain: Explain
    """Returns `reason`. Valid until the advisor gets another event: most advice is not recorded."""

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self.explain()


@dataclass(frozen=True)
class Decision:
    """The new target and the reason. `at` is the monotonic time of the event, in seconds."""

    at: float
    action: ScalingAction
    target: int
    previous: int
    advice: int
    """The controller's own choice. It differs from `target` only in a dry run or under an override."""
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
