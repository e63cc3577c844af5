"""The description of a process, from which the supervisor runs it."""

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
    """Raises NotReadyError until the process does its work, and ServerUnresponsiveError if the process
    accepts a connection and does not answer."""
    alive: Callable[[], Awaitable[None]] | None = None
    """Health check while the process is ready. Raises NotReadyError if there is no answer, and
    ServerUnhealthyError if the process answers that it cannot do its work. None: no health check."""
    ask_every_s: float | None = None
    """Pause between two health checks, seconds. None: `health_checks.ASK_EVERY_S`."""
    answer_s: float = 10.0
    """Time limit of a health check, seconds."""
    directory: Path | None = None
    """Folder of the process's data. Without space there, a restart does not help."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The complete environment, except the lifeline: nothing is inherited from the supervisor's own."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Called before every start. An exception counts as a crash."""
    port: int | None = None
    pid_file: Path | None = None
    """File to which a guard writes the process id of its server."""

    @property
    def name(self) -> str:
        return self.member.name
