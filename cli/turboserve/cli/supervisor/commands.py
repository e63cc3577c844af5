"""Commands from the supervisor's core to its shell, including log entries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Start the process of `name`."""

    name: str


@dataclass(frozen=True)
class Terminate:
    """Send SIGTERM to `name`."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to `name`."""

    name: str


@dataclass(frozen=True)
class AllReady:
    """Everything has been ready. Issued once."""


@dataclass(frozen=True)
class Crashed:
    """For the log: `name` has ended by itself, and restarts after `delay_s`."""

    name: str
    delay_s: float


@dataclass(frozen=True)
class Hangs:
    """For the log: `name` runs and has not answered `unanswered` times in a row. It is killed."""

    name: str
    unanswered: int


@dataclass(frozen=True)
class Failing:
    """For the log: `name` answered `failures` times in a row that it cannot do its work. It is restarted."""

    name: str
    failures: int
    reason: str


@dataclass(frozen=True)
class Alarm:
    """For the log: `name` does not serve, and a restart does not help at the moment."""

    name: str
    reason: str


@dataclass(frozen=True)
class AlarmOver:
    """For the log: `name` serves again."""

    name: str


@dataclass(frozen=True)
class GaveUp:
    """`name` has never become ready, and the stack stops."""

    name: str
    attempts: int
    refused: bool = False
    """Whether it refused its settings, so that another attempt would not help."""


@dataclass(frozen=True)
class Done:
    """Everything has ended. Issued once, as the last command."""


Command = Launch | Terminate | Kill | AllReady | Crashed | Hangs | Failing | Alarm | AlarmOver | GaveUp | Done
