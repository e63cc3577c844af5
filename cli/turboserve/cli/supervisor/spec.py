"""What the supervisor has to know of a process in order to run it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turboserve.cli.embedded import NotReady
from turboserve.cli.supervisor.core import Member

__all__ = ["NotReady", "ProcessSpec"]


@dataclass(frozen=True)
class ProcessSpec:
    """One server or service."""

    member: Member
    kind: str
    """`server` or `service`."""
    command: Sequence[str]
    probe: Callable[[], Awaitable[None]]
    """Raises NotReady until the process does its work."""
    alive: Callable[[], Awaitable[None]] | None = None
    """Raises NotReady if nobody answers at all; asked while it is ready. None: not asked."""
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
