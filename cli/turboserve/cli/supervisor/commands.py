"""What the supervisor's core tells its shell to do, or to write down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    name: str


@dataclass(frozen=True)
class Terminate:
    name: str


@dataclass(frozen=True)
class Kill:
    name: str


@dataclass(frozen=True)
class AllReady:
    """Everything has been ready; said once."""


@dataclass(frozen=True)
class Crashed:
    """For the log: `name` ended by itself and is started again after `delay_s`."""

    name: str
    delay_s: float


@dataclass(frozen=True)
class Hangs:
    """For the log: `name` is there and has not answered `unanswered` times in a row; it is killed."""

    name: str
    unanswered: int


@dataclass(frozen=True)
class Failing:
    """For the log: `name` answered `failures` times in a row that it cannot do its work; it is restarted."""

    name: str
    failures: int
    reason: str


@dataclass(frozen=True)
class Alarm:
    """For the log: `name` does not serve, and restarting it does not help at the moment."""

    name: str
    reason: str


@dataclass(frozen=True)
class AlarmOver:
    """For the log: `name` serves again."""

    name: str


@dataclass(frozen=True)
class GaveUp:
    """`name` never came up; the stack stops."""

    name: str
    attempts: int
    refused: bool = False
    """It refused its settings, which another attempt would not change."""


@dataclass(frozen=True)
class Done:
    """Everything has ended; said once, last."""


Command = Launch | Terminate | Kill | AllReady | Crashed | Hangs | Failing | Alarm | AlarmOver | GaveUp | Done
