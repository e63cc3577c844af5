"""What the supervisor has to know of a process in order to run it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turboserve.cli.embedded import (
    NotReadyError,
    ServerFullError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)
from turboserve.cli.supervisor.core import Member

__all__ = [
    "NotReadyError",
    "ProcessSpec",
    "ServerFullError",
    "ServerUnhealthyError",
    "ServerUnresponsiveError",
]


@dataclass(frozen=True)
class ProcessSpec:
    """One server or service."""

    member: Member
    kind: str
    """`server` or `service`."""
    command: Sequence[str]
    probe: Callable[[], Awaitable[None]]
    """Raises NotReadyError until the process does its work; ServerUnresponsiveError if it accepts a
    connection and does not answer."""
    alive: Callable[[], Awaitable[None]] | None = None
    """Asked while it is ready. Raises NotReadyError if nobody answers, ServerUnhealthyError if the answer is
    that the process cannot do its work. None: not asked."""
    ask_every_s: float | None = None
    """Between an answer and the next question; None: as `asking.ASK_EVERY_S`."""
    answer_s: float = 10.0
    """No answer within this is none."""
    directory: Path | None = None
    """Where it keeps its data: without room there, a restart does not help."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All of it, but for the lifeline: nothing of the supervisor's own is inherited."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Done before every start; an exception counts as a crash."""
    port: int | None = None
    pid_file: Path | None = None
    """Where a guard writes the process id of its server."""

    @property
    def name(self) -> str:
        return self.member.name
