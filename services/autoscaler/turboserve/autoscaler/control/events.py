"""What the controller is told, and what it answers: plain values that can be logged and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turboserve.contracts.autoscale import ProfileTable
from turboserve.contracts.pool import LoadFeedback

# Events


@dataclass(frozen=True)
class ControlTick:
    """Time passes. Needed about every second: silence is noticed, and held actions are taken, by it."""


@dataclass(frozen=True)
class FeedbackReceived:
    """The scheduler's feedback about the model that this pool serves. May be lost, late, doubled or wrong."""

    feedback: LoadFeedback


class SessionChange(StrEnum):
    """What sessions do, as far as volatility is concerned (TurboServe, 4)."""

    ARRIVAL = "arrival"
    """session.created: it is newly active, too."""
    DEPARTURE = "departure"
    """session.ended."""
    ACTIVATION = "activation"
    """session.resume_requested: its user is back."""
    IDLING = "idling"
    """session.suspended."""


@dataclass(frozen=True)
class SessionChanged:
    """A session of this pool's model came, went, or changed between active and idle."""

    kind: SessionChange
    sessions: int = 1


@dataclass(frozen=True)
class PoolObserved:
    """The pool as it is. Starting workers are coming: they count towards the target, not towards serving."""

    ready: int
    starting: int = 0
    suspended: int = 0
    """Sessions whose state is in some worker's host memory: the pool does not shrink to zero under them."""


@dataclass(frozen=True)
class SizeOverridden:
    """An operator wants this many workers, whatever the load; None: back to the controller."""

    size: int | None
    who: str = "operator"


@dataclass(frozen=True)
class TableReplaced:
    """Another table of profiled parameters, in force from the next decision on."""

    table: ProfileTable


@dataclass(frozen=True)
class DryRunSet:
    """From now on only explain (True), or act (False)."""

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
    WAKE = "wake"
    LIMITS = "limits"
    TABLE = "table"


@dataclass(frozen=True)
class Decision:
    """The target from now on, and why. `at` is the monotonic time of the event."""

    at: float
    action: ScalingAction
    target: int
    previous: int
    advice: int
    """What the controller would have; differs from `target` in a dry run and under an override."""
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
